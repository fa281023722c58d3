"""Traces of steps on fake tensors, against steps of the same engine on real ones."""

from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engines import RECIPE, Samples, Split, engine_of
from forks import only, refusal, values
from torch.utils._python_dispatch import TorchDispatchMode

from pretrain.config import AttentionConfig
from pretrain.planner.trace import operation_of

DROPLESS = replace(RECIPE.model.moe, capacity_factor=None, jitter=0.0)
BASE = replace(RECIPE, model=replace(RECIPE.model, moe=DROPLESS))


def measured(recipe):
    """Bytes that autograd held in a step, and the rows that this rank sent to each expert, by layer."""
    from fmoe.kernels.rows import DispatchPlan
    from fmoe.moe import MoE
    from pretrain.planner.trace import Saved, Trace

    engine = engine_of(recipe)
    rows = {}
    layers = []
    split = MoE.split
    from_routing = DispatchPlan.from_routing

    def noted_split(layer, *arguments):
        layers.append(layer.layer_number)
        return split(layer, *arguments)

    def noted_plan(routing, num_experts):
        plan = from_routing(routing, num_experts)
        rows[layers[-1]] = plan.count_E.tolist()
        return plan

    trace = Trace()
    with (
        mock.patch.object(MoE, "split", noted_split),
        mock.patch.object(DispatchPlan, "from_routing", staticmethod(noted_plan)),
        Saved(trace, engine),
    ):
        engine.backward(0, Samples())
    return trace.saved, rows


def traced(recipe, rank, rows_of_rank):
    from megatron.core import parallel_state

    from pretrain.planner.trace import trace_step

    dist.destroy_process_group()

    def loads(layer, num_ranks, assignments):
        group = parallel_state.get_expert_model_parallel_group()
        assert num_ranks == group.size()
        rows = np.array([rows_of_rank[rank][layer] for rank in dist.get_process_group_ranks(group)])
        assert rows.sum(1).max() <= assignments
        return rows

    return trace_step(recipe, rank, loads).saved


@pytest.mark.slow
@pytest.mark.parametrize(
    "text",
    [
        "one",
        "one bf16",
        "EP2",
        "TP2",
        "CP2",
        "ETP2 TP2",
        "PP2 EP2",
        "PP2 VPP2",
        "DP2 ZeRO1",
        "DP2 ZeRO2",
        "EP2 DP2 ZeRO3",
    ],
)
def test_saved_bytes_are_those_of_a_real_step(forks, text):
    _compare(forks, text, Split.of(text).recipe(BASE))


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        {"exchange": "hierarchical", "node_size": 1},
        {"exchange": "hierarchical", "node_size": 2},
        {"chunks": 2},
        {"max_rows": 40},
    ],
    ids=str,
)
@pytest.mark.parametrize("capacity_factor", [None, 1.0])
def test_exchanges_save_what_they_do_in_a_real_step(forks, options, capacity_factor):
    recipe = Split.of("EP2").recipe(BASE)
    moe = replace(DROPLESS, capacity_factor=capacity_factor)
    recipe = replace(recipe, model=replace(recipe.model, moe=moe), parallel=replace(recipe.parallel, **options))
    _compare(forks, "EP2", recipe)


@pytest.mark.parametrize("exchange", ["padded", "all_gather"])
def test_other_exchanges_are_refused(forks, exchange):
    recipe = Split.of("EP2").recipe(BASE)
    recipe = replace(recipe, parallel=replace(recipe.parallel, exchange=exchange))
    assert f"parallel.exchange={exchange}" in refusal(forks.run(1, _operations, recipe))


def _compare(forks, text, recipe):
    layers = 4 if "VPP" in text else 2
    size = recipe.parallel.world_size
    # One micro batch, whose rows are those that `measured` noted; the interleaved schedule needs two.
    sequences = recipe.parallel.expert * recipe.parallel.data * 2 * (2 if "VPP" in text else 1)
    recipe = replace(
        recipe,
        model=replace(recipe.model, num_layers=layers),
        train=replace(recipe.train, micro_batch=2, global_batch=sequences),
    )
    real = values(forks.run(size, measured, recipe))
    rows = {layer: of_layer for _, rows in real for layer, of_layer in rows.items()}
    rows_of_rank = [{**rows, **own} for _, own in real]
    for rank, (saved, _) in enumerate(real):
        # Ranks that divide experts' hidden units are given equal numbers of rows.
        expected = pytest.approx(saved, rel=0.02) if recipe.parallel.expert_tensor > 1 else saved
        assert only(forks.run(1, traced, recipe, rank, rows_of_rank)) == expected, f"rank {rank}"


