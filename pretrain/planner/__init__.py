"""``fmoe plan``: the size of a model for a budget by scaling laws, clusters and their calibration, traces of steps."""
