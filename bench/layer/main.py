"""``python -m bench layer``: our Mixture-of-Experts layer against the installed peers and against GEMM limits.

The reference of every row is the GEMM limit: the same FLOPs as dense GEMMs into allocated memory. A contender's ratio
is thus the fraction of the limit that it reaches.
"""

import argparse
from collections.abc import Sequence
from dataclasses import replace
from importlib.util import find_spec

import torch

from bench import frame, options, report
from bench.layer import goals, limits, sweeps
from bench.layer.device import Cpu, Cuda, of_name
from bench.layer.problem import SHAPES, Problem
from bench.layer.rows import PASSES, PRECISIONS, Point, Row, Settings, measure
from fmoe.errors import UserError, known_names
from fmoe.kernels import backends
from pretrain.start import process

_SHAPES = {device.name: device.shapes for device in (Cpu, Cuda)}
_COLUMNS = (
    f"`{limits.SPLIT}`: the same GEMMs over the weights of E experts, one after the other, rows as even as possible.",
    "`saved`: memory that autograd saves in the forward pass, each block once, without parameters and input; "
    "T K P elements are the first matrix's outputs of all assignments.",
    "`peak`: maximum that two steps add to the resident memory of a new process: gradients, activations, scratch.",
    "A row's contenders have the same tokens, weights and choices, but Tutel, DeepSpeed, ScatterMoE and SonicMoE draw "
    "their own weights. Brute force and others that are slow are timed separately, with the "
    f"{limits.DENSE} and ours, in 3 rounds; `ours over it` is the speedup of ours over them.",
)
_ON_CUDA = (
    "Times are between events on the stream. `peak` is of torch's allocator; `host syncs` are waits of the host in a "
    "step; bytes/s of kernels count every input read and every output written once. FastMoE is not among the peers: "
    "its package has the same name as ours."
)


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse_args(argv)
    device = of_name(arguments.device, arguments.peak, needs_gpu=not arguments.list)
    arguments.precision = arguments.precision or device.precisions
    arguments.passes = arguments.passes or device.passes
    settings = Settings(
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        seed=arguments.seed,
        seconds=arguments.seconds,
        patience=arguments.patience,
        without=arguments.without,
        only=arguments.only,
        device=device,
    )
    for option in ("without", "only"):
        for name in getattr(arguments, option) or ():
            if name not in settings.layers:
                raise UserError(f"--{option}={name!r} is not known; {known_names(name, settings.layers)}")
    if arguments.clock == "cpu" and device.name != "cpu":
        raise UserError(f"--clock=cpu needs --device cpu instead of {device.name}")
    if device.name == "cpu":
        device.clock = options.clock(arguments.clock, max(arguments.threads))
    runs = {sweep: points(sweep, arguments) for sweep in arguments.sweep or [None]}  # raises for any invalid option
    if arguments.list:
        for name, layer in settings.layers.items():
            if name not in settings.without and name in (settings.only or settings.layers):
                print(name if layer.is_installed() else f"without {name}: {layer.needs} is not installed")
        return
    try:
        for sweep, of_run in runs.items():
            rows = []
            for point in of_run:
                rows.append(measure(point, settings))
                _show(rows[-1])
                write(sweep, rows, arguments, is_shown=False)  # a run that is cut short has written its rows
            write(sweep, rows, arguments, _bandwidths(rows, settings), sweeps.along(sweep, rows, settings))
    finally:
        process.stop()


def _parser() -> argparse.ArgumentParser:
    parser = options.parser("layer", __doc__, rounds=10, warmup=1)
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu", help="cuda: the current GPU")
    parser.add_argument(
        "--shapes",
        default=None,
        help=f"from {', '.join(SHAPES)}, separated by commas; default: A,B,C,D, on a GPU G1,G2,G3, for sweeps S",
    )
    parser.add_argument("--sweep", nargs="+", choices=list(sweeps.SWEEPS), help="measure along these axes instead")
    parser.add_argument("--values", nargs="+", type=float, help="values of the sweeps, instead of their defaults")
    parser.add_argument(
        "--precision", nargs="+", choices=list(PRECISIONS), help="default: both on the CPU, bf16 on a GPU"
    )
    parser.add_argument(
        "--passes", nargs="+", choices=list(PASSES), help="default: forward+backward on the CPU, both on a GPU"
    )
    parser.add_argument(
        "--threads", nargs="+", type=int, default=[2], help="numbers of CPU threads, e.g. 1 2 for rows with each"
    )
    parser.add_argument("--without", nargs="*", default=[], help="contenders to leave out")
    parser.add_argument("--only", nargs="+", help="contenders to measure, besides the limits; default: all")
    parser.add_argument("--list", action="store_true", help="print the contenders; measure nothing, and need no GPU")
    options.add_clock(parser)
    parser.add_argument(
        "--seconds", type=float, default=60.0, help="about the time limit of a row, of at least 3 rounds"
    )
    parser.add_argument(
        "--patience",
        type=float,
        default=15.0,
        help="seconds per step beyond which slow contenders are left out",
    )
    parser.add_argument(
        "--peak",
        action=argparse.BooleanOptionalAction,
        default=True,
        help="measure peak memory (one process per contender)",
    )
    return parser


