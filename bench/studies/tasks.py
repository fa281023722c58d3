"""``python -m bench tasks``: the tasks of examples/tasks, each with its dense twin, over several seeds.

Every run is a ``fmoe train`` of a recipe, and its figures are those of ``fmoe evaluate`` on all held-out samples. Runs
that a folder has already are not trained again. The data must be there: docs/tasks.md has the commands.
"""

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from statistics import mean, stdev

from bench import options, report
from fmoe.errors import UserError
from pretrain.checkpoint import latest
from pretrain.tracking.folder import CHECKPOINTS

TASKS = Path(__file__).parents[2] / "examples" / "tasks"
DENSE = ("--moe.num-experts", "0", "--parallel.expert", "1", "--parallel.data", "2")
FIGURES = {
    "translation": ("bleu", "chrf", "loss"),
    "vit": ("accuracy", "loss"),
    "swin": ("accuracy", "loss"),
    "sentences": ("accuracy", "f1", "loss"),
}


def main(argv: Sequence[str]) -> int:
    parser = options.bare_parser("tasks", __doc__)
    parser.add_argument("--tasks", nargs="+", choices=FIGURES, default=list(FIGURES))
    parser.add_argument("--seeds", type=int, nargs="+", default=[1, 2, 3])
    parser.add_argument("--runs", type=Path, default=Path("runs/tasks"), help="folder of the runs")
    parser.add_argument("--steps", type=int, help="steps of each run; the recipe's by default")
    parser.add_argument(
        "--start", type=Path, nargs=2, metavar=("MOE", "DENSE"), help="BERTs from which the sentences start"
    )
    arguments = parser.parse_args(argv)
    rows = []
    for task in arguments.tasks:
        for name, twin in (("experts", ()), ("dense", DENSE)):
            start: tuple[str, ...] = ()
            if task == "sentences" and arguments.start:
                start = ("--train.init-from", str(arguments.start[name == "dense"]))
            runs = []
            for seed in arguments.seeds:
                folder = arguments.runs / f"{task}-{name}-{seed}"
                steps = () if arguments.steps is None else ("--train.steps", str(arguments.steps))
                if latest(folder / CHECKPOINTS) is None:
                    recipe = str(TASKS / f"{task}.toml")
                    _run("train", recipe, *twin, *start, *steps, f"--train.seed={seed}", f"--run.folder={folder}")
                runs.append(figures(json.loads(_run("evaluate", str(folder), "--max-sequences", "100000", "--json"))))
            rows.append({"task": task, "model": name, "seeds": arguments.seeds, "runs": runs})
    report.write_rows(rows, table(rows), arguments.out, "tasks")
    return 0


def _run(*command: str) -> str:
    ended = subprocess.run([sys.executable, "-m", "fmoe", *command], stdout=subprocess.PIPE, text=True)
    if ended.returncode:
        raise UserError(f"fmoe {' '.join(command)} ended with code {ended.returncode}")
    return ended.stdout


def figures(evaluated: dict) -> dict[str, float]:
    """Return the figures of the only run of ``fmoe evaluate --json`` by name."""
    (run,) = evaluated["runs"]
    return {"accuracy": run["accuracy"], "loss": run["loss"]} | run["scores"]


def table(rows: Sequence[dict]) -> str:
    """Format mean and standard deviation over the seeds as Markdown."""
    lines = ["| task | model | figure | mean | standard deviation | seeds |", "|---|---|---|---|---|---|"]
    for row in rows:
        for figure in FIGURES[row["task"]]:
            values = [run[figure] for run in row["runs"]]
            spread = f"{stdev(values):.4g}" if len(values) > 1 else "-"
            seeds = ", ".join(map(str, row["seeds"]))
            lines.append(f"| {row['task']} | {row['model']} | {figure} | {mean(values):.4g} | {spread} | {seeds} |")
    return "\n".join(lines)
