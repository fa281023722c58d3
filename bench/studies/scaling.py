"""``python -m bench scaling``: weak and strong scaling of a training step over gloo processes of one thread each.

Strong: the same global batch for every number of processes. Weak: the batch grows with the number of processes. A step
runs from the batch to the new weights. The numbers of processes are measured in turn, ``--visits`` times in alternating
order and with new processes, because drift of the machine would otherwise look like scaling.
"""

import json
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from statistics import median

import torch
import torch.distributed as dist

from bench import options, ranks, report
from bench.samples import Tokens
from fmoe.errors import UserError
from pretrain.config import Recipe, load_recipe

MODES = ("strong", "weak")
SPLITS = ("data", "expert", "tensor", "pipeline", "context")


@dataclass(frozen=True)
class Row:
    """One mode at one number of processes.

    Attributes:
        tokens: tokens of a step.
        wall: seconds of each step on the slowest rank.
        cpu: processor seconds of each step, of all threads of all ranks together.
    """

    mode: str
    processes: int
    tokens: int
    wall: list[float]
    cpu: list[float]

    @property
    def speed(self) -> float:
        """Tokens per second of wall time."""
        return self.tokens / median(self.wall)

    @property
    def cost(self) -> float:
        """Processor seconds per million tokens."""
        return 1e6 * median(self.cpu) / self.tokens


def main(argv: Sequence[str]) -> None:
    parser = options.parser("scaling", __doc__, rounds=5, warmup=1, has_seed=False)
    parser.add_argument(
        "--ranks", nargs="+", type=int, default=[1, 2, 4], help="numbers of processes, the reference first"
    )
    parser.add_argument("--modes", nargs="+", choices=MODES, default=list(MODES))
    parser.add_argument(
        "--split", choices=SPLITS, default="data", help="how the processes divide the model or the batch"
    )
    parser.add_argument("--recipe", default="quickstart", help="recipe whose model is trained")
    parser.add_argument("--precision", choices=["fp32", "bf16"], default="fp32")
    parser.add_argument("--batch", type=int, default=16, help="sequences of a step; weak: per process")
    parser.add_argument("--visits", type=int, default=2, help="times that each number of processes is started")
    arguments = parser.parse_args(argv)
    options.at_least(arguments, ranks=1, rounds=1, batch=1, visits=1, warmup=0)
    for option in ("ranks", "modes"):
        setattr(arguments, option, list(dict.fromkeys(getattr(arguments, option))))
    for size in arguments.ranks:
        for mode in arguments.modes:
            recipe_of(arguments, size, mode)
    found: dict[tuple[str, int], Row] = {}
    for visit in range(arguments.visits):
        for size in arguments.ranks if visit % 2 == 0 else reversed(arguments.ranks):
            for row in (Row(**values) for values in ranks.run(size, _measure_all, arguments)):
                before = found.get((row.mode, size), replace(row, wall=[], cpu=[]))
                found[row.mode, size] = replace(row, wall=before.wall + row.wall, cpu=before.cpu + row.cpu)
                print(f"{row.mode}, {size} processes: {report.duration(median(row.wall))} per step", flush=True)
    rows = [found[mode, size] for mode in arguments.modes for size in arguments.ranks]
    machine = report.describe_machine() | {"threads": 1}
    text = markdown(rows, arguments, machine)
    arguments.out.mkdir(parents=True, exist_ok=True)
    values = {"title": "scaling", "machine": machine, "rows": [asdict(row) for row in rows]}
    (arguments.out / "scaling.json").write_text(json.dumps(values, indent=1) + "\n")
    (arguments.out / "scaling.md").write_text(text)
    print(text)