def _operations(recipe, on_gpu=False):
    """Name, shapes and moved bytes of each operation of a step."""
    from pretrain.planner.loads import of_slowest, uniform
    from pretrain.planner.trace import Operation, trace_step

    dist.destroy_process_group()
    trace = trace_step(recipe, 0, of_slowest(uniform(4)), on_gpu)
    steps = [step for counts in trace.steps.values() for step in counts]
    return [(step.name, step.shapes, step.moved) for step in steps if isinstance(step, Operation)]


def test_a_gather_moves_the_rows_that_it_writes(forks):
    gathers = [
        (shapes, moved)
        for name, shapes, moved in only(forks.run(1, _operations, Split.of("EP2").recipe(BASE)))
        if "index_select" in name and len(shapes[0]) == 2 and shapes[0][0] > shapes[1][0]
    ]
    assert gathers
    for ((_, width), (rows,)), moved in gathers:
        assert 2 * 4 * rows * width < moved <= 2 * 4 * rows * width + 8 * rows


@pytest.mark.parametrize(
    ("call", "moved"),
    [
        (lambda x, rows: x.add(x), 3 * 400),
        (lambda x, rows: x.zero_(), 400),
        (lambda x, rows: x.new_zeros(100), 400),
        (lambda x, rows: torch.ones_like(x), 400),
        (lambda x, rows: x.index_select(0, rows), 3 * 8),  # the numbers of the rows count like the rows
        (lambda x, rows: x.index_add_(0, rows, torch.ones(2)), 16 + 3 * 8),
    ],
)
def test_bytes_that_an_operation_reads_and_writes(call, moved):
    found = []

    class Calls(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            result = func(*args, **(kwargs or {}))
            found.append(operation_of(func, args, kwargs or {}, result))
            return result

    x = torch.rand(100, dtype=torch.float32, device="cpu")
    rows = torch.tensor([3, 4], dtype=torch.int64)
    with Calls():
        call(x, rows)
    assert found[-1].moved == moved
    assert (found[-1].dtype, found[-1].is_backward) == (torch.float32, False)


def _backward_operations(recipe):
    """Names of operations by whether autograd calls them."""
    from pretrain.planner.loads import of_slowest, uniform
    from pretrain.planner.trace import Operation, trace_step

    dist.destroy_process_group()
    names = {False: set(), True: set()}
    for steps in trace_step(recipe, 0, of_slowest(uniform(4))).steps.values():
        for step in steps:
            if isinstance(step, Operation):
                names[step.is_backward].add(step.name)
    return names


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_autograd_calls_backward_operations(forks, recompute):
    recipe = Split.of("one").recipe(BASE)
    recipe = replace(recipe, parallel=replace(recipe.parallel, recompute=recompute))
    names = only(forks.run(1, _backward_operations, recipe))
    assert any("backward" in name for name in names[True])
    assert not any("backward" in name for name in names[False])
    assert "aten.native_layer_norm.default" in names[False] - names[True]  # also if it runs again in the backward pass


def _on_processors(recipe, on_gpu):
    """The operations on processors with and without bf16 products."""
    from megatron_patch import bf16_linear
    from pretrain.planner.loads import of_slowest, uniform
    from pretrain.planner.trace import trace_step

    dist.destroy_process_group()
    found = []
    for is_needed in (False, True):
        with mock.patch.object(bf16_linear, "is_needed", lambda needed=is_needed: needed):
            found.append(trace_step(recipe, 0, of_slowest(uniform(4)), on_gpu).steps)
    return found


@pytest.mark.parametrize("on_gpu", [True, False])
def test_what_a_gpu_does_is_the_same_on_every_processor(forks, on_gpu):
    with_bf16, without = only(forks.run(1, _on_processors, Split.of("one bf16").recipe(BASE), on_gpu))
    assert (with_bf16 == without) == on_gpu


def test_multi_latent_attention_is_one_kernel_on_a_gpu(forks):
    latent = AttentionConfig(num_heads=2, kv_lora_rank=8, qk_head_dim=8, qk_rope_head_dim=4, v_head_dim=8)
    recipe = replace(BASE, model=replace(BASE.model, attention=latent))
    length = recipe.model.sequence_length
    operations = only(forks.run(1, _operations, recipe, True))
    assert any("scaled_dot_product" in name and "backward" in name for name, _, _ in operations)
    assert not any(shape[-2:] == (length, length) for _, shapes, _ in operations for shape in shapes)
