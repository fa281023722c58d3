"""``python -m bench step``: a whole training step, in one process and split over ranks, and its time by region.

Contenders differ only in the Mixture-of-Experts layer: ours with experts on torch's operators or on the kernels for the
device, and megatron-core's own MoELayer with the same experts, top-k and capacity. Everything around it (attention,
schedule, DDP, optimizer) is the same for all.
Splits over several processes run on gloo and divide the machine's cores; a round's time is that of the slowest rank. In
one process on a CPU, the blocks of experts are also timed by themselves, and the time of a step is split into regions.
"""

import argparse
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from bench import frame, options, ranks, report
from fmoe.errors import UserError
from pretrain.config import Recipe, load_recipe
from pretrain.start import process
from pretrain.start.process import Processes

# Keys of [parallel]. TP2 has sequence parallelism, without which megatron-core's layer refuses to train.
SPLITS: dict[str, dict[str, int]] = {"1": {}, "EP2": {"expert": 2}, "TP2": {"tensor": 2}}

_COLUMNS = (
    "Seconds in regions are medians over steps that were measured separately from the timed ones, forward and backward "
    "together. `block`: router to combine and the rest of the layer. The native operation gathers and combines too: "
    "its dispatch and combine are in `experts`.",
    "`blocks alone`: forward and backward of all layers' blocks on the inputs that they had in a step, one after the "
    "other.",
)


def main(argv: Sequence[str]) -> None:
    arguments = _parser().parse_args(argv)
    options.clock(arguments.clock, arguments.threads)  # raises for --clock cpu with several threads
    recipes = {name: _recipe(name, "1") for name in arguments.recipe}  # raises UserError before anything is measured
    if arguments.list:
        from bench.step.contenders import names_on

        print("\n".join(names_on(arguments.device or _device())))
        return
    if arguments.device == "cuda" and _device() != "cuda":
        raise UserError(f"--device cuda: torch {torch.__version__} sees no GPU here")
    rows = []
    notes = []
    for name in recipes:
        for split in arguments.splits:
            size = _recipe(name, split).parallel.world_size
            of_split = _alone(name, arguments) if size == 1 else _together(size, name, split, arguments)
            rows += of_split["rows"]
            notes += of_split["goals"]
            _write(rows, notes, arguments.out, is_shown=False)  # a run that is cut short has written its rows
    _write(rows, notes, arguments.out)


def _write(rows: list[frame.Measurement], goals: list[str], out: Path, is_shown: bool = True) -> None:
    notes = [*(f"* {line}" for line in _COLUMNS), "", "Goals:", "", *goals] if goals else []
    report.write(rows, out, "step", notes=notes, means=False, is_shown=is_shown)


def _device() -> str:
    """Return the kind of device that `process.start` chooses."""
    return "cuda" if torch.cuda.is_available() else "cpu"


def _parser() -> argparse.ArgumentParser:
    parser = options.parser("step", __doc__, rounds=10, warmup=2)
    parser.add_argument(
        "--recipe",
        nargs="+",
        default=["quickstart", "gpt-64"],
        help="recipes whose model and batch are measured; gpt-64 is bench/step/gpt-64.toml",
    )
    parser.add_argument("--splits", nargs="+", choices=list(SPLITS), default=["1"], help="1: no split, else 2 ranks")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16", "fp16"], default=["fp32", "bf16"])
    parser.add_argument("--layers", type=int, default=None, help="number of layers, instead of the recipe's")
    parser.add_argument(
        "--threads",
        type=int,
        default=None,
        help="threads of each process; by default the cores divided by the processes",
    )
    parser.add_argument("--looks", type=int, default=4, help="steps of each contender whose time is split into regions")
    parser.add_argument("--device", choices=["cuda"], help="raise without a GPU; default: a GPU if there is one")
    parser.add_argument("--list", action="store_true", help="print the contenders; measure nothing, and need no GPU")
    options.add_clock(parser)
    return parser


def _recipe(name: str, split: str, layers: int | None = None) -> Recipe:
    own = Path(__file__).parent / f"{name}.toml"
    recipe = load_recipe(str(own) if own.is_file() else name)
    recipe = replace(recipe, parallel=replace(recipe.parallel, **{"expert": 1, "data": 1} | SPLITS[split]))
    if layers is not None:
        recipe = replace(recipe, model=replace(recipe.model, num_layers=layers))
    recipe.check()
    return recipe


def _alone(name: str, arguments) -> dict[str, list]:
    """Run in this process, on its GPU if it has one."""
    from megatron.core import parallel_state

    processes = process.start()
    try:
        return _measure_split(name, "1", processes, arguments)
    finally:
        parallel_state.destroy_model_parallel()  # the next recipe makes its own
        process.stop()


def _together(size: int, name: str, split: str, arguments) -> dict[str, list]:
    found = ranks.run(size, _on_a_rank, name, split, arguments)
    return {"rows": [frame.Measurement.from_json(row) for row in found["rows"]], "goals": found["goals"]}


def _on_a_rank(name: str, split: str, arguments) -> dict[str, Any]:
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    found = _measure_split(name, split, processes, arguments)
    return {"rows": [row.to_json() for row in found["rows"]], "goals": found["goals"]}


def _measure_split(name: str, split: str, processes: Processes, arguments) -> dict[str, list]:
    """Return the rows for each precision, and the goals as lines of text."""
    from megatron_patch import cpu

    cpu.install()
    for module in ("megatron", "torch"):  # what torch renames, megatron-core still calls by its old name
        warnings.filterwarnings("ignore", module=module)
    from bench.step import measure
    from bench.step.contenders import MEGATRON, Contenders
    from pretrain.engine import init_parallel

    threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // processes.world_size)
    torch.set_num_threads(threads)
    clock = options.CLOCKS[arguments.clock]
    recipe = _recipe(name, split, arguments.layers)
    init_parallel(recipe)
    rows = []
    goals = []
    for precision in arguments.precision:
        label = f"{name}, {split}, {precision}, {processes.world_size} x {threads} threads"
        of_row = replace(recipe, train=replace(recipe.train, precision=precision))
        contenders = Contenders(of_row, processes)
        timed = measure.steps(contenders, label, arguments, clock)
        contenders.names = [name for name in contenders.names if name in timed.seconds]  # the others have failed
        if processes.world_size > 1 or processes.device.type != "cpu":
            rows.append(timed)
        else:
            looked = measure.regions(contenders, arguments, clock)
            alone = measure.blocks_alone(contenders, f"{label}, blocks alone", arguments, clock)
            rows += [replace(timed, facts=measure.facts(looked)), alone]
            goals += [str(comparison.goal()) for comparison in measure.comparisons(timed, alone, looked)]
        if processes.is_main:
            told = {other: str(timed.ratio(other)) for other in timed.seconds if other != MEGATRON}
            print(f"{label}: ratio to {MEGATRON} {told}", flush=True)
    return {"rows": rows, "goals": goals}
