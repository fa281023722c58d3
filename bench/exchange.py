"""``python -m bench exchange``: exchanges of rows, forward and backward, over 2 and 4 gloo ranks.

Our exchanges and megatron-core's token dispatchers send the same rows by the same choices to experts that return them
unchanged. The report has the time, the bytes sent, and how often the host reads values. A round's time is that of the
slowest rank. Before they are timed, all must compute the right output and gradients.
"""

import functools
import time
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
import torch.distributed as dist

from bench import dispatchers, frame, options, ranks, report
from bench.dispatchers import Batch
from bench.frame import Measurement
from bench.traffic import Traffic
from fmoe.errors import UserError

OURS = "fmoe all_to_all"
PEERS = ("megatron-core alltoall", "megatron-core allgather")
FEWEST_ROUNDS = 5
MOST_PADDING = 2.5  # the padded exchange is left out where, to drop nothing, it would send more times the rows
LIMIT = 1e-5
LIMIT_BF16 = 2e-2


def main(argv: Sequence[str]) -> None:
    parser = options.parser("exchange", __doc__, rounds=24, warmup=0)  # verification has run them all twice
    parser.add_argument("--ranks", nargs="+", type=int, default=[2, 4])
    parser.add_argument("--tokens", nargs="+", type=int, default=[1024, 8192, 65536], help="tokens per rank")
    parser.add_argument(
        "--skew", nargs="+", type=float, default=[1, 2, 4], help="load of the hottest expert, in even shares"
    )
    parser.add_argument("--d-model", type=int, default=128)
    parser.add_argument("--num-experts", type=int, default=8)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument(
        "--seconds", type=float, default=6.0, help=f"about the time limit of a row, of at least {FEWEST_ROUNDS} rounds"
    )
    arguments = parser.parse_args(argv)
    _check(arguments)
    rows = []
    for size in arguments.ranks:
        rows += map(Measurement.from_json, ranks.run(size, _measure_all, arguments))
    report.write(rows, arguments.out, "exchange")
    print("\n".join(verdict(rows)))


def _check(arguments) -> None:
    options.at_least(arguments, tokens=1, d_model=1, num_experts=1, top_k=1, warmup=0)
    for size in arguments.ranks:
        if size < 2 or arguments.num_experts % size:
            raise UserError(f"--ranks={size} must be at least 2 and divide --num-experts={arguments.num_experts}")
    for skew in arguments.skew:
        if not 0 < skew <= arguments.num_experts / arguments.top_k:
            raise UserError(
                f"--skew={skew:g} must be above 0 and at most {arguments.num_experts / arguments.top_k:g}, at which "
                "all tokens choose the hottest expert"
            )


def _measure_all(arguments) -> list[dict]:
    """Return, on every rank, the rows of the report for one number of ranks."""
    for module in ("megatron", "torch"):  # what torch renames, megatron-core still calls by its old name
        warnings.filterwarnings("ignore", module=module)
    dispatchers.start_megatron()
    rows = []
    for tokens in arguments.tokens:
        for skew in arguments.skew:
            row = _measure(tokens, skew, arguments)
            rows.append(row.to_json())
            if dist.get_rank() == 0:
                print(f"{row.label}: {OURS} is {row.ratio(OURS)} times as fast as {row.reference}", flush=True)
    return rows


def _measure(tokens: int, skew: float, arguments) -> Measurement:
    size = dist.get_world_size()
    rank = dist.get_rank()
    seed = size * arguments.seed + rank
    batch = Batch.random(tokens, arguments.d_model, arguments.num_experts, arguments.top_k, skew, seed)
    steps = _steps(batch)
    seconds = 0.0
    facts = {}
    for name, step in steps.items():
        _verify(name, step, batch)
        dist.barrier()
        start = time.perf_counter()
        with Traffic() as traffic:
            step()
        seconds += ranks.slowest(time.perf_counter() - start)
        facts[name] = _facts(traffic)
    rounds = max(FEWEST_ROUNDS, min(arguments.rounds, int(arguments.seconds / seconds)))
    result = frame.measure(
        [frame.Contender(name, functools.partial(lambda step: step, step), tokens) for name, step in steps.items()],
        rounds=rounds,
        warmup=arguments.warmup,
        reference=PEERS[0],
        seed=arguments.seed,
        label=f"{size} ranks, {tokens} tokens, skew {skew:g}",
        line_up=dist.barrier,
        agree=ranks.slowest,
    )
    if result.failures:  # on this rank: the others cannot go on without it
        raise RuntimeError(f"{result.label}: {result.failures}")
    return replace(result, facts=facts)


