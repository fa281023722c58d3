"""The planner: sizes and splits of runs (``fmoe plan``, docs/planner.md)."""
