"""The benchmark of the layer at tiny shapes: what is compared is the same, and the report says what was measured."""

import json
from dataclasses import replace

import pytest
import torch
from compare import assert_close
from forks import only

from bench import frame
from bench.layer import contenders, goals, limits, main, memory, problem, rows, sweeps
from bench.layer.contenders import Layer, layers
from bench.layer.plain import BruteForce, Router, SortedSlices
from bench.layer.problem import Problem, Shape, skewed_counts
from fmoe.experts import initial

GELU = Shape("A", 24, 16, 32, 8, 2)
SWIGLU = Shape("D", 24, 16, 16, 8, 3, gated=True)


def differences(shape, skew):
    """Return errors of outputs and input gradients relative to brute force, by contender; and the failures."""
    asked = Problem(shape, torch.float32, skew)
    found = {}
    for name, layer in layers().items():
        if not layer.is_installed() or not layer.is_dropless or name.startswith("Tutel"):
            continue
        x_TD = asked.x_TD.clone().requires_grad_()
        out_TD = layer.build(asked).train()(x_TD)
        out_TD.backward(asked.grad_TD)
        found[name] = (out_TD.detach(), x_TD.grad)
    reference = found.pop(contenders.BRUTE_FORCE)
    return {
        name: max(float((a - b).norm() / b.norm()) for a, b in zip(pair, reference, strict=True))
        for name, pair in found.items()
    }


@pytest.mark.slow
@pytest.mark.parametrize("skew", [None, 2.0], ids=["routed", "told"])
@pytest.mark.parametrize("shape", [GELU, SWIGLU], ids=["gelu", "swiglu"])
def test_all_contenders_compute_the_same(shape, skew, forks):
    if shape is GELU:  # the layer of transformers that has these experts is younger than the lowest version
        pytest.importorskip("transformers.models.nemotron_h")
    found = only(forks.run(1, differences, shape, skew))
    assert {"fmoe torch", "sorted slices", "megatron-core SequentialMLP"} <= found.keys()
    for name, difference in found.items():
        assert difference < 1e-5, f"{name}: {difference}"


