"""Experts: ``experts(rows, counts) -> rows`` with the rows of each local expert next to each other."""

from fmoe.experts.ffn import FFNExperts

__all__ = ["FFNExperts"]
