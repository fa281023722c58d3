"""Runs of ``python -m pretrain`` and what they leave. Not a test."""

import hashlib
import os
import signal
from dataclasses import replace
from pathlib import Path

from pretrain.checkpoint import open_checkpoint
from pretrain.tracking import read_metrics

# Metrics of speed, which differ between runs.
MEMORY = {"memory_mb", "memory_mb/largest", "memory_mb/largest_rank"}
TIMED = {"tokens_per_second", "step_seconds", "data_wait_seconds", "mfu"} | MEMORY


def train(forks, *argv, size=1, **options):
    """Run a command that is to succeed; return its output."""
    ends = forks.command("pretrain", *argv, size=size, **options)
    for end in ends:
        assert end.code == 0, end.err
    return ends[0].out


def with_sections(recipe, **sections):
    """A recipe with other values of some sections; those of ``model`` are named as in `ModelConfig.values`."""
    for name, values in sections.items():
        section = getattr(recipe, name)
        changed = section.with_values(values) if name == "model" else replace(section, **values)
        recipe = replace(recipe, **{name: changed})
    return recipe


def steps(folder):
    """Rows of metrics.jsonl by step, without the timings; no step is there twice."""
    rows = read_metrics(folder / "metrics.jsonl")
    assert len({row["step"] for row in rows}) == len(rows)
    return {row.pop("step"): {key: value for key, value in row.items() if key not in TIMED} for row in rows}


def checkpoints(folder):
    """Names of a run's checkpoints."""
    return sorted(path.name for path in (folder / "checkpoints").iterdir())


def tensor_hash(folder, prefix=""):
    """Digest of the newest checkpoint's tensors that does not depend on the split."""
    checkpoint = open_checkpoint(folder)
    digest = hashlib.sha256()
    for name in checkpoint.names():
        if name.startswith(prefix):
            digest.update(name.encode() + checkpoint.read(name).numpy().tobytes())
    return digest.hexdigest()


class BeforeStep:
    """Calls ``act(trainer)`` when a process begins a step."""

    def act(self, trainer):
        raise NotImplementedError

    def __call__(self):
        from pretrain.trainer import Trainer

        make_step = Trainer._step

        def step(trainer, *args):
            self.act(trainer)
            return make_step(trainer, *args)

        Trainer._step = step


class KillAtStep(BeforeStep):
    """Ends the process as `kill -9` does when it begins step ``step`` (counted from 0)."""

    def __init__(self, step, rank=None):
        self.step = step
        self.rank = rank

    def act(self, trainer):
        if trainer.step == self.step and self.rank in (None, trainer.processes.rank):
            os.kill(os.getpid(), signal.SIGKILL)


def descendants(pid):
    """Living processes below a process."""
    children = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
    return [int(child) for child in children] + [below for child in children for below in descendants(child)]
