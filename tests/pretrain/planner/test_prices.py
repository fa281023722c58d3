"""Prices of operations and collectives."""

from dataclasses import replace

import pytest
import torch

from pretrain.planner.cluster import load_cluster
from pretrain.planner.prices import steps_seconds, update_bytes
from pretrain.planner.trace import Collective, Operation

CLUSTER = load_cluster("h100-64")


def operation(name, shapes, flops=0, moved=0, dtype=torch.bfloat16):
    return Operation(name, shapes, dtype, flops, moved)


@pytest.mark.parametrize(
    ("step", "term", "seconds"),
    [
        (
            operation("aten.mm.default", ((512, 1024), (1024, 256)), 2 * 512 * 1024 * 256),
            "gemm",
            CLUSTER.gemm_seconds(512, 1024, 256, "bf16"),
        ),
        (
            operation("aten.addmm.default", ((256,), (512, 1024), (1024, 256)), 2 * 512 * 1024 * 256),
            "gemm",
            CLUSTER.gemm_seconds(512, 1024, 256, "bf16"),
        ),
        (
            operation("aten.bmm.default", ((8, 64, 32), (8, 32, 16)), 2 * 8 * 64 * 32 * 16),
            "gemm",
            CLUSTER.gemm_seconds(64, 32, 16, "bf16", 8),
        ),
        (
            operation("aten._scaled_dot_product_flash_attention_for_cpu.default", ((2, 8, 128, 64),) * 3),
            "attention",
            CLUSTER.attention_seconds(16, 128, 64, "bf16"),
        ),
        (
            operation("aten.add.Tensor", ((1000,),), moved=12_000, dtype=torch.float32),
            "memory",
            CLUSTER.move_seconds(12_000),
        ),
        (operation("aten.empty_like.default", ((1000,),), moved=8000), "memory", 0.0),
        (
            Collective("alltoall_base", tuple(range(8)), 1 << 20),
            "exchange",
            CLUSTER.collective_seconds("all_to_all", 8, 8, 1 << 20),
        ),
        (
            Collective("allgather", tuple(range(0, 64, 8)), 1 << 20),  # a list of 8 tensors of these bytes
            "groups",
            CLUSTER.collective_seconds("all_gather", 8, 64, 8 << 20),
        ),
        (Collective("allreduce", (3,), 1 << 20), "groups", 0.0),
        (Collective("send", (0, 1), 1 << 20), "groups", 0.0),
    ],
)
def test_a_step_costs_what_the_cluster_says(step, term, seconds):
    assert steps_seconds(CLUSTER, {step: 3}) == {term: pytest.approx(3 * seconds)}


@pytest.mark.parametrize(("gated", "width"), [(False, 512), (True, 1024)])
@pytest.mark.parametrize(("name", "passes"), [("expert_ffn", 1), ("expert_ffn_backward", 2)])
def test_experts_cost_their_passes(gated, width, name, passes):
    shapes = ((256, 128), (4,), (4, width, 128), (4, 128, 512))
    flops = passes * 2 * 256 * 128 * (width + 512)
    expected = passes * CLUSTER.experts_seconds(4, 64, 128, 512 * (1.5 if gated else 1), "bf16")
    priced = steps_seconds(CLUSTER, {operation(f"fmoe_native.{name}.default", shapes, flops): 1})
    assert priced == {"experts": pytest.approx(expected)}


def test_the_host_takes_its_time_for_each_pass():
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, host=1.0, host_backward=0.25))
    forward = operation("aten.empty_like.default", ((1000,),), moved=8000)
    steps = {forward: 3, replace(forward, is_backward=True): 4, Collective("allreduce", (3,), 1 << 20): 1}
    assert steps_seconds(cluster, steps) == {"memory": 0, "groups": 0, "host": 3 + 4 * 0.25 + 1}


def test_operations_cost_what_they_do_within_steps():
    tables = {
        "operations": {"aten.add.Tensor": {"bf16": ((100.0, 7.0, 0.0),)}},
        "in_step": {"aten.mm.default": {"bf16": ((100.0, 3.0, 0.0),)}},
    }
    cluster = replace(CLUSTER, device=replace(CLUSTER.device, **tables))
    add = operation("aten.add.Tensor", ((10,),), moved=100)
    product = operation("aten.mm.default", ((512, 1024), (1024, 256)), 2 * 512 * 1024 * 256, moved=100)
    seconds = steps_seconds(cluster, {add: 1, product: 1})
    assert seconds == {"memory": 7.0, "gemm": pytest.approx(3 * CLUSTER.gemm_seconds(512, 1024, 256, "bf16"))}


def test_an_update_reads_and_writes_what_adam_does():
    assert update_bytes("fp32", 10, 80) == 10 * (2 * 8 + 2 * 4 + 4)
    assert update_bytes("bf16", 10, 120) == 10 * (2 * 12 + 2 * 4 + 2)
