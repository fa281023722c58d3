"""Goals of this project for the layer, and whether a run has met them.

Whether a goal is met is decided by the estimate; its interval is in the table. If a run has both of our backends, the
goals apply to the native one.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from bench import frame
from bench.layer import contenders, limits
from bench.layer.rows import Row, speedup
from bench.layer.sweeps import Along, curve_label, same_curve

OF_THE_LIMIT = {
    "fp32": {"A": 0.85, "B": 0.90, "C": 0.90, "D": 0.85},
    "bf16": {"A": 0.68, "B": 0.90, "C": 0.90, "D": 0.90},
}
OVER_THE_PEER = {
    "fp32": dict.fromkeys("ABCD", 1.1),
    "bf16": {"A": 1.4, "B": 1.2, "C": 1.2, "D": 1.4},
}
ENOUGH_OF_THE_LIMIT = 0.95  # meets the goal over the peer too
OVER_BRUTE_FORCE = {("A", "bf16"): 47.0}
BELOW_GROUPED_MM = {"D": 2.5}
GROUPED_MM = "HF grouped_mm"
# Per assignment: expert, order and inverse in int64, and 8 bytes for the weight and others. Per expert: the offsets of
# its rows.
INDEX_BYTES = 32
OFFSET_BYTES = 16
# On an H100-class GPU in bf16: fractions of dense GEMMs by pass and shape, speedups over peers, fractions of a copy.
OF_THE_LIMIT_ON_CUDA = {
    "forward": {"G1": 0.70, "G2": 0.70, "G3": 0.45},
    "forward+backward": {"G1": 0.60, "G2": 0.60, "G3": 0.45},
}
OVER_PEERS_ON_CUDA = {GROUPED_MM: 1.2, "sorted grouped_mm": 1.2, "ScatterMoE": 1.3}
OF_THE_COPY = {"gather": 0.85, "combine": 0.85}
MOST_AT_SKEW = {4.0: 1.15}
MOST_OVER_SPLIT = 1.15


@dataclass(frozen=True)
class Goal:
    """A goal and the measured value."""

    what: str
    is_met: bool

    def __str__(self) -> str:
        return f"* {'met' if self.is_met else 'MISSED'}: {self.what}"


def of_shapes(rows: Sequence[Row]) -> list[Goal]:
    """Return the goals at the shapes A to D with backward, or on a GPU at G1 to G3 and over peers."""
    asked = [row for row in rows if row.ours]
    on_host = [row for row in asked if row.point.problem.device == "cpu" and row.point.backward]
    on_cuda = [row for row in asked if row.point.problem.device != "cpu"]
    return [goal for row in on_host for goal in _of_row(row)] + [goal for row in on_cuda for goal in _on_cuda(row)]


def of_kernels(measured: Sequence[frame.Measurement]) -> list[Goal]:
    """Return the goals of kernels, as fractions of a copy (`bench.layer.bandwidth`)."""
    goals = []
    for row in measured:
        for name, least in OF_THE_COPY.items():
            if name in row.seconds and row.reference in row.seconds:
                ratio = row.throughput(name) / row.throughput(row.reference)
                what = f"{row.label}: {name} at {ratio:.3f} of the {row.reference} (at least {least})"
                goals.append(Goal(what, ratio >= least))
    return goals


def _on_cuda(row: Row) -> Iterator[Goal]:
    point = row.point
    ours = row.ours
    if point.precision != "bf16":
        return
    head = f"{point.label}: {ours}"
    of_limit = row.timed.ratio(ours)
    least = OF_THE_LIMIT_ON_CUDA[point.passes].get(point.problem.shape.name)
    if least is not None and of_limit is not None:
        yield Goal(f"{head} at {of_limit} of the {limits.DENSE} (at least {least})", of_limit.estimate >= least)
    for peer, factor in OVER_PEERS_ON_CUDA.items():
        over = speedup(row.timed, ours, peer)
        if over is not None:
            yield Goal(f"{head} {over} times as fast as {peer} (at least {factor})", over.estimate >= factor)
    if ours in row.saved and point.problem.shape.gated:
        shape = point.problem.shape
        own = row.saved[ours].total - row.saved[ours].router
        bytes_of_rows = 4 * shape.rows * shape.d_hidden  # the tokens are the input, which is not counted
        most = bytes_of_rows + INDEX_BYTES * shape.rows + OFFSET_BYTES * (shape.num_experts + 1)
        kept = f"{own / 1e6:.2f} MB for backward besides its input and its router (at most {most / 1e6:.2f} MB)"
        yield Goal(f"{head} saves {kept}", own <= most)


def _of_row(row: Row) -> Iterator[Goal]:
    shape = row.point.problem.shape
    precision = row.point.precision
    ours = row.ours
    head = f"{row.point.label}: {ours}"
    of_limit = row.timed.ratio(ours)
    least = OF_THE_LIMIT[precision].get(shape.name)
    if least is not None and of_limit is not None:
        yield Goal(f"{head} at {of_limit} of the {limits.DENSE} (at least {least})", of_limit.estimate >= least)
    factor = OVER_THE_PEER[precision].get(shape.name)
    peer = row.best_peer
    over_peer = speedup(row.timed, ours, peer)
    if factor is not None and over_peer is not None and of_limit is not None:
        is_met = over_peer.estimate >= factor or of_limit.estimate >= ENOUGH_OF_THE_LIMIT
        bound = f"at least {factor}, or {ENOUGH_OF_THE_LIMIT} of the {limits.DENSE}"
        yield Goal(f"{head} {over_peer} times as fast as the best dropless peer, {peer} ({bound})", is_met)
    least = OVER_BRUTE_FORCE.get((shape.name, precision))
    if least is not None and row.slow is not None:
        over_brute = speedup(row.slow, ours, contenders.BRUTE_FORCE)
        if over_brute is not None:
            what = f"{head} {over_brute} times as fast as {contenders.BRUTE_FORCE} (at least {least:g})"
            yield Goal(what, over_brute.estimate >= least)
    yield from _of_memory(row, head)


def _of_memory(row: Row, head: str) -> Iterator[Goal]:
    shape = row.point.problem.shape
    ours = row.ours
    if ours not in row.saved or shape.name not in OF_THE_LIMIT[row.point.precision]:
        return
    saved = row.saved[ours]
    rows = shape.rows * shape.height * row.point.problem.dtype.itemsize
    most = rows + INDEX_BYTES * shape.rows + OFFSET_BYTES * (shape.num_experts + 1)
    own = saved.total - saved.router
    yield Goal(
        f"{head} saves {own / 1e6:.2f} MB for backward, and its router {saved.router / 1e6:.2f} MB "
        f"(without the router at most T K P elements and indices, {most / 1e6:.2f} MB)",
        own <= most,
    )
    least = BELOW_GROUPED_MM.get(shape.name)
    if least is not None and GROUPED_MM in row.saved:
        below = row.saved[GROUPED_MM].total / saved.total
        what = f"{head} saves {below:.2f} times less for backward than {GROUPED_MM}, routers included"
        yield Goal(f"{what} (at least {least})", below >= least)


def of_sweep(sweep: str, rows: Sequence[Row], interleaved: Sequence[Along] = ()) -> list[Goal]:
    """Return the goals along the axis of a sweep: experts and skew have some."""
    goals = []
    for curve in same_curve([row for row in rows if row.point.backward and row.ours]):
        head = f"{curve_label(curve)}: {curve[0].ours}"
        if sweep == "experts":
            over = {row.point.value: speedup(row.timed, row.ours, limits.SPLIT) for row in curve}
            times = {value: 1 / ratio.estimate for value, ratio in over.items() if ratio is not None}
            if times:
                worst = max(times, key=times.__getitem__)
                what = f"{head} at most {times[worst]:.3f} times the {limits.SPLIT} (at {worst:g} experts; at most "
                goals.append(Goal(f"{what}{MOST_OVER_SPLIT})", times[worst] <= MOST_OVER_SPLIT))
    for one in interleaved if sweep == "skew" else ():
        for value, ratio in one.over_first().items():
            most = MOST_AT_SKEW.get(value)
            if most is not None and one.curve[0].point.value == 1 and one.curve[0].point.backward:
                what = f"{one.label}: {one.name} takes {ratio:.3f} times as long at {value:g}x skew (at most {most})"
                goals.append(Goal(what, ratio <= most))
    return goals
