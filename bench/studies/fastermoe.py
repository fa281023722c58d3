"""``python -m bench fastermoe``: when shadowing, the chunked schedule and the topology-aware gate pay (FasterMoE,
PPoPP'22), by skew of the load and by bandwidth.

Every rank is a node of its own, behind an emulated link (`bench.studies.link`). A step's time is that of the slowest
rank: processor seconds of its thread, plus waits for transfers. So the ranks may outnumber the cores. The report also
has the speedups of a cost model, which knows only the loads, the bytes and one row's processor seconds.

Shape letters: W ranks, T tokens of a rank, D width, E experts.
"""

import functools
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

import fmoe
from bench import frame, options, ranks, report
from bench.frame import Measurement
from bench.studies.link import Link
from fmoe.errors import UserError
from fmoe.exchange import collectives
from fmoe.exchange.shadow import Cost

PLAIN = "plain"
SHADOW = "shadow"
TOPOLOGY = "topology"
LIMIT = 1e-5


def main(argv: Sequence[str]) -> None:
    parser = options.parser("fastermoe", __doc__, rounds=10, warmup=1)
    parser.add_argument("--tokens", type=int, default=2048, help="tokens per rank")
    for option, default in (("ranks", 4), ("d-model", 256), ("d-hidden", 512), ("num-experts", 8), ("top-k", 2)):
        parser.add_argument(f"--{option}", type=int, default=default)
    for option, default, text in (
        ("skew", [1.0, 2.0, 4.0], "load of the hottest expert, in even shares"),
        ("bandwidth", [12.5, 100.0, 1000.0, math.inf], "MB/s per rank and direction; inf for no limit"),
    ):
        parser.add_argument(f"--{option}", nargs="+", type=float, default=default, help=text)
    parser.add_argument("--chunks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--bonus", type=float, default=2.0, help="topology gate's bonus; logits have variance 1")
    arguments = parser.parse_args(argv)
    _check(arguments)
    rows = [Measurement.from_json(row) for row in ranks.run(arguments.ranks, _measure_all, arguments)]
    report.write(rows, arguments.out, "fastermoe", notes=notes(rows, arguments), means=False)


def _check(arguments) -> None:
    options.at_least(arguments, tokens=1, d_model=2, d_hidden=1, top_k=1, rounds=2, warmup=0)
    size = arguments.ranks
    num_experts = arguments.num_experts
    if size < 2 or num_experts % size:
        raise UserError(f"--ranks={size} must be at least 2 and divide --num-experts={num_experts}")
    if arguments.top_k >= num_experts:
        raise UserError(f"--top-k={arguments.top_k} must be below --num-experts={num_experts}")
    for option, values, low, high in (
        ("skew", arguments.skew, 1, num_experts / arguments.top_k),
        ("bandwidth", arguments.bandwidth, 1e-3, math.inf),
        ("chunks", arguments.chunks, 2, math.inf),
    ):
        for value in values:
            if not low <= value <= high:
                raise UserError(f"--{option}={value:g} must be from {low:g} to {high:g}")


class _Always(Cost):
    """Cost model that shadows as many experts as allowed, to measure shadowing also where it does not pay."""

    def seconds(self, loads_WE, num_local: int, shadows: Sequence[int]) -> float:
        return -len(shadows)


@dataclass(frozen=True)
class Batch:
    """A rank's tokens, and the gate's weights, with which expert 0 gets ``skew`` even shares."""

    x_TD: Tensor
    grad_TD: Tensor
    gate_ED: Tensor

    @classmethod
    def random(cls, rank: int, skew: float, arguments) -> "Batch":
        shape = arguments.tokens, arguments.d_model

        def draw(seed: int) -> Tensor:
            x_TD = torch.randn(shape, generator=torch.Generator().manual_seed(1000 * arguments.seed + seed))
            x_TD[:, 0] = 1.0  # so that the gate's first column is a bias
            return x_TD

        gate_ED = torch.randn(arguments.num_experts, shape[1], generator=torch.Generator().manual_seed(7))
        gate_ED *= shape[1] ** -0.5
        gate_ED[:, 0] = 0.0
        # The bias that each of the first rank's tokens needs to choose expert 0; the wanted number of them get it.
        logits_TE = draw(0) @ gate_ED.t()
        needed_T = logits_TE[:, 1:].topk(arguments.top_k).values[:, -1] - logits_TE[:, 0]
        wanted = round(skew * shape[0] * arguments.top_k / arguments.num_experts)
        gate_ED[0, 0] = needed_T.sort().values[wanted - 1] + 1e-5
        return cls(draw(rank), torch.randn(shape, generator=torch.Generator().manual_seed(rank)) * 0.01, gate_ED)


