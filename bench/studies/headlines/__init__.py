"""Recipes of ``make headlines``, scaled-down models with experts, and their training beside dense twins."""
