"""Time of a pipeline's step, by replaying the order in which stages run their passes."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

# Micro batches that are replayed, in multiples of the number of stages. More add the time of the busiest stage.
_REPLAYED = 4


class Pass(NamedTuple):
    """A pass (forward, backward or weights) of a micro batch through a stage's chunk of layers."""

    kind: str
    chunk: int
    micro_batch: int


@dataclass(frozen=True)
class Times:
    """Seconds of the passes of a micro batch through a chunk of layers.

    Gradients of weights have passes of their own only in zero_bubble. Otherwise they belong to the backward pass.
    """

    forward: float
    backward: float
    weights: float = 0.0

    @property
    def total(self) -> float:
        """Seconds of all passes."""
        return self.forward + self.backward + self.weights


def order(schedule: str, stage: int, num_stages: int, num_chunks: int, micro_batches: int) -> Iterator[Pass]:
    """Yield the passes of a stage in the order of a schedule.

    Args:
        schedule: a value of ``parallel.schedule``. With several chunks, 1f1b is Megatron-core's interleaved schedule
            (arXiv 2104.04473 section 2.2), where the number of stages divides ``micro_batches``.
        num_chunks: chunks of layers of each stage.
    """
    total = micro_batches * num_chunks
    ahead = num_stages - stage - 1
    if num_chunks > 1:
        ahead = 2 * ahead + (num_chunks - 1) * num_stages
    if schedule == "gpipe":
        ahead = total
    round_size = num_stages * num_chunks

    def placed(kind: str, number: int) -> Pass:
        if num_chunks == 1:
            return Pass(kind, 0, number)
        chunk = number % round_size // num_stages
        if kind == "backward":
            chunk = num_chunks - 1 - chunk
        return Pass(kind, chunk, number // round_size * num_stages + number % num_stages)

    for number in range(total + ahead):
        if number < total:
            yield placed("forward", number)
        oldest = number - ahead
        if 0 <= oldest < total:
            yield placed("backward", oldest)
            if schedule == "zero_bubble" and oldest >= stage:
                yield Pass("weights", 0, oldest - stage)
    if schedule == "zero_bubble":
        for number in range(max(0, total - stage), total):
            yield Pass("weights", 0, number)


def most_in_flight(schedule: str, stage: int, num_stages: int, num_chunks: int, micro_batches: int) -> int:
    """Return the largest number of chunks' micro batches whose activations a stage holds at the same time."""
    held = 0
    most = 0
    last = "weights" if schedule == "zero_bubble" else "backward"
    for kind, _, _ in order(schedule, stage, num_stages, num_chunks, min(micro_batches, _REPLAYED * num_stages)):
        held += (kind == "forward") - (kind == last)
        most = max(most, held)
    return micro_batches if schedule == "gpipe" else most


def seconds(schedule: str, times: Sequence[Sequence[Times]], micro_batches: int, hop: float) -> float:
    """Return the seconds from the first pass of a step to the last one.

    Args:
        times: seconds of each stage's chunks: chunk c of stage s holds the layers after those of chunk c of stage
            s - 1, and of the last stage's chunk c - 1.
        hop: seconds of a message between neighboring stages.
    """
    num_stages = len(times)
    num_chunks = len(times[0])
    replayed = min(micro_batches, _REPLAYED * num_stages)
    ends: dict[tuple[str, int, int], float] = {}  # of passes, by kind, place of the chunk in the model, micro batch
    queues = [list(order(schedule, stage, num_stages, num_chunks, replayed)) for stage in range(num_stages)]
    clocks = [0.0] * num_stages
    done = [0] * num_stages
    last_place = num_stages * num_chunks - 1
    while any(done[stage] < len(queue) for stage, queue in enumerate(queues)):
        for stage, queue in enumerate(queues):
            while done[stage] < len(queue):
                kind, chunk, number = queue[done[stage]]
                place = chunk * num_stages + stage
                needed = _needed(kind, place, number, last_place)
                if needed is not None and needed not in ends:
                    break
                ready = 0.0 if needed is None else ends[needed] + hop * (needed[1] != place)
                clocks[stage] = max(clocks[stage], ready) + getattr(times[stage][chunk], kind)
                ends[kind, place, number] = clocks[stage]
                done[stage] += 1
    busiest = max(sum(t.total for t in chunks) for chunks in times)
    return max(clocks) + (micro_batches - replayed) * busiest


def _needed(kind: str, place: int, number: int, last_place: int) -> tuple[str, int, int] | None:
    """Return the pass of another chunk (or stage) that a pass waits for; None if it waits for none."""
    if kind == "forward" and place:
        return ("forward", place - 1, number)
    if kind == "backward" and place == last_place:
        return ("forward", place, number)
    if kind == "backward":
        return ("backward", place + 1, number)
    return None
