"""``fmoe compare``: what runs reached, and how soon one reached what another ended with.

`runs` reads a run's folder, `groups` joins runs that differ in their seed and finds where a curve meets a loss, `table`
and `figure` show it.
"""
