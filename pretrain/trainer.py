"""The training loop."""

import resource
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import torch

from fmoe.errors import UserError
from pretrain import state
from pretrain.callbacks import Callback
from pretrain.callbacks.base import Metrics
from pretrain.checkpoint import Checkpoint, save
from pretrain.config import Recipe
from pretrain.engine import Engine
from pretrain.inputs import Inputs
from pretrain.peak import peak_flops
from pretrain.process import Processes

# What may not change between a checkpoint and the run that goes on from it: another model, other data, another order.
_FIXED = (
    ("model", None),
    ("data", ("tokenizer", "train")),
    ("train", ("seed", "global_batch", "precision")),
)
_MAY_CHANGE = {"model": ("eval_capacity_factor",)}


class Trainer:
    """Steps, and the callbacks around them.

    Attributes:
        step: optimizer steps done.
        recipe, processes, engine, inputs: what callbacks need.
    """

    def __init__(self, recipe: Recipe, processes: Processes, inputs: Inputs, callbacks: Sequence[Callback]):
        self.recipe, self.processes, self.inputs, self.callbacks = recipe, processes, inputs, callbacks
        self.engine = Engine(recipe, processes)
        self.step = 0

    @property
    def is_done(self) -> bool:
        """Whether the last step was made."""
        return self.step >= self.recipe.train.steps

    def run(self) -> None:
        """Trains to the last step."""
        peak = peak_flops(self.processes.device, self.recipe.train.precision)
        error = None
        started = []
        try:
            metrics: Metrics = {"corpus/unigram_entropy": self.inputs.unigram_entropy} if self.step == 0 else {}
            for callback in self.callbacks:
                started.append(callback)
                callback.on_start(self, metrics)
            while not self.is_done:
                metrics = self._step(peak)
                for callback in self.callbacks:
                    callback.on_step(self, metrics)
        except BaseException as caught:
            error = caught
            raise
        finally:
            for callback in started:
                callback.on_end(self, error)

    def _step(self, peak: float) -> Metrics:
        begin = time.perf_counter()
        result = self.engine.train_step(self.step, self.inputs.train)
        routing = self.engine.routing()
        seconds = time.perf_counter() - begin
        self.step += 1
        tokens = self.recipe.train.global_batch * self.recipe.model.sequence_length
        metrics: Metrics = {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens": self.step * tokens,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds,
            "mfu": self.recipe.model.flops_per_token() * tokens / seconds / peak,
            "memory_mb": _memory_mb(self.processes.device),
        }
        means = {name: 0.0 for name in ("drop_rate", "entropy", "balance_loss", "z_loss", "load_cv", "dead_experts")}
        for number, report in routing.items():
            layer = {
                "drop_rate": report.drop_rate,
                "entropy": report.entropy,
                "balance_loss": report.losses.get("balance", 0.0),
                "z_loss": report.losses.get("z", 0.0),
                "load_cv": report.load_cv,
                "dead_experts": report.dead_experts,
            }
            metrics[f"moe/layer_{number}/load"] = report.load
            for name, value in layer.items():
                metrics[f"moe/layer_{number}/{name}"] = value
                means[name] += value / len(routing)
        if routing:
            metrics.update({f"moe/{name}": value for name, value in means.items()})
        return metrics

    def save(self, folder: Path) -> None:
        """Writes a checkpoint of this step."""
        save(
            folder,
            self.step,
            state.pieces(self.engine),
            {"step": self.step, "recipe": asdict(self.recipe), "optimizer": state.optimizer_state(self.engine)},
            state.rank_state(),
        )

    def resume(self, checkpoint: Checkpoint) -> None:
        """Goes on from a checkpoint, of this split or another.

        Raises:
            UserError: the recipe differs in what may not change, or is over already.
        """
        check_resumable(self.recipe, checkpoint)
        state.load(self.engine, checkpoint)
        self.step = checkpoint.step


def check_resumable(recipe: Recipe, checkpoint: Checkpoint) -> None:
    """Raises UserError for the first key that may not differ from the checkpoint's recipe and does."""
    now, then = asdict(recipe), checkpoint.state["recipe"]
    for section, names in _FIXED:
        for name in names or now[section]:
            if name in _MAY_CHANGE.get(section, ()):
                continue
            was, is_ = then.get(section, {}).get(name), now[section][name]
            if was != is_:
                raise UserError(f"{section}.{name}={is_} differs from {was}, with which {checkpoint.path} was made")
    if checkpoint.step > recipe.train.steps:
        raise UserError(
            f"train.steps={recipe.train.steps} is less than the {checkpoint.step} steps of {checkpoint.path}"
        )


def _memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
