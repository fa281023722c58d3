"""``python -m bench layer``: one Mixture-of-Experts layer, forward and backward, against the peers that are installed.

Every row's reference is the limit: the same FLOPs as dense GEMMs into memory that is there already. A contender's ratio
is so the fraction of the limit that it reaches.
"""

import functools
import math
from collections.abc import Sequence

import torch

from bench import contenders, frame, options, report
from bench.intervals import Interval, trimmed_mean_interval
from pretrain import process

LIMIT, OURS, BRUTE = "GEMM limit", "fmoe", "brute force"
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def main(argv: Sequence[str]) -> None:
    parser = options.parser("layer", __doc__, rounds=10, warmup=2)
    parser.add_argument("--shapes", default="A,B,C,D", help="of bench.contenders.SHAPES, by comma")
    parser.add_argument("--precision", nargs="+", choices=list(DTYPES), default=list(DTYPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--forward", action="store_true", help="forward alone, without gradients")
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    arguments = parser.parse_args(argv)
    _start_megatron()
    rows = []
    try:
        for name in arguments.shapes.split(","):
            for precision in arguments.precision:
                for threads in arguments.threads:
                    torch.set_num_threads(threads)
                    label = f"{contenders.SHAPES[name]} {precision} threads {threads}"
                    rows.append(_measure(contenders.SHAPES[name], DTYPES[precision], label, arguments))
                    print(label, flush=True)
    finally:
        process.stop()
    report.write(rows, arguments.out, "layer")
    for row in rows:
        print("\n".join(_against_peers(row)))


def _start_megatron() -> None:
    """megatron-core's layer wants its process groups."""
    from megatron_patch import cpu

    cpu.install()
    from megatron.core import parallel_state

    process.start()
    parallel_state.initialize_model_parallel()


def _measure(shape: contenders.Shape, dtype: torch.dtype, label: str, arguments) -> frame.Measurement:
    backward = not arguments.forward
    entries = [frame.Contender(LIMIT, functools.partial(contenders.gemm_limit, shape, dtype, backward), shape.tokens)]
    for name, build in contenders.LAYERS.items():
        if name not in arguments.without:
            setup = functools.partial(contenders.layer_step, build, shape, dtype, backward)
            entries.append(frame.Contender(name, setup, shape.tokens))
    return frame.measure(
        entries, rounds=arguments.rounds, warmup=arguments.warmup, reference=LIMIT, seed=arguments.seed, label=label
    )


def speedup(row: frame.Measurement, name: str, over: str) -> Interval | None:
    """Paired ratio of two contenders: time of ``over`` / time of ``name``; None where one has failed."""
    if name not in row.seconds or over not in row.seconds:
        return None
    pairs = zip(row.seconds[over], row.seconds[name], strict=True)
    return trimmed_mean_interval([[math.log(a / b) for a, b in pairs]]).exp()


def _against_peers(row: frame.Measurement) -> list[str]:
    peers = [name for name in row.seconds if name not in (LIMIT, OURS, BRUTE)]
    if OURS not in row.seconds or not peers:
        return []
    best = min(peers, key=row.median)
    lines = [f"{row.label}: {OURS} over the best peer ({best}) {speedup(row, OURS, best)}"]
    if (brute := speedup(row, OURS, BRUTE)) is not None:
        lines.append(f"{row.label}: {OURS} over {BRUTE} {brute}")
    return lines