def points(sweep: str | None, arguments: argparse.Namespace) -> list[Point]:
    """Return the points that a run measures.

    Raises:
        UserError: a shape is unknown, or a value is invalid.
    """
    for count in arguments.threads:
        if count < 1:
            raise UserError(f"--threads={count} must be at least 1")
    if arguments.values and sweep is None:
        raise UserError(f"--values={' '.join(f'{value:g}' for value in arguments.values)} needs --sweep")
    found = []
    for name in (arguments.shapes or (_SHAPES[arguments.device] if sweep is None else "S")).split(","):
        if name not in SHAPES:
            raise UserError(f"--shapes has {name!r}; {known_names(name, SHAPES)}")
        for precision in arguments.precision:
            for passes in arguments.passes:
                for threads in arguments.threads if arguments.device == "cpu" else [torch.get_num_threads()]:
                    for value in [None] if sweep is None else arguments.values or sweeps.SWEEPS[sweep].values:
                        problem = _problem(sweep, SHAPES[name], PRECISIONS[precision], value, arguments.seed)
                        problem = replace(problem, device=arguments.device)
                        found.append(Point(problem, precision, passes, threads, value))
    return found


def _problem(sweep: str | None, shape, dtype, value: float | None, seed: int) -> Problem:
    if sweep is None:
        return Problem(shape, dtype, seed=seed)
    return sweeps.SWEEPS[sweep].problem(shape, dtype, value, seed)


def _bandwidths(rows: Sequence[Row], settings: Settings) -> list[frame.Measurement]:
    """Measure the memory-bound kernels at each shape and precision; return nothing without a GPU that has them."""
    if backends.current_gpu() is None or settings.device.name == "cpu":
        return []
    from bench.layer import bandwidth

    points = {f"{row.point.problem.shape}, {row.point.precision}, kernels": row.point.problem for row in rows}
    clock = settings.device.clock
    return [
        bandwidth.measure(replace(problem), label, settings.rounds, settings.seed, clock)
        for label, problem in points.items()
    ]


def write(
    sweep: str | None,
    rows: Sequence[Row],
    arguments: argparse.Namespace,
    others: Sequence[frame.Measurement] = (),
    interleaved: Sequence[sweeps.Along] = (),
    is_shown: bool = True,
) -> None:
    """Write the table and the JSON; if it is shown, print the table, and for a sweep draw it if matplotlib is there."""
    title = "layer" if sweep is None else f"layer, sweep of {sweep}"
    if arguments.device != "cpu":
        title += f" on {arguments.device}"
    asked = goals.of_shapes(rows) if sweep is None else goals.of_sweep(sweep, rows, interleaved)
    asked += goals.of_kernels(others)
    notes = [f"* {line}" for line in _COLUMNS]
    if arguments.clock == "cpu":
        notes.append("* Times are processor seconds of one thread.")
    if arguments.device != "cpu":
        notes.append(f"* {_ON_CUDA}")
    notes += [f"* {line}" for line in dict.fromkeys(line for row in rows for line in row.left_out)]
    if sweep is not None:
        notes += ["", "Along the axis:", "", *sweeps.lines(sweep, rows, interleaved)]
    if asked:
        notes += ["", "Goals:", "", *map(str, asked)]
    measurements = [measured for row in rows for measured in row.measurements()]
    found = [*measurements, *others, *(one.timed for one in interleaved)]
    report.write(found, arguments.out, title, notes=notes, means=False, is_shown=is_shown)
    if sweep is not None and is_shown:
        if find_spec("matplotlib") is None:
            print("no picture: matplotlib is not installed")
            return
        from bench.layer.figure import draw

        draw(sweep, rows, arguments.out / f"{report.file_name(title)}.png")


def _show(row: Row) -> None:
    measured = row.measurements()
    print("\n".join(["", *report.rows_table(measured), *report.failures(measured)]), flush=True)
    if row.ours is not None:
        print(f"{row.point.label}: {row.ours} at {row.timed.ratio(row.ours)} of the {limits.DENSE}", flush=True)
