"""Clusters: files that load or say why not, and seconds that meet the points and formulas they come from."""

import itertools
import math
from dataclasses import replace

import pytest

from fmoe.errors import UserError
from pretrain.engine.flops import _GPUS
from pretrain.planner.cluster import CLUSTERS, Cluster, Device, Link, load_cluster

SHIPPED = {"a100": 512, "b200": 64, "h100": 2048, "h200": 256, "tpu-v5p": 1024}
KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send")

MEASURED = """
name = "small"
source = "made up for a test"
num_ranks = 4
[device]
memory = 1e9
bandwidth = 1e10
launch = 1e-6
efficiency = 1.0
peak = {fp32 = 1e11}
[device.measured.gemm]
fp32 = [
    [1, 8, 8, 1e-6, 0.1], [1, 8, 64, 2e-6, 0.1], [1, 64, 8, 3e-6, 0.1], [1, 64, 64, 5e-6, 0.1],
    [16, 8, 8, 4e-6, 0.1], [16, 8, 64, 7e-6, 0.1], [16, 64, 8, 6e-6, 0.1], [16, 64, 64, 40e-6, 0.0],
]
[[links]]
size = 2
bandwidth = 1e9
latency = 1e-6
[[links]]
size = 4
bandwidth = 1e8
latency = 1e-5
[collectives.all_reduce]
2 = [[1024, 1e-5, 0.2], [1048576, 1e-3, 0.0]]
"""


def write(path, text):
    path.write_text(text)
    return str(path)


@pytest.fixture
def small(tmp_path) -> Cluster:
    return load_cluster(write(tmp_path / "small.toml", MEASURED))


def by_formula(**links) -> Cluster:
    """Nodes of 8 ranks with fast links, 64 ranks in all."""
    device = Device(memory=1.0, peak={"bf16": 1e12}, efficiency=0.5, bandwidth=1e9, launch=1e-6)
    levels = (Link(size=8, bandwidth=100.0, latency=0.25), Link(size=64, bandwidth=10.0, latency=2.0))
    return Cluster(name="a", source="b", num_ranks=64, links=levels, device=device)


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_clusters(name):
    cluster = load_cluster(f"{name}-{SHIPPED[name]}")
    assert (cluster.name, cluster.num_ranks) == (f"{name}-{SHIPPED[name]}", SHIPPED[name])
    assert "published figures" in cluster.source and cluster.price is None
    assert not cluster.device.measured and not cluster.collectives
    for dtype, flops in _GPUS.get(name.upper(), {}).items():
        assert cluster.device.peak[dtype] == flops  # those of the MFU
    seconds = cluster.gemm_seconds(2**14, 2**14, 2**14, "bf16")
    assert seconds == pytest.approx(2**43 / cluster.device.peak["bf16"] / cluster.device.efficiency, rel=0.01)


def test_every_shipped_file_is_tested():
    assert {path.stem for path in CLUSTERS.glob("*.toml")} == set(SHIPPED)


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("h100", ["'h100'", "h100-RANKS"]),
        ("h100-x", ["'h100-x'", "h100-RANKS"]),
        ("h10-8", ["'h10-8'", "h100-RANKS"]),
        ("h100-0", ["'h100-0'", "1 to 16384"]),
        ("h100-16385", ["'h100-16385'", "1 to 16384"]),
        ("no/such.toml", ["'no/such.toml'", "h100-RANKS"]),
        ("x" * 300, ["xxx", "255"]),
    ],
)
def test_a_cluster_that_is_not_there(name, words):
    with pytest.raises(UserError) as error:
        load_cluster(name)
    assert all(word in str(error.value) for word in words) and "\n" not in str(error.value)