def _layer(batch: Batch, arguments, group: dist.ProcessGroup | None, gate: str = "naive", **exchange: Any):
    """Return a layer. Without a group it has a rank's share of the experts: a rank's work at even loads."""
    size = 1 if group else arguments.ranks
    layer = fmoe.FMoE(
        d_model=arguments.d_model,
        num_experts=arguments.num_experts // size,
        d_hidden=arguments.d_hidden,
        top_k=min(arguments.top_k, arguments.num_experts // size),
        gate=gate,
        gate_options={"bonus": arguments.bonus, "node_size": 1} if gate == TOPOLOGY else None,
        loss_weights={"balance": 0.0, "z": 0.0},
        moe_group=group,
        exchange_options=exchange,
        seed=0,
    )
    with torch.no_grad():
        layer.gate.weight.copy_(batch.gate_ED[: arguments.num_experts // size])
    return layer


def _step(layer, batch: Batch) -> Callable[[], tuple[Tensor, Tensor]]:
    def step() -> tuple[Tensor, Tensor]:
        x_TD = batch.x_TD.detach().requires_grad_()
        out_TD = layer(x_TD)
        out_TD.backward(batch.grad_TD)
        layer.zero_grad(set_to_none=True)
        return out_TD.detach(), x_TD.grad

    return step


def _measure_all(arguments) -> list[dict]:
    group = dist.group.WORLD
    link = Link()
    rows = []
    for skew in arguments.skew:
        batch = Batch.random(dist.get_rank(), skew, arguments)
        layers = {
            PLAIN: _layer(batch, arguments, group),
            SHADOW: _layer(batch, arguments, group, shadow=1, cost=_Always(0, 0, 0, 1)),
            **{f"chunks={n}": _layer(batch, arguments, group, chunks=n) for n in arguments.chunks},
            TOPOLOGY: _layer(batch, arguments, group, gate=TOPOLOGY),
        }
        steps = {name: _step(layer, batch) for name, layer in layers.items()}
        _verify(steps)
        loads = {name: _loads(layer, batch, group) for name, layer in layers.items() if name in (PLAIN, TOPOLOGY)}
        row_seconds = _row_seconds(batch, arguments)
        expert_bytes = sum(p.nbytes for p in layers[PLAIN].experts.shadow(0))
        for megabytes in arguments.bandwidth:
            link.bandwidth = 1e6 * megabytes
            cost = Cost(row_seconds, 4 * arguments.d_model, expert_bytes, link.bandwidth)
            with link:
                row = _measure(steps, link, f"skew {skew:g}, {megabytes:g} MB/s", arguments)
            facts = _facts(row, predicted(loads, arguments, cost), loads)
            rows.append(replace(row, facts=facts).to_json())
            if dist.get_rank() == 0:
                print(f"{row.label}: " + ", ".join(f"{n} {row.ratio(n)}" for n in steps if n != PLAIN), flush=True)
    return rows


def _verify(steps: dict[str, Callable[[], tuple[Tensor, Tensor]]]) -> None:
    """Check that all contenders but the topology gate, which makes other choices, compute the same."""
    expected = steps[PLAIN]()
    for name, step in steps.items():
        for value, right in zip(step(), expected, strict=True):
            error = ranks.slowest(((value - right).norm() / right.norm()).item())
            if name != TOPOLOGY and not error < LIMIT:
                raise RuntimeError(f"{name}: relative error {error:.1e}, the limit is {LIMIT:.0e}")


def _loads(layer, batch: Batch, group: dist.ProcessGroup) -> Tensor:
    """Return the numbers of assignments of each rank for each expert, [W, E]."""
    with torch.no_grad():
        routing = layer.route(layer.split(batch.x_TD, None, None))
    load_E = routing.expert_TK.flatten().bincount(minlength=layer.num_experts)
    return collectives.all_gather(group, load_E).wait(for_host=True).view(group.size(), -1)


def _row_seconds(batch: Batch, arguments) -> float:
    """Return the slowest rank's processor seconds per row, forward and backward, of a layer without an exchange."""
    layer = _layer(batch, arguments, None)
    step = _step(layer, batch)
    seconds = []
    for _ in range(4):
        begin = time.thread_time()
        step()
        seconds.append(time.thread_time() - begin)
    return ranks.slowest(min(seconds)) / (arguments.tokens * layer.gate.top_k)


def predicted(loads: dict[str, Tensor], arguments, cost: Cost) -> dict[str, float]:
    """Return the speedup of each technique over the plain exchange, by the cost model.

    With n chunks, all transfers but the first and the last chunk's are hidden behind computation, or all computation
    behind transfers: a pass with X seconds of transfers and C of computation takes max(X, C + X / n).
    """
    num_local = arguments.num_experts // arguments.ranks
    plain = cost.seconds(loads[PLAIN], num_local, [])
    computed = replace(cost, bandwidth=math.inf).seconds(loads[PLAIN], num_local, [])
    sent = plain - computed
    passes = [(sent / 2, computed / 3), (sent / 2, 2 * computed / 3)]
    seconds = {SHADOW: cost.seconds(loads[PLAIN], num_local, [int(loads[PLAIN].sum(0).argmax())])}
    seconds |= {f"chunks={n}": sum(max(x, c + x / n) for x, c in passes) for n in arguments.chunks}
    seconds[TOPOLOGY] = cost.seconds(loads[TOPOLOGY], num_local, [])
    return {name: plain / value for name, value in seconds.items()}


def _measure(steps: dict[str, Callable], link: Link, label: str, arguments) -> Measurement:
    tokens = arguments.tokens
    row = frame.measure(
        [frame.Contender(name, functools.partial(lambda step: step, step), tokens) for name, step in steps.items()],
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        reference=PLAIN,
        seed=arguments.seed,
        label=label,
        clock=link.now,
        line_up=link.line_up,
        agree=ranks.slowest,
    )
    if row.failures:  # on this rank: the others cannot go on without it
        raise RuntimeError(f"{label}: {row.failures}")
    return row


def _facts(row: Measurement, model: dict[str, float], loads: dict[str, Tensor]) -> dict[str, dict[str, str]]:
    facts = {name: {"model": f"{model[name]:.3f}", "pays": _pays(row, name)} for name in row.seconds if name != PLAIN}
    for name, load_WE in loads.items():
        local = sum(int(part.sum()) for part in load_WE.unflatten(1, (len(load_WE), -1)).diagonal())
        hottest = float(load_WE.sum(0).max() / load_WE.sum(0).float().mean())
        share = f"{1 - local / int(load_WE.sum()):.1%}"
        facts.setdefault(name, {}).update({"hottest expert": f"{hottest:.2f}", "rows sent to other ranks": share})
    return facts


def _pays(row: Measurement, name: str) -> str:
    ratio = row.ratio(name)
    return "yes" if ratio.low > 1 else "no" if ratio.high < 1 else "undecided"


def notes(rows: Sequence[Measurement], arguments) -> list[str]:
    """Return a table of skew x bandwidth for each technique, and how often model and measurement agree."""
    lines = []
    bandwidths = [f"{megabytes:g} MB/s" for megabytes in arguments.bandwidth]
    by_label = {row.label: row for row in rows}
    for name in [name for name in rows[0].seconds if name != PLAIN]:
        cells = [["skew", *bandwidths]]
        for skew in arguments.skew:
            of_skew = [by_label[f"skew {skew:g}, {bandwidth}"] for bandwidth in bandwidths]
            cells.append([f"{skew:g}", *(f"{row.ratio(name)} (model {row.facts[name]['model']})" for row in of_skew)])
        lines += [f"Speedup of {name} over {PLAIN}:", "", *report.table(cells), ""]
        decided = [row for row in rows if row.facts[name]["pays"] != "undecided"]
        right = sum((row.facts[name]["pays"] == "yes") == (float(row.facts[name]["model"]) > 1) for row in decided)
        lines += [f"* {name}: the model agrees on whether it pays in {right} of {len(decided)} decided cells.", ""]
    return [*lines, "Times are processor seconds of the slowest rank and waits for emulated transfers, not wall time."]
