"""Data parallelism with experts: which ranks a gradient is averaged over, and its norm."""

from fmoe.parallel.gradients import average_gradients, clip_grad_norm_, grad_norm, is_expert

__all__ = ["average_gradients", "clip_grad_norm_", "grad_norm", "is_expert"]
