"""``fmoe compare``: final losses of runs, and how soon one run reaches another's final loss.

`runs` reads a run's folder. `groups` joins runs that differ only in their seed, and finds where a curve reaches a loss.
`table` and `figure` present the result.
"""
