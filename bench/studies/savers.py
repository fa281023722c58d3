"""``python -m bench savers``: loss against bytes sent, for compressed gradients and rare synchronization.

Data parallel ranks, which split the experts, train a small byte-level GPT on Python's standard library. Only the dense
part is compressed or averaged: an expert's gradient is complete on its rank. Hooks are torch's (fp16, post-local SGD)
and those of `fmoe.parallel.compression`. Every contender has the same weights, batches, SGD with momentum and learning
rates, none of which is tuned for it; 1-bit Adam is compared with AdamW, both at a tenth of the rate. In the warm-up,
DGC sends a falling share of the gradients, and the others send all. `GOALS` were set before the runs.

Geo-SGD (PaddlePaddle's) sends the change of the parameters since the last exchange. There, trainers send it to a
parameter server when they please; here all ranks average their changes at the same step, which gives LocalSGD's
parameters, up to rounding. DiLoCo makes a Nesterov step against the mean change.
"""

import math
import sysconfig
import time
import warnings
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import fmean, median

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor, nn

from bench import options, ranks, report
from bench.studies import sweep
from bench.studies.small_lm import SmallLM, loss_of
from bench.traffic import Traffic
from fmoe import parallel
from fmoe.errors import UserError
from fmoe.optim import OneBitAdam
from fmoe.parallel.compression import DGC, OneBit, PowerSGD, compress

REFERENCE = "all-reduce"
ADAM = "all-reduce, AdamW"
LENGTH = 64
# By contender: smallest factor by which the bytes fall after the warm-up, largest rise of the loss in nats.
GOALS = {"dgc": (100, 0.1), "onebit": (30, 0.05), "localsgd": (8, 0.05), "diloco": (8, 0.05)}


def main(argv: Sequence[str]) -> None:
    parser = options.bare_parser("savers", __doc__)
    parser.add_argument("--contenders", nargs="+", choices=CONTENDERS, default=list(CONTENDERS))
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2], help="seeds of weights and batches")
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--warmup", type=int, default=40, help="warm-up steps of the rate and of the contenders")
    parser.add_argument("--lr", type=float, default=0.2)
    parser.add_argument("--batch", type=int, default=8, help="sequences of 64 bytes per rank and step")
    parser.add_argument("--width", type=int, default=64, help="width of the model, a multiple of 4")
    parser.add_argument("--density", type=float, default=0.002, help="share of a gradient's elements that DGC sends")
    parser.add_argument("--rank", type=int, default=2, help="rank of PowerSGD's factors")
    parser.add_argument("--period", type=int, default=8, help="steps between averages of rare synchronization")
    parser.add_argument("--outer-lr", type=float, default=0.7, help="learning rate of DiLoCo's outer step")
    parser.add_argument("--outer-momentum", type=float, default=0.9, help="Nesterov momentum of DiLoCo's outer step")
    arguments = parser.parse_args(argv)
    options.at_least(
        arguments,
        ranks=2,
        steps=arguments.warmup + 1,
        warmup=1,
        batch=1,
        width=4,
        density=1e-6,
        rank=1,
        period=1,
        lr=0,
        outer_lr=0,
        outer_momentum=0,
        seeds=0,
    )
    if arguments.width % 4:
        raise UserError(f"--width={arguments.width} must be a multiple of 4")
    rows = ranks.run(arguments.ranks, train_all, arguments)
    report.write_rows(rows, table(rows, arguments), arguments.out, "savers")


def train_all(arguments) -> list[dict]:
    """Train every contender from every seed; return on every rank a row for each."""
    warnings.filterwarnings("ignore", module="torch")
    library = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    corpus = np.frombuffer(b"".join(path.read_bytes() for path in library), dtype=np.uint8)
    groups = parallel.init(ep=dist.get_world_size(), device_type="cpu")
    arguments.over = dist.new_group()  # of the dense part, so that its bytes are counted by themselves
    rows = []
    for seed in arguments.seeds:
        for name in arguments.contenders:
            rows.append({"contender": name, "seed": seed} | train(name, seed, corpus, groups, arguments))
            if dist.get_rank() == 0:
                print(f"{name}, seed {seed}: validation loss {rows[-1]['loss']:.4f}", flush=True)
    return rows


