"""The way from ``fmoe train`` to a running trainer: options, processes, locks and where a run begins."""
