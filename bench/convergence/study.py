"""Train every recipe with every seed, several runs at once; a second call continues where the first ended."""

import argparse
import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from fmoe.errors import UserError
from pretrain.config import Recipe, load_recipe
from pretrain.start.codes import EXIT_REQUEUE
from pretrain.start.ranks import die_with_parent
from pretrain.tracking import read_metrics

LOG = "log.txt"


@dataclass
class Job:
    """A run: its recipe, its folder, and the process that trains it, if any."""

    name: str
    recipe_name: str
    options: list[str]
    recipe: Recipe
    process: subprocess.Popen | None = None
    rows: list[dict] = field(default_factory=list)

    @property
    def folder(self) -> Path:
        """Folder of the run."""
        return Path(self.recipe.run.folder)

    @property
    def step(self) -> int:
        """Last step in the log at the last `look`; 0 for none."""
        return self.rows[-1]["step"] if self.rows else 0

    @property
    def is_done(self) -> bool:
        """True if all steps are completed and no process writes to the folder any more."""
        return self.process is None and self.step >= self.recipe.train.steps

    @property
    def loss(self) -> float | None:
        """Loss of the last validation."""
        return next((row["val/loss"] for row in reversed(self.rows) if "val/loss" in row), None)

    def look(self) -> None:
        """Read the progress of the run."""
        path = self.folder / "metrics.jsonl"
        self.rows = read_metrics(path) if path.exists() else []


def add_options(parser: argparse.ArgumentParser, folder: str, seeds: Sequence[int]) -> None:
    """Add the options of a study, with these defaults of ``--folder`` and ``--seeds``; see `check_options`."""
    parser.add_argument("--folder", type=Path, default=Path(folder), help="parent of the run folders")
    parser.add_argument(
        "--seeds", type=int, nargs="+", default=list(seeds), help="seeds; each model gets a run per seed"
    )
    parser.add_argument("--at-once", type=int, default=2, help="number of runs that train at the same time")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    parser.add_argument(
        "--set",
        action="append",
        default=[],
        metavar="KEY=VALUE",
        help="key of the recipes to set in every run, e.g. parallel.expert=1",
    )


def check_options(arguments: argparse.Namespace) -> list[str]:
    """Check the options of `add_options`, and return those of ``--set`` as the trainer takes them.

    Raises:
        UserError: a number is not positive, a seed is given twice, or a ``--set`` has no ``=``.
    """
    for name in ("at_once", "threads"):
        if getattr(arguments, name) < 1:
            raise UserError(f"--{name.replace('_', '-')}={getattr(arguments, name)} must be at least 1")
    for setting in arguments.set:
        if "=" not in setting:
            raise UserError(f"--set={setting} must have the form KEY=VALUE")
    if len(set(arguments.seeds)) < len(arguments.seeds):
        raise UserError(f"--seeds={' '.join(map(str, arguments.seeds))} must differ from each other")
    return [f"--{setting}" for setting in arguments.set]


def plan(recipes: Sequence[str], seeds: Sequence[int], folder: Path, more: Sequence[str] = ()) -> list[Job]:
    """Return the runs, grouped by recipe, so that runs that train at the same time take about equally long.

    Args:
        more: options of every run, as on the trainer's command line.

    Raises:
        UserError: a recipe is invalid, or differs from the recipe of the existing run.
    """
    return [
        make_job(recipe_name, f"{Path(recipe_name).stem}-seed{seed}", seed, folder, more)
        for recipe_name in recipes
        for seed in seeds
    ]


def make_job(recipe_name: str, name: str, seed: int, folder: Path, more: Sequence[str] = ()) -> Job:
    """Return the run ``folder / name`` of a recipe; see `plan`."""
    options = [*more, "--run.folder", str(folder / name), "--train.seed", str(seed)]
    recipe = load_recipe(recipe_name, options)
    if recipe.parallel.world_size != 1:
        raise UserError(
            f"{recipe_name} needs {recipe.parallel.world_size} processes, but each run here is a single process: pass "
            "--set parallel.expert=1, or set the sizes of [parallel] to 1"
        )
    job = Job(name, recipe_name, options, recipe)
    _check_same(job)
    return job