def train(name: str, seed: int, corpus: np.ndarray, groups: parallel.ParallelGroups, arguments) -> dict:
    """Train one contender; return its validation loss, bytes sent, seconds per step and dense parameters."""
    torch.manual_seed(seed)
    held_out = len(corpus) // 20
    model = parallel.DistributedDataParallel(SmallLM(groups, width=arguments.width, length=LENGTH), groups)
    step_of = CONTENDERS[name](model, groups, arguments)
    seconds = []

    def step(number: int) -> None:
        tokens = _batch(corpus[:-held_out], (seed, number, dist.get_rank()), arguments.batch)
        begin = time.perf_counter()
        model.zero_grad()
        loss_of(model, tokens).backward()
        step_of(arguments.lr * min(1.0, (number + 1) / arguments.warmup))
        seconds.append(time.perf_counter() - begin)

    with Traffic() as warmup:
        for number in range(arguments.warmup):
            step(number)
    with Traffic() as traffic:
        for number in range(arguments.warmup, arguments.steps):
            step(number)
    over = arguments.over.group_name
    result = {"loss": _validate(model, corpus[-held_out:]), "exchanged": traffic.sent - traffic.sent_over[over]}
    for key, part in (("warmup", warmup), ("sent", traffic)):
        result[key] = part.sent_over[over]
    seconds.clear()
    # Timed without the byte counter, over whole periods, because local SGD averages in one step of each.
    for number in range(arguments.steps, arguments.steps + 2 * arguments.period):
        step(number)
    dense = sum(p.numel() for n, p in model.named_parameters() if ".experts." not in n)
    return result | {"seconds": fmean(seconds), "dense": dense}


def _batch(corpus: np.ndarray, seed: tuple[int, ...] | int, count: int) -> Tensor:
    starts = np.random.default_rng(seed).integers(0, len(corpus) - LENGTH - 1, count)
    return torch.from_numpy(np.stack([corpus[start : start + LENGTH + 1] for start in starts]).astype(np.int64))


@torch.no_grad()
def _validate(model: nn.Module, corpus: np.ndarray) -> float:
    """Return the validation loss with dense parameters averaged over the ranks; restore each rank's own ones."""
    dense = [p for n, p in model.named_parameters() if ".experts." not in n]
    own = [p.clone() for p in dense]
    for parameter in dense:
        dist.all_reduce(parameter)
        parameter.div_(dist.get_world_size())
    loss = sum(loss_of(model, _batch(corpus, (n, dist.get_rank()), 64)) for n in range(4)) / 4
    dist.all_reduce(loss)
    for parameter, value in zip(dense, own, strict=True):
        parameter.copy_(value)
    return loss.item() / dist.get_world_size()


def _sgd(model: nn.Module, momentum: float = 0.9) -> torch.optim.SGD:
    return torch.optim.SGD(model.parameters(), lr=0.1, momentum=momentum)


def _stepping(optimizer) -> Callable[[float], None]:
    def step(rate: float) -> None:
        for group in optimizer.param_groups:
            group["lr"] = rate
        optimizer.step()

    return step


def _hooked(name: str) -> Callable[..., Callable[[float], None]]:
    def build(model, groups, arguments):
        from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

        model.register_comm_hook(arguments.over, getattr(default_hooks, name))
        return _stepping(_sgd(model))

    return build


def _power(model, groups, arguments):
    power = PowerSGD(arguments.over, rank=arguments.rank, warmup=max(2, arguments.warmup))
    model.register_comm_hook(power, compress)
    return _stepping(_sgd(model))


def _adam(model, groups, arguments):
    from torch.distributed.algorithms.ddp_comm_hooks import default_hooks

    model.register_comm_hook(arguments.over, default_hooks.allreduce_hook)
    return _at_a_tenth(_stepping(torch.optim.AdamW(model.parameters(), weight_decay=0.0)))


