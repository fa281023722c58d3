"""``fmoe selftest``: check that a layer split over the ranks agrees with an unsplit one, and time the exchanges.

Start it like a training job, e.g. ``torchrun --nproc_per_node 8 -m fmoe selftest``. Without torchrun it is a job of one
process. Every rank builds the unsplit layer and its part of the split one from the same seed. It compares the two for
its own tokens and experts. Ranks report through the store of torch.distributed, which works even if a collective
hangs.
"""

import argparse
import itertools
import json
import math
import statistics
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from fmoe import parallel, random
from fmoe.cli import Parser
from fmoe.errors import UserError, one_line, ranks_text
from fmoe.exchange import build_exchange
from fmoe.experts.call import ExpertCall
from fmoe.moe import MoE
from fmoe.routing import Routing
from fmoe.runtime import collectives, launcher

GATES = {"naive": {"top_k": 2}, "switch": {}, "gshard": {}}
EXPERTS = ("ffn", "swiglu")
# Relative, in float32; on a GPU, GEMMs of different shapes sum in different orders.
LIMITS = {"cpu": 1e-5, "cuda": 1e-4}
SEQUENCES = 4
LENGTH = 16
WIDTH = 32
HIDDEN = 48
EXPERTS_OF_A_RANK = 2
# Width of rows and measurements per entry, in the bandwidth table.
ROW_WIDTH = 1024
REPEATS = 5


@dataclass
class Result:
    """Result of one `Case`.

    Attributes:
        errors: relative error of each quantity, the largest over all ranks.
        failed: descriptions of failures, with ranks; empty if the case passed.
        is_broken: whether a rank raised or did not answer. The test then ends, because ranks may be out of step.
    """

    case: str
    errors: dict[str, float] = field(default_factory=dict)
    failed: list[str] = field(default_factory=list)
    is_broken: bool = False


def main(argv: Sequence[str]) -> int:
    """Compare layers split over ranks with unsplit ones, time the exchanges, and print a report on rank 0.

    Returns:
        Exit code, the same on all ranks: 0 if everything agrees, else 1.

    Raises:
        UserError: ``--timeout`` is not positive and finite, ``--ep`` is negative or does not divide the number of
            ranks, or torchrun's environment is incomplete.
    """
    parser = Parser(prog="fmoe selftest", description=__doc__.partition("\n\n")[0], allow_abbrev=False)
    parser.add_argument("--ep", type=int, help="number of expert-parallel ranks, default all ranks")
    parser.add_argument("--device", choices=["cpu", "cuda"], help="device of the layers, default cuda if available")
    parser.add_argument("--timeout", type=float, default=60.0, help="time limit of a collective in seconds, default 60")
    sizes = "sizes at which exchanges are timed, in MB of rows per rank, default 0.125 1 8 64"
    parser.add_argument("--megabytes", nargs="*", type=float, default=[0.125, 1, 8, 64], help=sizes)
    parser.add_argument("--json", type=Path, metavar="FILE", help="file for the results, written by rank 0")
    arguments = parser.parse_args(argv)
    if not 0 < arguments.timeout < math.inf:
        raise UserError(f"--timeout={arguments.timeout:g} must be more than 0 seconds, and finite")
    ep = arguments.ep or launcher.number("WORLD_SIZE", 1)
    groups = parallel.init(ep, device_type=arguments.device, timeout=timedelta(seconds=arguments.timeout))
    results, table = _test(groups, arguments)
    failed = [line for result in results for line in result.failed]
    if dist.get_rank() == 0:
        for line in failed:
            print(f"FAILED: {line}")
        if not failed:
            print(f"ok: {len(results)} cases, split over {groups.ep} ranks, agree with one process")
        if arguments.json:
            values = {"ep": groups.ep, "dp": groups.dp, "cases": [asdict(r) for r in results], "bandwidth": table}
            arguments.json.write_text(json.dumps(values, indent=1) + "\n")
    if not any(result.is_broken for result in results):
        dist.destroy_process_group()
    return 1 if failed else 0


def _test(groups: parallel.ParallelGroups, arguments: argparse.Namespace) -> tuple[list[Result], list[dict]]:
    device = torch.device(f"cuda:{torch.cuda.current_device()}" if groups.mesh.device_type == "cuda" else "cpu")
    is_first = dist.get_rank() == 0
    if is_first:
        print(f"{groups.size} ranks, ep {groups.ep}, dp {groups.dp}, {dist.get_backend()}, torch {torch.__version__}")
        print(f"{'case':50}" + "".join(f"{what:>18}" for what in _QUANTITIES) + "    (relative errors)")
    results = []
    for case in cases(groups.ep):
        result = _compared(case, groups, device, arguments.timeout)
        results.append(result)
        if is_first:
            print(f"{result.case:50}" + "".join(f"{error:18.1e}" for error in result.errors.values()), flush=True)
        if result.is_broken:
            return results, []
    table = []
    if groups.ep > 1 and arguments.megabytes:
        table = _bandwidths(groups, arguments.megabytes, device)
    if is_first and table:
        print(f"\n{'exchange: GB/s sent per rank (ms there and back)':50}" + _columns(arguments.megabytes, "{:g} MB"))
        for name, rows in itertools.groupby(table, key=lambda row: row["exchange"]):
            print(f"{name:50}" + _columns(list(rows), "{0[gigabytes_per_second]:.2f} ({0[milliseconds]:.1f})"))
    return results, table


