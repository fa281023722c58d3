"""Optimizers for stacked experts: all but `AdamW8bit` treat each expert of a stack as a separate tensor."""

from fmoe.optim.adafactor import Adafactor
from fmoe.optim.eight_bit import AdamW8bit
from fmoe.optim.lamb import Lamb
from fmoe.optim.lars import Lars
from fmoe.optim.layout import Blocks, Layout, Shards, is_matrix, is_stacked, param_groups
from fmoe.optim.matrices import Matrices, hidden_matrices, orthogonalize
from fmoe.optim.muon import Muon
from fmoe.optim.one_bit import OneBitAdam, OneBitLamb
from fmoe.optim.rows import RowAdagrad, RowAdam

__all__ = [
    "Adafactor",
    "AdamW8bit",
    "Blocks",
    "Lamb",
    "Lars",
    "Layout",
    "Matrices",
    "Muon",
    "OneBitAdam",
    "OneBitLamb",
    "RowAdagrad",
    "RowAdam",
    "Shards",
    "hidden_matrices",
    "is_matrix",
    "is_stacked",
    "orthogonalize",
    "param_groups",
]