def train(jobs: Sequence[Job], *, at_once: int, threads: int, every: float = 30.0) -> int:
    """Train the unfinished runs in order, and report the progress of all at intervals. After a run that fails, the
    others go on.

    Returns:
        0, or the exit code of the first run that failed (its last lines are printed), or `EXIT_REQUEUE` after SIGTERM
        or SIGINT, when all have saved a checkpoint.
    """
    failed = 0
    for job in jobs:
        job.look()
    waiting = [job for job in jobs if not job.is_done]
    told = time.monotonic()
    first = None
    with _stopping() as received:
        try:
            while waiting or _running(jobs):
                while waiting and not received and len(_running(jobs)) < at_once:
                    _start(waiting.pop(0), threads)
                time.sleep(0.2)
                for job in _running(jobs):
                    if (code := job.process.poll()) is None:
                        continue
                    job.process = None
                    job.look()
                    if code and not received:
                        last = _failed(job, code)
                        failed = failed or last
                    else:
                        _say(f"{job.name}: {_describe(job)}")
                if received:
                    break
                if time.monotonic() - told >= every:
                    told = time.monotonic()
                    for job in _running(jobs):
                        job.look()
                    first = first or (told, sum(job.step for job in jobs))  # before it, processes started
                    _say(_progress(jobs, told - first[0], first[1]))
        finally:
            _stop(jobs)
    if received:
        _say("stopped; the same command resumes")
        return EXIT_REQUEUE
    return failed


def _check_same(job: Job) -> None:
    path = job.folder / "config.toml"
    if path.exists() and load_recipe(str(path)) != job.recipe:
        raise UserError(
            f"{job.folder} holds a run of a recipe other than {job.recipe_name}: remove it, or choose another --folder"
        )


def command(job: Job) -> list[str]:
    """Return the command that trains a run, from its beginning or its newest checkpoint."""
    return [sys.executable, "-m", "pretrain", job.recipe_name, *job.options, "--resume", "auto"]


def _start(job: Job, threads: int) -> None:
    job.folder.mkdir(parents=True, exist_ok=True)
    environment = {**os.environ, "OMP_NUM_THREADS": str(threads)}
    with (job.folder / LOG).open("ab") as log:
        # Its own session, so that Ctrl-C reaches only this process, which asks each run once to stop.
        job.process = subprocess.Popen(
            command(job),
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            preexec_fn=die_with_parent,
        )
    _say(f"{job.name}: {'resumes from the newest checkpoint' if job.step else 'begins'}, {job.folder / LOG}")


def _running(jobs: Sequence[Job]) -> list[Job]:
    return [job for job in jobs if job.process is not None]


def _stop(jobs: Sequence[Job]) -> None:
    for job in _running(jobs):
        job.process.terminate()
    for job in _running(jobs):
        job.process.wait()
        job.process = None


@contextlib.contextmanager
def _stopping() -> Iterator[list[int]]:
    received: list[int] = []
    before = {
        number: signal.signal(number, lambda number, _: received.append(number))
        for number in (signal.SIGTERM, signal.SIGINT)
    }
    try:
        yield received
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _failed(job: Job, code: int) -> int:
    lines = (job.folder / LOG).read_text(errors="replace").splitlines()[-20:]
    _say("\n".join(lines))
    _say(f"{job.name} ended with code {code}: {job.folder / LOG}")
    return code if code > 0 else 128 - code


def _describe(job: Job) -> str:
    loss = "" if job.loss is None else f", validation loss {job.loss:.4f}"
    return f"step {job.step} of {job.recipe.train.steps}{loss}"


def _progress(jobs: Sequence[Job], seconds: float, done_before: int) -> str:
    steps = sum(job.recipe.train.steps for job in jobs)
    done = sum(job.step for job in jobs)
    left = ""
    if done > done_before:
        left = f", about {seconds * (steps - done) / (done - done_before) / 60:.0f} min left"
    running = "; ".join(f"{job.name} {_describe(job)}" for job in _running(jobs))
    return f"{done * 100 // steps}%{left}: {running}"


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()