def recipe_of(arguments, size: int, mode: str) -> Recipe:
    """Return the recipe of a mode at a number of processes; raise UserError for an invalid one.

    The micro batch is the same at every number of processes, so that all have equal matrix products.
    """
    replicas = max(arguments.ranks) if arguments.split in ("data", "expert") else 1
    if arguments.batch % replicas:
        raise UserError(f"--batch={arguments.batch} must be a multiple of {replicas}, the largest of --ranks")
    recipe = load_recipe(arguments.recipe)
    sizes = {"expert": 1, "data": 1, arguments.split: size}
    recipe = replace(
        recipe,
        parallel=replace(recipe.parallel, **sizes),
        train=replace(
            recipe.train,
            precision=arguments.precision,
            global_batch=arguments.batch * (size if mode == "weak" else 1),
            micro_batch=max(1, arguments.batch // max(arguments.ranks)),
            validation_sequences=arguments.batch * max(arguments.ranks),
        ),
    )
    recipe.check()
    return recipe


def _measure_all(arguments) -> list[dict]:
    """Return, on every rank, the fields of a `Row` for each mode."""
    size = dist.get_world_size()
    recipes = {mode: recipe_of(arguments, size, mode) for mode in arguments.modes}
    processes = ranks.start_parallel(recipes[arguments.modes[0]])
    from pretrain.engine import Engine

    steps = {mode: _step(Engine(recipe, processes), Tokens(recipe)) for mode, recipe in recipes.items()}
    times: dict[str, dict[str, list[float]]] = {mode: {"wall": [], "cpu": []} for mode in steps}
    for turn in range(arguments.warmup + arguments.rounds):
        for mode, step in steps.items():
            dist.barrier()
            begin = time.perf_counter(), time.process_time()
            step(turn)
            end = time.perf_counter(), time.process_time()
            wall = ranks.slowest(end[0] - begin[0])
            cpu_seconds = torch.tensor(end[1] - begin[1], dtype=torch.float64)
            dist.all_reduce(cpu_seconds)
            if turn >= arguments.warmup:
                times[mode]["wall"].append(wall)
                times[mode]["cpu"].append(cpu_seconds.item())
    return [
        {
            "mode": mode,
            "processes": size,
            "tokens": recipe.train.global_batch * recipe.model.sequence_length,
            **times[mode],
        }
        for mode, recipe in recipes.items()
    ]


def _step(engine, samples: Tokens) -> Callable[[int], None]:
    def run(number: int) -> None:
        engine.train_step(number, samples)
        engine.routing()

    return run


def markdown(rows: Sequence[Row], arguments, machine: dict) -> str:
    """Return the report; efficiencies are relative to the first number of processes of each mode."""
    cores = machine["cores"]
    header = "scaling, processes, tokens per step, step, tokens/s, tokens/s per process, efficiency"
    cells = [[*header.split(", "), "CPU s per million tokens", "CPU efficiency"]]
    for row in rows:
        base = next(other for other in rows if other.mode == row.mode)
        efficiency = (row.speed / row.processes) / (base.speed / base.processes)
        shown = [
            row.mode,
            f"{row.processes}{'*' if row.processes > cores else ''}",
            f"{row.tokens:,}",
            report.duration(median(row.wall)),
            f"{row.speed:,.0f}",
            f"{row.speed / row.processes:,.0f}",
            f"{efficiency:.1%}",
            f"{row.cost:,.1f}",
            f"{base.cost / row.cost:.1%}",
        ]
        cells.append(shown)
    lines = [f"# scaling: {arguments.recipe}, {arguments.split}, {arguments.precision}", "", *report.table(cells), ""]
    lines += [
        "Wall time of the slowest process, and processor time of all threads of all processes; medians of "
        f"{len(rows[0].wall)} steps in {arguments.visits} visits. Processes have one thread each. Efficiency: tokens/s "
        "per process, relative to the first row of its mode. CPU efficiency: processor time per token of that row over "
        "this row's; it includes copies of gloo, and excludes waiting.",
    ]
    if any(row.processes > cores for row in rows):
        lines += [
            "",
            f"\\* more processes than this machine's {cores} cores: wall efficiency is at most cores / processes. "
            "Compare processor time.",
        ]
    lines += ["", "Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + "."]
    return "\n".join(lines) + "\n"