# Edits of MEASURED, and what the message must name: key, value, limit.
INVALID = {
    "a table's unknown key": ("launch = 1e-6", "launch = 1e-6\nlunch = 2", ["device.lunch"]),
    "an unknown key": ("num_ranks = 4", "num_ranks = 4\nnodes = 3", ["nodes"]),
    "a link's unknown key": ("size = 2", "size = 2\nwidth = 2", ["links.0.width"]),
    "a missing figure": ("memory = 1e9\n", "", ["device.memory", "missing"]),
    "a missing latency": ("latency = 1e-5", "", ["links.1.latency", "missing"]),
    "zero": ("bandwidth = 1e10", "bandwidth = 0", ["device.bandwidth=0", "more than 0"]),
    "negative": ("launch = 1e-6", "launch = -1e-6", ["device.launch=-1e-06", "at least 0"]),
    "infinite": ("bandwidth = 1e8", "bandwidth = inf", ["links.1.bandwidth=inf", "finite"]),
    "not a number": ("memory = 1e9", "memory = nan", ["device.memory=nan", "finite"]),
    "a text": ("memory = 1e9", 'memory = "80 GB"', ["device.memory='80 GB'", "number"]),
    "a date": ("memory = 1e9", "memory = 2026-01-01", ["device.memory='2026-01-01'", "number"]),
    "efficiency above 1": ("efficiency = 1.0", "efficiency = 1.5", ["device.efficiency=1.5", "at most 1"]),
    "no peak": ("peak = {fp32 = 1e11}", "peak = {}", ["device.peak={}"]),
    "an unknown dtype": ("peak = {fp32 = 1e11}", "peak = {int8 = 1e11}", ["device.peak.int8", "fp32"]),
    "an unknown collective": ("[collectives.all_reduce]", "[collectives.broadcast]", ["collectives.broadcast", "send"]),
    "no ranks": ("num_ranks = 4", "num_ranks = 0", ["num_ranks=0", "at least 1"]),
    "ranks without links": ("num_ranks = 4", "num_ranks = 5", ["num_ranks=5", "at most 4"]),
    "half a rank": ("num_ranks = 4", "num_ranks = 2.5", ["num_ranks=2.5", "integer"]),
    "sizes that do not ascend": ("size = 2", "size = 4", ["links.1.size=4", "multiple of 4"]),
    "sizes that descend": ("size = 2", "size = 8", ["links.1.size=4", "multiple of 8"]),
    "sizes that do not divide": ("size = 2", "size = 3", ["links.1.size=4", "multiple of 3"]),
    "a point without spread": ("1e-3, 0.0]", "1e-3]", ["collectives.all_reduce.2", "[1048576.0, 0.001]", "spread"]),
    "a point in no time": ("40e-6, 0.0]", "0, 0.0]", ["device.measured.gemm.fp32", "[16.0, 64.0, 64.0, 0.0, 0.0]"]),
    "a point that is negative": ("[[1024,", "[[-1,", ["collectives.all_reduce.2.0.0=-1", "at least 0"]),
    "no points": (
        "2 = [[1024, 1e-5, 0.2], [1048576, 1e-3, 0.0]]",
        "2 = []",
        ["collectives.all_reduce.2", "at least 1"],
    ),
    "no price": ("[device]", '[price]\nper_rank_hour = 0\ncurrency = "EUR"\n[device]', ["price.per_rank_hour=0"]),
    "no TOML": ("[device]", "[device", ["cannot be read"]),
}


@pytest.mark.parametrize("case", INVALID)
def test_a_figure_that_cannot_be(case, tmp_path):
    old, new, words = INVALID[case]
    assert old in MEASURED
    path = write(tmp_path / "c.toml", MEASURED.replace(old, new))
    with pytest.raises(UserError) as error:
        load_cluster(path)
    message = str(error.value)
    assert all(word in message for word in [path, *words]), message
    assert "\n" not in message


def test_a_price(tmp_path):
    text = MEASURED + '[price]\nper_rank_hour = 2.5\ncurrency = "EUR"\n'
    price = load_cluster(write(tmp_path / "c.toml", text)).price
    assert (price.per_rank_hour, price.currency) == (2.5, "EUR")


def test_products_at_points_between_and_beyond(small):
    for m, k, n, seconds, _ in small.device.measured["gemm"]["fp32"]:
        assert small.gemm_seconds(m, k, n, "fp32") == seconds
    assert small.gemm_seconds(4, 8, 8, "fp32") == pytest.approx(2e-6)  # halfway from 1 to 16 in the logarithm
    halfway = math.exp(sum(math.log(p[3]) for p in small.device.measured["gemm"]["fp32"]) / 8)
    assert small.gemm_seconds(4, 8**1.5, 8**1.5, "fp32") == pytest.approx(halfway)
    assert small.gemm_seconds(32, 64, 640, "fp32") == pytest.approx(20 * 40e-6)
    assert small.gemm_seconds(1, 1, 8, "fp32") == 1e-6