def _columns(values: Sequence[Any], form: str) -> str:
    return "".join(f"{form.format(value):>18}" for value in values)


@dataclass(frozen=True)
class Case:
    """A combination to test: a gate, experts, and an exchange with its options."""

    exchange: str
    options: dict[str, Any]
    gate: str
    experts: str

    def __str__(self) -> str:
        options = "".join(f" {key}={value}" for key, value in self.options.items())
        return f"{self.exchange}{options}, {self.gate}, {self.experts}"


def exchanges(ep: int) -> list[tuple[str, dict[str, Any]]]:
    """Return the exchanges to test, with options. With one rank (``ep=1``), return only one."""
    if ep == 1:
        return [("all_to_all", {})]
    local = launcher.number("LOCAL_WORLD_SIZE", ep)
    node_size = local if local < ep and ep % local == 0 else max(d for d in range(1, ep) if ep % d == 0)
    return [
        ("all_to_all", {}),
        ("all_to_all", {"chunks": 2}),
        ("padded", {}),
        ("padded", {"chunks": 2}),
        ("all_gather", {}),
        ("hierarchical", {"node_size": node_size}),
        ("hierarchical", {"node_size": node_size, "chunks": 2}),
    ]


def cases(ep: int) -> Iterator[Case]:
    """Yield every combination of exchange, gate and experts."""
    for (exchange, options), gate, experts in itertools.product(exchanges(ep), GATES, EXPERTS):
        yield Case(exchange, options, gate, experts)


_QUANTITIES = ("output", "input gradient", "router gradient", "experts' gradient")


def _compared(case: Case, groups: parallel.ParallelGroups, device: torch.device, timeout: float) -> Result:
    """Run the case on all ranks, and return its result."""
    # Every rank posts its relative errors, or its exception, to the store, and rank 0 evaluates them.
    store = dist.distributed_c10d._get_default_store()
    rank = dist.get_rank()
    key = f"fmoe/selftest/{case}"
    try:
        mine: dict[str, Any] = {"errors": _errors(case, groups, device)}
    except Exception as error:  # reported by rank 0
        mine = {"raised": one_line(error, with_type=True)}
    store.set(f"{key}/{rank}", json.dumps(mine))
    patience = timedelta(seconds=timeout + 10)  # ranks that wait for a collective report after its timeout
    if rank == 0:
        result = _judged(case, [_read(store, f"{key}/{r}", patience) for r in range(groups.size)], LIMITS[device.type])
        store.set(key, json.dumps(asdict(result)))
        return result
    verdict = _read(store, key, 2 * patience)
    if verdict is None:
        return Result(str(case), failed=[f"{case}: rank 0 did not answer"], is_broken=True)
    return Result(**verdict)


def _read(store: dist.Store, key: str, patience: timedelta) -> Any:
    try:
        store.wait([key], patience)
        return json.loads(store.get(key))
    except Exception:  # the store's own classes differ between backends and versions
        return None


def _judged(case: Case, told: list[dict | None], limit: float) -> Result:
    result = Result(str(case))
    silent = [rank for rank, values in enumerate(told) if values is None]
    raised = {rank: values["raised"] for rank, values in enumerate(told) if values and "raised" in values}
    result.is_broken = bool(silent or raised)
    if silent:
        result.failed.append(f"{case}: {ranks_text(silent)} did not answer")
    for message in dict.fromkeys(raised.values()):
        result.failed.append(f"{case}: {ranks_text([r for r, m in raised.items() if m == message])}: {message}")
    if result.is_broken:
        return result
    for what in _QUANTITIES:
        errors = [values["errors"][what] for values in told if values]
        result.errors[what] = max(errors, key=lambda error: (error != error, error))  # nan is the worst
        wrong = [rank for rank, error in enumerate(errors) if not error <= limit]
        if wrong:
            result.failed.append(
                f"{case}: {what} on {ranks_text(wrong)} differs from one process: "
                f"relative error {result.errors[what]:.1e}, limit {limit:.0e}"
            )
    return result