def _one_bit(model, groups, arguments):
    warmup = max(2, arguments.warmup)
    model.register_comm_hook(OneBit(arguments.over, warmup=warmup), compress)
    experts = [p for n, p in model.named_parameters() if ".experts." in n]
    dense = [p for n, p in model.named_parameters() if ".experts." not in n]
    steps = [
        _stepping(OneBitAdam(dense, weight_decay=0.0, freeze_step=warmup)),
        _stepping(torch.optim.AdamW(experts, weight_decay=0.0)),
    ]

    def step(rate: float) -> None:
        for each in steps:
            each(rate)

    return _at_a_tenth(step)


def _at_a_tenth(step: Callable[[float], None]) -> Callable[[float], None]:
    return lambda rate: step(rate / 10)


def _dgc(model, groups, arguments):
    model.register_comm_hook(DGC(arguments.over, density=arguments.density, warmup=arguments.warmup), compress)
    experts = [p for n, p in model.named_parameters() if ".experts." in n]
    dense = [p for n, p in model.named_parameters() if ".experts." not in n]
    # The hook has the momentum of the dense part.
    return _stepping(torch.optim.SGD([{"params": dense}, {"params": experts, "momentum": 0.9}], lr=0.1))


def _local(make: Callable[..., object]) -> Callable[..., Callable[[float], None]]:
    def build(model, groups, arguments):
        from torch.distributed.algorithms.ddp_comm_hooks import post_localSGD_hook
        from torch.distributed.optim import PostLocalSGDOptimizer

        alone, _ = dist.new_subgroups(1)  # a local step sends nothing
        state = post_localSGD_hook.PostLocalSGDState(arguments.over, alone, start_localSGD_iter=arguments.warmup)
        model.register_comm_hook(state, post_localSGD_hook.post_localSGD_hook)
        averager = make(arguments)
        return _stepping(PostLocalSGDOptimizer(_sgd(model), parallel.DenseAverager(averager)))

    return build


def _parameter_averager(arguments):
    from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager

    return PeriodicModelAverager(arguments.period, arguments.warmup, arguments.over)


def _delta_averager(arguments):
    return DeltaAverager(arguments.period, arguments.warmup, arguments.over)


def _diloco(arguments):
    outer = {"lr": arguments.outer_lr, "momentum": arguments.outer_momentum}
    return DeltaAverager(arguments.period, arguments.warmup, arguments.over, outer)


class DeltaAverager:
    """Like torch's ``PeriodicModelAverager``, but averages the changes of the parameters since the last average.

    Args:
        outer: learning rate and Nesterov momentum of a step against the mean change (DiLoCo); None for the mean change
            itself (synchronous Geo-SGD).
    """

    def __init__(self, period: int, warmup: int, group: dist.ProcessGroup, outer: dict[str, float] | None = None):
        self.period = period
        self.warmup = warmup
        self.group = group
        self.outer = outer
        self.step = 0
        self.base: dict[Tensor, Tensor] = {}
        self.momentum: dict[Tensor, Tensor] = {}

    @torch.no_grad()
    def average_parameters(self, parameters: Iterable[nn.Parameter]) -> None:
        parameters = list(parameters)
        step = self.step
        self.step += 1
        if step >= self.warmup and (step - self.warmup) % self.period == 0:
            change = torch.cat([(p - self.base[p]).flatten() for p in parameters])
            dist.all_reduce(change, group=self.group)
            change.div_(self.group.size())
            for p, delta in zip(parameters, change.split([p.numel() for p in parameters]), strict=True):
                p.copy_(self.base[p]).add_(self._outer_step(p, delta.view_as(p)))
        if step < self.warmup or (step - self.warmup) % self.period == 0:
            self.base = {p: p.clone() for p in parameters}

    def _outer_step(self, parameter: Tensor, change: Tensor) -> Tensor:
        if self.outer is None:
            return change
        momentum = self.momentum.setdefault(parameter, torch.zeros_like(change))
        momentum.mul_(self.outer["momentum"]).add_(change)
        return self.outer["lr"] * (change + self.outer["momentum"] * momentum)


