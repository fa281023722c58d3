"""Runs with memory: no split changes them, a resumed run is bit-equal, and evaluation has the trainer's memory."""

import json
from dataclasses import replace

import numpy as np
import pytest
from test_run_optim import assert_split_equals_one
from test_run_split_engine import STEADY
from test_run_training import steps, train

from fmoe.errors import UserError
from pretrain.config import ParallelConfig, load_recipe

XL = {"position": "transformer_xl", "memory_length": 24}  # more than a sequence of 16
SPLITS = {
    "tensor and sequence": {"tensor": 2},
    "tensor alone": {"tensor": 2, "sequence": False},
    "expert": {"expert": 2},
    "data": {"data": 2},
    "pipeline": {"pipeline": 2},
    "virtual pipeline": {"pipeline": 2, "virtual_pipeline": 2},
}


@pytest.mark.by_default("tensor and sequence", "expert")
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_equal_one(forks, split):
    """Losses, weights, moments and the memory itself, with queries in groups and dropout keyed by token."""
    layers = {"num_layers": 4} if "virtual" in split else {}
    model = replace(STEADY.model, **XL, num_heads=4, num_query_groups=2, dropout=0.1, **layers)
    alone = replace(STEADY, model=model)
    recipe = replace(alone, parallel=ParallelConfig(**SPLITS[split]))
    assert_split_equals_one(forks, recipe, alone, "memory/layers.2", "biases.content", "linear_position")


@pytest.mark.slow
def test_recomputed_layers_have_the_memory_of_the_first_time(forks):
    alone = replace(STEADY, model=replace(STEADY.model, **XL))
    recipe = replace(alone, parallel=ParallelConfig(data=2, recompute="full"))
    assert_split_equals_one(forks, recipe, alone, "memory/layers.2")