def _errors(case: Case, groups: parallel.ParallelGroups, device: torch.device) -> dict[str, float]:
    """Return the relative errors of this rank's part of a split layer, compared with an unsplit layer."""
    ep = groups.ep
    ep_rank = groups.moe_group.rank()
    # Each expert-parallel group has its own batch.
    generator = torch.Generator().manual_seed(random.key("selftest", dist.get_rank() // ep))
    # An auxiliary loss is a mean over a rank's routing groups, and the split layer's gradients are those of the sum of
    # losses over ranks. Therefore the unsplit layer's losses are multiplied by the number of ranks.
    whole = _layer(case, ep, device, loss_scale=lambda: float(ep))
    part = _layer(
        case,
        ep,
        device,
        moe_group=groups.moe_group if ep > 1 else None,
        exchange=case.exchange,
        exchange_options=case.options,
    )
    x, upstream = torch.randn(
        2, ep * SEQUENCES, LENGTH, WIDTH, generator=generator, dtype=torch.float32, device="cpu"
    ).to(device)
    mine = slice(ep_rank * SEQUENCES, (ep_rank + 1) * SEQUENCES)
    random.set_position(seed=0, step=1, first_token=0)
    expected, expected_grad = _pass(whole, x, upstream)
    random.set_position(seed=0, step=1, first_token=ep_rank * SEQUENCES * LENGTH)
    output, grad = _pass(part, x[mine], upstream[mine])
    errors = {"output": _error(output, expected[mine]), "input gradient": _error(grad, expected_grad[mine])}
    routers = []
    for mine_, right in zip(part.gate.parameters(), whole.gate.parameters(), strict=True):
        if ep > 1:
            collectives.run(dist.all_reduce, mine_.grad, group=groups.moe_group)
        routers.append(_error(mine_.grad, right.grad))
    errors["router gradient"] = max(routers)
    local = slice(part.first_expert, part.first_expert + part.num_local_experts)
    pairs = zip(part.experts.parameters(), whole.experts.parameters(), strict=True)
    errors["experts' gradient"] = max(_error(p.grad, right.grad[local]) for p, right in pairs)
    return errors


def _layer(case: Case, ep: int, device: torch.device, **split) -> MoE:
    options = dict(GATES[case.gate])
    return MoE.build(
        d_model=WIDTH,
        num_experts=EXPERTS_OF_A_RANK * ep,
        d_hidden=HIDDEN,
        top_k=options.pop("top_k", None),
        gate=case.gate,
        gate_options=options,
        expert=case.experts,
        name=f"selftest ({case})",
        seed=3,
        **split,
    ).to(device)


def _pass(layer: MoE, x: Tensor, upstream: Tensor) -> tuple[Tensor, Tensor]:
    x = x.clone().requires_grad_()
    y = layer(x)
    y.backward(upstream)
    assert x.grad is not None
    return y.detach(), x.grad


def _error(value: Tensor, right: Tensor) -> float:
    return ((value - right).double().norm() / right.double().norm().clamp(min=1e-30)).item()


def _bandwidths(groups: parallel.ParallelGroups, megabytes: Sequence[float], device: torch.device) -> list[dict]:
    """Return the time and bandwidth of a round trip of rows, for each exchange and size in ``megabytes``."""
    ep = groups.ep
    table = []
    for (exchange, options), size in itertools.product(exchanges(ep), megabytes):
        if "chunks" in options:  # chunks pay off only by overlap with the experts' computation
            continue
        travel = build_exchange(groups.moe_group, ep, exchange, options)
        num_rows = -(-max(1, round(size * 1e6 / (4 * ROW_WIDTH))) // ep) * ep
        rows = torch.randn(num_rows, ROW_WIDTH, device=device, dtype=torch.float32)
        routing = Routing(
            (torch.arange(num_rows, device=device, dtype=torch.int64) % ep).unsqueeze(1),
            torch.ones(num_rows, 1, device=device, dtype=torch.float32),
            max_load=num_rows // ep,
        )
        seconds = [_seconds(travel, routing, rows, groups) for _ in range(2 + REPEATS)]
        median = statistics.median(seconds[2:])
        sent = 2 * rows.nbytes * _share_sent(exchange, options, ep)
        table.append(
            {
                "exchange": exchange + "".join(f" {key}={value}" for key, value in options.items()),
                "megabytes": size,
                "milliseconds": median * 1e3,
                "gigabytes_per_second": sent / median / 1e9,
            }
        )
    return table


def _share_sent(exchange: str, options: dict[str, Any], ep: int) -> float:
    """Return how often a row is sent to another rank on the way to its expert, on average."""
    if exchange == "all_gather":
        return ep - 1
    if exchange == "hierarchical":
        num_nodes = ep // options["node_size"]
        return (1 - 1 / options["node_size"]) + (1 - 1 / num_nodes)
    return 1 - 1 / ep


class _Unchanged(nn.Module):
    """Experts that return their rows unchanged."""

    def forward(self, rows: Tensor, counts_L: Tensor) -> Tensor:
        return rows


@torch.no_grad()
def _seconds(travel, routing: Routing, rows: Tensor, groups: parallel.ParallelGroups) -> float:
    """Return the seconds that the slowest rank takes to send the rows and get them back."""
    wait = torch.cuda.synchronize if rows.is_cuda else lambda: None
    dist.barrier(groups.data_group)
    wait()
    start = time.perf_counter()
    facts = {"name": "selftest", "d_model": rows.shape[1]}
    experts = _Unchanged()
    with travel.session("selftest", lambda _: facts, experts, rows) as session:
        session.run(routing, routing.weight_TK, [rows], ExpertCall(experts, "selftest", rows, training=False))
    wait()
    seconds = torch.tensor(time.perf_counter() - start, dtype=torch.float64, device=rows.device)
    collectives.run(dist.all_reduce, seconds, dist.ReduceOp.MAX, group=groups.data_group)
    return seconds.item()