def test_products_take_longer_if_they_are_larger(small):
    sizes = [1, 2, 5, 8, 11, 16, 40, 64, 100]
    for axis in range(3):
        for others in itertools.product(sizes, repeat=2):
            seconds = []
            for size in sizes:
                shape = list(others)
                shape.insert(axis, size)
                seconds.append(small.gemm_seconds(*shape, "fp32"))
            assert seconds == sorted(seconds)


def test_a_batch_launches_once(small):
    assert small.gemm_seconds(16, 64, 64, "fp32", batch=3) == pytest.approx(3 * 40e-6 - 2 * 1e-6)
    assert small.gemm_seconds(1, 8, 8, "fp32", batch=3) == 1e-6
    cluster = by_formula()
    assert cluster.gemm_seconds(1000, 1000, 1000, "bf16", batch=3) == pytest.approx(1e-6 + 3 * 6e6 / 1e9 / 1)


def test_unmeasured_products_are_bound_by_peak_or_bandwidth():
    device = Device(memory=1.0, peak={"bf16": 1e12}, efficiency=0.5, bandwidth=1e12, launch=1e-6)
    cluster = replace(by_formula(), device=device)
    assert cluster.gemm_seconds(1000, 2000, 3000, "bf16") == pytest.approx(1e-6 + 2 * 6e9 / 0.5e12)
    skinny = 2 * (2000 + 2000 * 3000 + 3000) / 1e12
    assert cluster.gemm_seconds(1, 2000, 3000, "bf16") == pytest.approx(1e-6 + max(skinny, 1.2e7 / 0.5e12))
    assert cluster.attention_seconds(4, 1000, 64, "bf16") == pytest.approx(1e-6 + 2 * 4 * 1e6 * 64 / 0.5e12)
    one = cluster.gemm_seconds(100, 2000, 3000, "bf16", batch=5)
    assert cluster.experts_seconds(5, 100, 2000, 3000, "bf16") == 2 * one


def test_measured_attention_and_experts(small):
    points = {"attention": {"fp32": ((2, 64, 16, 1.0, 0.0), (4, 64, 16, 2.0, 0.0))}}
    points["experts"] = {"fp32": ((2, 8, 16, 32, 3.0, 0.0),)}
    cluster = replace(small, device=replace(small.device, measured=points))
    assert cluster.attention_seconds(2, 64, 16, "fp32") == 1.0
    assert cluster.attention_seconds(8, 192, 32, "fp32") == 2.0 * 2 * 9 * 2  # the work grows with the squared length
    assert cluster.experts_seconds(2, 8, 16, 32, "fp32") == 3.0
    assert cluster.experts_seconds(4, 16, 16, 32, "fp32") == 12.0
    assert cluster.gemm_seconds(1e3, 1e3, 1e3, "fp32") == pytest.approx(2e9 / 1e11 + 1e-6)  # no longer measured


def test_operations_and_factors_within_steps(small):
    tables = {
        "operations": {"aten.add.Tensor": {"fp32": ((100.0, 1.0, 0.0), (1000.0, 4.0, 0.0))}},
        "in_step": {"aten.mm.default": {"fp32": ((100.0, 2.0, 0.0), (1000.0, 1.5, 0.0))}},
    }
    cluster = replace(small, device=replace(small.device, **tables))
    assert [cluster.operation_seconds("aten.add.Tensor", size, "fp32") for size in (100, 1000, 2000)] == [1, 4, 8]
    assert 1 < cluster.operation_seconds("aten.add.Tensor", 500, "fp32") < 4
    for name, dtype in (("aten.add.Tensor", "bf16"), ("aten.mul.Tensor", "fp32")):
        assert cluster.operation_seconds(name, 1e6, dtype) == cluster.move_seconds(1e6, dtype)
    assert [cluster.in_step("aten.mm.default", size, "fp32") for size in (10, 100, 1000, 5000)] == [2, 2, 1.5, 1.5]
    assert cluster.in_step("aten.mm.default", 100, "bf16") == cluster.in_step("aten.bmm.default", 100, "fp32") == 1


@pytest.mark.parametrize("field", ["operations", "in_step"])
def test_a_point_of_an_operation_that_cannot_be(small, field):
    key = f"device.{field}.aten.add.Tensor.fp32"
    for point in ((1.0, 2.0), (1.0, 0.0, 0.0)):
        with pytest.raises(UserError, match=key.replace(".", r"\.")):
            replace(small.device, **{field: {"aten.add.Tensor": {"fp32": (point,)}}})


