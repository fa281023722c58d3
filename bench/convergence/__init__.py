"""Recipes of ``make compare``, dense and Mixture-of-Experts models of equal active FLOPs, and what trains them."""