@pytest.mark.parametrize("skew", [1.0, 2.0, 4.0])
@pytest.mark.parametrize("shape", [GELU, Shape("S", 30, 16, 16, 12, 3)], ids=str)
def test_a_forced_skew_is_that_skew(shape, skew):
    expert_TK = Problem(shape, torch.float32, skew).expert_TK
    assert expert_TK.shape == (shape.tokens, shape.top_k)
    loads = expert_TK.flatten().bincount(minlength=shape.num_experts)
    assert loads.sum() == shape.rows and loads.tolist() == skewed_counts(shape, skew)
    even = shape.rows / shape.num_experts
    assert abs(int(loads.max()) - skew * even) <= 1
    assert int(loads[1:].max() - loads[1:].min()) <= 1
    assert all(len(set(row)) == shape.top_k for row in expert_TK.tolist()), "an expert twice for a token"
    assert len(torch.unique(expert_TK[: shape.tokens // 3])) > 2, "the tokens of an expert are spread"


def test_routers_choose_what_they_are_told():
    asked = Problem(GELU, torch.float32, 4.0)
    expert_TK, weight_TK = Router(asked)(asked.x_TD)
    assert torch.equal(expert_TK, asked.expert_TK)
    torch.testing.assert_close(weight_TK.sum(1), torch.ones(GELU.tokens))
    probs_TE = (asked.x_TD @ asked.router_ED.t()).softmax(-1)
    ratio = probs_TE[3, expert_TK[3, 0]] / probs_TE[3, expert_TK[3, 1]]
    assert float(weight_TK[3, 0] / weight_TK[3, 1]) == pytest.approx(float(ratio), rel=1e-5)


class Square(torch.nn.Module):
    """``(x W) ** 2`` behind a router that does nothing but keep its exponential."""

    class Exponential(torch.nn.Module):
        def forward(self, x):
            return x.exp()

    def __init__(self):
        super().__init__()
        self.router = self.Exponential()
        self.weight = torch.nn.Parameter(torch.ones(4, 6))

    def forward(self, x):
        return (self.router(x).sum() * (x @ self.weight)) ** 2


def test_saved_bytes_by_hand():
    # Of the router: exp's own output, 5 x 4. Of the rest: the products before (the sum, a scalar, and x W, 5 x 6) and
    # after (5 x 6) the last multiplication. The input and the weight are saved too, and not counted.
    saved = memory.saved_for_backward(Square(), torch.randn(5, 4))
    assert saved == memory.Saved(total=4 * (20 + 1 + 30 + 30), router=4 * 20)


def test_limits_are_the_flops_of_the_layer(monkeypatch):
    """Every product of every row: counted at `torch.mm`."""
    flops = []
    real = torch.mm

    def counted(a, b, *, out):
        flops.append(2 * a.shape[0] * a.shape[1] * b.shape[1])
        return real(a, b, out=out)

    monkeypatch.setattr(torch, "mm", counted)
    for shape in (GELU, SWIGLU):
        forward = 2 * shape.rows * shape.d_model * (shape.height + shape.d_hidden)
        for setup, calls in ((limits.dense, 2), (limits.split, 2 * shape.num_experts)):
            for backward, factor in ((False, 1), (True, 3)):
                step = setup(Problem(shape, torch.float32), backward)
                flops.clear()
                step()
                assert (sum(flops), len(flops)) == (factor * forward, factor * calls)


def test_the_line_through_times_that_lie_on_one():
    line = sweeps.fit_line([256, 1024, 65536], [2e-3 + 1e-6 * t for t in (256, 1024, 65536)])
    assert (line.fixed, line.per_token) == pytest.approx((2e-3, 1e-6))
    assert abs(line.worst) < 1e-9


@pytest.fixture
def tiny(monkeypatch):
    """The shapes of the benchmark, tiny, and two contenders of ours with peers that take no import."""
    monkeypatch.setitem(problem.SHAPES, "A", GELU)
    monkeypatch.setitem(problem.SHAPES, "D", SWIGLU)
    monkeypatch.setitem(problem.SHAPES, "S", Shape("S", 24, 16, 16, 8, 2))
    known = {
        "fmoe torch": Layer(contenders.ours),
        "sorted slices": Layer(SortedSlices),
        contenders.BRUTE_FORCE: Layer(BruteForce, is_slow=True),
        "absent": Layer(BruteForce, "no_such_package"),
        "deaf": Layer(SortedSlices, takes_choices=False),
        "drops": Layer(lambda problem: torch.nn.Identity(), is_dropless=False),
    }
    monkeypatch.setattr(contenders, "layers", lambda: known)
    threads = torch.get_num_threads()
    yield known
    torch.set_num_threads(threads)


COMMON = ["--rounds", "2", "--warmup", "1", "--no-peak", "--threads", "1"]


def test_table_json_and_goals(tiny, tmp_path, capsys):
    main.main(["--shapes", "A,D", "--passes", "forward", "forward+backward", *COMMON, "--out", str(tmp_path)])
    table = (tmp_path / "layer.md").read_text()
    assert table in capsys.readouterr().out
    for column in ("of the limit over E", "over the best dropless peer", "saved, MB", "saved / (T K P)"):
        assert column in table
    assert "absent is left out: no_such_package is not installed" in table
    measured = json.loads((tmp_path / "layer.json").read_text())
    # Two shapes, two precisions, two passes; brute force apart.
    assert len(measured["measurements"]) == 2 * 2 * 2 * 2
    first, apart = measured["measurements"][:2]
    assert apart["label"] == first["label"] + " (apart)" and contenders.BRUTE_FORCE in apart["seconds"]
    assert list(first["seconds"]) == [limits.DENSE, limits.SPLIT, "fmoe torch", "sorted slices", "deaf", "drops"]
    assert not first["failures"] and first["reference"] == limits.DENSE
    asked = [line for line in measured["notes"] if line.startswith(("* met", "* MISSED"))]
    of_a = [line for line in asked if ": A T24" in line]
    assert len(of_a) == 2 * 3 + 1, "limit, peer, saved bytes; brute force in bf16"
    assert all("forward+backward" in line for line in asked)
    assert not any("drops" in line for line in asked), "a peer that drops tokens"


@pytest.mark.parametrize("skew", [None, 2.0])
def test_our_layer_draws_no_weights(skew, monkeypatch):
    """It is built on the meta device, and has the problem's: no parameter or buffer is left there."""
    given = Problem(GELU, torch.float32, skew)
    expected = SortedSlices(given)(given.x_TD)
    monkeypatch.setattr(initial, "draw", lambda *arguments: pytest.fail("weights are drawn"))
    layer = contenders.ours(given, backend="torch")
    assert not any(tensor.is_meta for tensor in (*layer.parameters(), *layer.buffers()))
    assert_close(layer(given.x_TD), expected, 1e-5, "y")


def a_row(seconds, point=None, slow=None, saved=None, dropless=("peer",)):
    """A row whose times are made up."""
    point = point or rows.Point(Problem(Shape("A", 64, 8, 8, 4, 2), torch.bfloat16), "bf16", "forward+backward", 2)

    def measured(times):
        return frame.Measurement(
            label=point.label, reference=limits.DENSE, rounds=3, warmup=0, seed=0, min_seconds=None, unit="tokens",
            seconds={name: [time] * 3 for name, time in times.items()}, calls=dict.fromkeys(times, 1),
        )  # fmt: skip

    return rows.Row(point, measured(seconds), slow and measured(slow), dropless, saved or {}, {}, [])


def verdicts(found):
    return [(goal.is_met, str(goal).split("threads 2: ")[1]) for goal in found]


def test_goals_of_a_shape():
    times = {limits.DENSE: 0.7, limits.SPLIT: 0.8, "fmoe native": 1.0, "fmoe torch": 3.0, "peer": 1.5, "lossy": 0.9}
    slow = {limits.DENSE: 0.7, "fmoe native": 1.0, contenders.BRUTE_FORCE: 46.0}
    saved = {"fmoe native": memory.Saved(6000, 64), "fmoe torch": memory.Saved(99999, 0)}
    limit, peer, brute, kept = verdicts(goals.of_shapes([a_row(times, slow=slow, saved=saved)]))
    assert limit[0] and limit[1].startswith("fmoe native at 0.700 [0.700, 0.700] of the GEMM limit (at least 0.68)")
    assert peer[0] and "1.500 [1.500, 1.500] times as fast as the best dropless peer, peer" in peer[1]
    assert not brute[0] and "46.000" in brute[1]
    assert kept[0]  # 64 * 2 * 8 * 2 + 32 * 128 + 16 * 5 = 6224
    missed = a_row(times | {"peer": 1.3}, saved=saved | {"fmoe native": memory.Saved(6300, 64)})
    assert [goal.is_met for goal in goals.of_shapes([missed])] == [True, False, False]
    close = a_row(times | {"peer": 1.0, limits.DENSE: 0.96})
    assert [goal.is_met for goal in goals.of_shapes([close])] == [True, True], ".95 of the limit is enough"
    forward = replace(missed, point=replace(missed.point, passes="forward"))
    assert not goals.of_shapes([forward])


def test_peak_memory_of_a_process_of_its_own(monkeypatch):
    monkeypatch.setattr(memory, "_PRELOADED", ["fmoe"])  # the peers take long to import
    shape = Shape("A", 8192, 64, 256, 4, 2)
    asked = Problem(shape, torch.float32)
    measured = memory.Peaks()("sorted slices", asked, True, 1)
    if measured is None:
        pytest.skip("this system does not let a process reset its high-water mark")
    hidden = shape.rows * shape.d_hidden * 4
    assert 2 * hidden < measured < 12 * hidden  # before and after GELU are there at once


def test_bytes_of_the_kernels_by_hand(monkeypatch):
    """Gathered and combined rows of one expert, as wide as two elements."""
    from bench.layer import bandwidth
    from fmoe.kernels.cuda import calls

    def place(expert_N, experts):
        return torch.empty_like(expert_N), torch.empty_like(expert_N), None, None, torch.zeros(experts), torch.zeros(1)

    monkeypatch.setattr(calls, "place", place)
    moved = {k.name: k.bytes_moved for k in bandwidth.kernels_of(Problem(Shape("G1", 3, 2, 4, 1, 1), torch.bfloat16))}
    assert moved["gather"] == 3 * (4 + 4 + 8) and moved["combine"] == 3 * (4 + 4 + 12)
    assert moved["activate"] == 3 * (8 + 8) and set(moved) == {
        *("route", "place", "gather", "activate", "activate_backward", "combine", "combine_backward")
    }