CONTENDERS: dict[str, Callable[..., Callable[[float], None]]] = {
    REFERENCE: _hooked("allreduce_hook"),
    "fp16": _hooked("fp16_compress_hook"),
    "powersgd": _power,
    "dgc": _dgc,
    ADAM: _adam,
    "onebit": _one_bit,
    "localsgd": _local(_parameter_averager),
    "geosgd": _local(_delta_averager),
    "diloco": _local(_diloco),
}


def table(rows: Sequence[dict], arguments) -> str:
    """Return Markdown: a row per contender, with losses, and bytes that a rank sends of the dense part."""
    header = [
        "contender",
        "validation loss",
        "over all-reduce",
        "MB",
        "MB per step",
        "saved",
        "goals",
        "exchange, MB per step",
    ]
    cells = [[*header, "ms per step"]]
    size = arguments.ranks
    of = {name: {row["seed"]: row for row in rows if row["contender"] == name} for name in arguments.contenders}
    for name, found in of.items():
        losses = {seed: row["loss"] for seed, row in found.items()}
        reference = ADAM if name == "onebit" else REFERENCE
        base = {seed: row["loss"] for seed, row in of.get(reference, {}).items()}
        gap = sweep.gap(losses, base) if name not in (REFERENCE, ADAM) else None
        steps = arguments.steps - arguments.warmup
        sent = median(row["sent"] for row in found.values()) / steps
        parameters = next(iter(found.values()))["dense"]
        dense = 2 * 4 * parameters * (size - 1) / size  # bytes that a rank sends in an all-reduce of float32
        factor, rise = GOALS.get(name, (None, None))
        cells.append(
            [
                name,
                _shown(sweep.mean_and_spread(list(losses.values()))),
                "" if gap is None else _shown(gap, "+"),
                f"{median(row['warmup'] + row['sent'] for row in found.values()) / 1e6:.2f}",
                f"{sent / 1e6:.4f}",
                f"{dense / sent:.1f} x",
                "" if factor is None else f">= {factor} x, <= {rise}",
                f"{median(row['exchanged'] for row in found.values()) / steps / 1e6:.3f}",
                f"{1e3 * median(row['seconds'] for row in found.values()):.1f}",
            ]
        )
    title = (
        f"{arguments.steps} steps on {size} ranks, {len(arguments.seeds)} seeds; bytes that a rank sends "
        f"of the dense part ({parameters:,} parameters), in all and per step after the warm-up of {arguments.warmup}:"
    )
    lines = [title, "", *report.table(cells)]
    if "dgc" in of and REFERENCE in of:
        pairs = [(of[REFERENCE][seed], row) for seed, row in of["dgc"].items()]
        links = [median(bandwidth(reference, row, share, steps) for reference, row in pairs) for share in (0.6, 0.4)]
        lines += [
            "",
            f"dgc takes 40% less time per step at {links[0] / 1e6:.3g} MB/s, 60% at {links[1] / 1e6:.3g} MB/s.",
        ]
    return "\n".join(lines) + "\n"


def bandwidth(reference: dict, row: dict, share: float, steps: int) -> float:
    """Return the bytes per second of a link between ranks on which a step takes ``share`` of the reference's time.

    A step takes its seconds here plus those of its bytes on the link, one after the other. Infinite if the step needs
    no slow link for this; 0.0 if no link is slow enough.
    """
    saved = (share * reference["sent"] - row["sent"]) / steps
    added = row["seconds"] - share * reference["seconds"]
    if added <= 0:
        return math.inf
    return max(0.0, saved / added)


def _shown(values: tuple[float, float] | None, sign: str = "") -> str:
    return "diverged" if values is None else f"{values[0]:{sign}.4f} ± {values[1]:.4f}"