def test_moves_take_launch_and_bandwidth(small):
    assert small.move_seconds(0) == 1e-6
    assert small.move_seconds(1e10) == pytest.approx(1 + 1e-6)


@pytest.mark.parametrize("method", ["gemm_seconds", "attention_seconds", "experts_seconds"])
def test_a_dtype_without_figures(small, method):
    sizes = [8] * (4 if method == "experts_seconds" else 3)
    with pytest.raises(UserError, match=r"small has no device\.peak for bf16.*fp32"):
        getattr(small, method)(*sizes, "bf16")


def test_collectives_within_a_node():
    """B bytes among p ranks, of which each moves B (p - 1) / p; twice for all_reduce."""
    cluster = by_formula()
    for size, span in [(2, 2), (8, 8), (4, 8)]:
        steps = math.log2(size)
        once = 1000 * (size - 1) / size / 100 + steps * 0.25
        assert cluster.collective_seconds("all_gather", size, span, 1000) == pytest.approx(once)
        assert cluster.collective_seconds("reduce_scatter", size, span, 1000) == pytest.approx(once)
        assert cluster.collective_seconds("all_reduce", size, span, 1000) == pytest.approx(2 * once)
        each = 1000 * (size - 1) / size / 100 + (size - 1) * 0.25
        assert cluster.collective_seconds("all_to_all", size, span, 1000) == pytest.approx(each)
    assert cluster.collective_seconds("send", 2, 8, 1000) == 0.25 + 10


def test_collectives_between_nodes():
    cluster = by_formula()
    inner = 1000 * 7 / 8 / 100 + 3 * 0.25
    outer = 1000 / 8 * 3 / 4 / 10 + 2 * 2.0  # each of 8 ranks with an eighth, among 4 nodes
    assert cluster.collective_seconds("all_gather", 32, 32, 1000) == pytest.approx(inner + outer)
    assert cluster.collective_seconds("all_reduce", 32, 32, 1000) == pytest.approx(2 * (inner + outer))
    apart = 1000 * 7 / 8 / 10 + 3 * 2.0  # one rank of each of 8 nodes
    assert cluster.collective_seconds("all_gather", 8, 64, 1000) == pytest.approx(apart)
    rows = 1000 * 7 / 32 / 100 + 7 * 0.25 + 1000 * 24 / 32 / 10 + 24 * 2.0
    assert cluster.collective_seconds("all_to_all", 32, 32, 1000) == pytest.approx(rows)
    assert cluster.collective_seconds("send", 2, 16, 1000) == 2.0 + 100


@pytest.mark.parametrize("kind", KINDS)
def test_collectives_take_longer_with_more_bytes_and_over_longer_spans(kind):
    cluster = load_cluster("h100-2048")
    assert cluster.collective_seconds(kind, 1, 1, 1e9) == 0
    for size in (2, 3, 8, 16, 100):
        seconds = [cluster.collective_seconds(kind, size, size, number) for number in (0, 1, 1e3, 1e6, 1e9)]
        assert seconds == sorted(set(seconds))
        spans = [size * stride for stride in (1, 2, 3, 8, 20)]
        seconds = [cluster.collective_seconds(kind, size, span, 1e9) for span in spans]
        assert seconds == sorted(seconds)


def test_measured_collectives_count_for_groups_on_the_same_links(small):
    assert small.collective_seconds("all_reduce", 2, 2, 1024) == 1e-5
    assert small.collective_seconds("all_reduce", 2, 2, 2**20) == 1e-3
    assert small.collective_seconds("all_reduce", 2, 2, 2**15) == pytest.approx(1e-4)
    assert small.collective_seconds("all_reduce", 2, 2, 1) == 1e-5
    assert small.collective_seconds("all_reduce", 2, 2, 2**22) == pytest.approx(4e-3)
    seconds = [small.collective_seconds("all_reduce", 2, 2, 4**power) for power in range(15)]
    assert seconds == sorted(seconds)
    apart = 2 * (1024 / 2 / 1e8 + 1e-5)
    assert small.collective_seconds("all_reduce", 2, 4, 1024) == pytest.approx(apart)
    assert small.collective_seconds("all_gather", 2, 2, 1024) == pytest.approx(1024 / 2 / 1e9 + 1e-6)
