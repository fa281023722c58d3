"""fmoe: Mixture-of-Experts layers for PyTorch, from one CPU to a cluster. Needs torch alone."""

__version__ = "0.1.0"
