"""Recipes of ``make compare``, dense and Mixture-of-Experts models of equal active FLOPs, and their training."""