def _steps(batch: Batch) -> dict[str, Callable[..., dispatchers.Result]]:
    ours = functools.partial(dispatchers.ours, batch)
    steps = {
        OURS: ours("all_to_all"),
        "fmoe all_to_all, bf16 on the wire": ours("all_to_all", wire_dtype=torch.bfloat16),
        "fmoe all_gather": ours("all_gather"),
    }
    if batch.most * batch.num_experts <= MOST_PADDING * batch.expert_TK.numel():
        steps["fmoe padded"] = ours("padded")
    if dist.get_world_size() >= 4:
        steps["fmoe hierarchical"] = ours("hierarchical", node_size=2)
    return steps | {name: dispatchers.megatron(batch, name.split()[-1]) for name in PEERS}


def _verify(name: str, step: Callable[..., dispatchers.Result], batch: Batch) -> None:
    """Check a contender. Each expert multiplies by another factor, so that a row at the wrong expert is detected."""
    first = dist.get_rank() * (batch.num_experts // dist.get_world_size())

    def experts(rows, counts):
        factor_L = torch.arange(first + 1, first + 1 + len(counts), dtype=rows.dtype)
        return rows * factor_L.repeat_interleave(torch.as_tensor(counts)).unsqueeze(1)

    x_TD = batch.x_TD.double()
    grad_TD = batch.grad_TD.double()
    scale_TK = (batch.expert_TK + 1).double()
    total_T1 = (scale_TK * batch.weight_TK).sum(1, keepdim=True)
    expected = (total_T1 * x_TD, total_T1 * grad_TD, scale_TK * (x_TD * grad_TD).sum(1, keepdim=True))
    limit = LIMIT_BF16 if "bf16" in name else LIMIT
    names = "output", "gradient of rows", "gradient of weights"
    for what, value, right in zip(names, step(experts), expected, strict=True):
        error = ranks.slowest(((value - right).norm() / right.norm()).item())  # the same verdict on all ranks
        if not error < limit:
            raise RuntimeError(f"{name}: {what} has relative error {error:.1e}, the limit is {limit:.0e}")


def _facts(traffic: Traffic) -> dict[str, str]:
    sent = ranks.slowest(traffic.sent)
    reads = ", ".join(f"{count} {kind}" for kind, count in sorted(traffic.reads.items()))
    return {
        "MB sent": f"{sent / 1e6:.2f}",
        "collectives": str(sum(traffic.collectives.values())),
        "host reads": f"{traffic.reads.total()}{f' ({reads})' if reads else ''}",
    }


def verdict(rows: Sequence[Measurement]) -> list[str]:
    """Return lines that compare ours with each peer, and with the best peer of each row: mean ratio and slower rows."""
    against = {name: [replace(row, reference=name) for row in rows] for name in PEERS}
    best = [replace(row, reference=min(PEERS, key=row.median)) for row in rows]
    lines = []
    for name, compared in {**against, "the faster of them": best}.items():
        mean = frame.geometric_mean_of_ratios(compared, OURS)
        slower = [row.label for row in compared if row.ratio(OURS).high < 1]
        lines.append(
            f"{OURS} over {name}, geometric mean of {len(rows)} rows: {mean}; "
            f"reliably slower in {len(slower)}{': ' + '; '.join(slower) if slower else ''}"
        )
    mean = frame.geometric_mean_of_ratios(against[PEERS[1]], "fmoe all_gather")
    return [*lines, f"fmoe all_gather over {PEERS[1]}, geometric mean of {len(rows)} rows: {mean}"]
