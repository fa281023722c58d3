"""The training loop."""

import contextlib
import logging
import math
import resource
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from pretrain.callbacks import Callback
from pretrain.callbacks.base import Metrics
from pretrain.checkpoint import Checkpoint, Snapshot, collect, write
from pretrain.checkpoint.host import HostBuffers
from pretrain.checkpoint.ranks import Ranks
from pretrain.config import Recipe
from pretrain.config.imports import digests
from pretrain.data.inputs import Inputs
from pretrain.data.prefetch import Prefetch
from pretrain.engine import Engine, state
from pretrain.engine.flops import peak_flops
from pretrain.interchange.published import PUBLISHED, without_ids
from pretrain.start import resume
from pretrain.start.process import Processes
from pretrain.tracking.metrics import routing_metrics

logger = logging.getLogger(__name__)


class Trainer:
    """The training loop and its callbacks.

    Attributes:
        step: number of completed steps, including skipped ones.
        is_stopping: True once a rank was asked to stop. This process then takes no further step.
        was_skipped: True if the last step was skipped.
        recipe, processes, engine, inputs: for use by callbacks.
    """

    def __init__(self, recipe: Recipe, processes: Processes, inputs: Inputs, callbacks: Sequence[Callback]):
        self.recipe = recipe
        self.processes = processes
        self.inputs = inputs
        self.callbacks = callbacks
        self.engine = Engine(recipe, processes)
        self.engine.on_progress = self._on_progress
        self.step = 0
        self.is_stopping = False
        self.was_skipped = False
        self._flops_per_token = recipe.flops_per_token()
        self._peak = math.inf  # FLOP/s of all devices together
        self._imports = digests(recipe)
        self._published: dict[str, Any] = {}
        self._batches = Prefetch(
            lambda step: self.engine.collate_step(step, inputs.train), recipe.train.steps, recipe.data.prefetch
        )

    @property
    def is_done(self) -> bool:
        """True after the last step."""
        return self.step >= self.recipe.train.steps

    @property
    def is_last(self) -> bool:
        """True if this process takes no further step: training is done, or a rank was asked to stop."""
        return self.is_done or self.is_stopping

    def run(self) -> None:
        """Train until the last step, or until a rank is asked to stop."""
        self._peak = peak_flops(self.processes.device, self.recipe.train.precision)
        error = None
        started = []
        try:
            entropy = self.inputs.unigram_entropy
            metrics: Metrics = {} if self.step or entropy is None else {"corpus/unigram_entropy": entropy}
            for callback in self.callbacks:
                started.append(callback)
                callback.on_start(self, metrics)
            if self.processes.is_main:  # events are written from here on
                for warning in self.inputs.warnings:
                    logger.warning("%s", warning)
            while not self.is_last:
                for callback in self.callbacks:
                    callback.before_step(self)
                metrics = self._step()
                for callback in self.callbacks:
                    callback.on_step(self, metrics)
        except BaseException as caught:
            error = caught
            raise
        finally:
            self._batches.close()
            with contextlib.ExitStack() as stack:  # also calls those after one that raises
                for callback in reversed(started):
                    stack.callback(callback.on_end, self, error)

    def _on_progress(self) -> None:
        for callback in self.callbacks:
            callback.on_progress(self)

    def _step(self) -> Metrics:
        begin = time.perf_counter()
        batches = self._batches.take(self.step)
        data_wait = time.perf_counter() - begin
        result = self.engine.train_step(self.step, batches, self._check_step)
        routing = self.engine.routing()
        seconds = time.perf_counter() - begin
        self.step += 1
        self.is_stopping = result.asks_to_stop
        self.was_skipped = result.skipped is not None
        if result.has_overflowed and self.processes.is_main:
            event = (self.step, "skip")
            logger.warning("step %d is skipped: %s", self.step, result.skipped, extra={"event": event})
        schedule = self.recipe.batches
        length = self.recipe.tokens_per_sequence
        tokens = schedule.sequences(self.step - 1) * length
        flops_per_second = self._flops_per_token * tokens / seconds
        self._peak = max(self._peak, flops_per_second)  # a peak that was measured on a busy machine may be too low
        metrics: Metrics = {
            "loss": result.loss,
            "lr": result.lr,
            "grad_norm": result.grad_norm,
            "tokens": schedule.first(self.step) * length,
            "flops": self._flops_per_token * schedule.first(self.step) * length,
            "epochs": schedule.first(self.step) / self.inputs.train.samples_per_epoch,
            "tokens_per_second": tokens / seconds,
            "step_seconds": seconds,
            "data_wait_seconds": data_wait,
            "mfu": flops_per_second / self._peak,
            "memory_mb": _memory_mb(self.processes.device),
        }
        if self.processes.world_size > 1:
            metrics |= _largest_memory(self.processes)
        if result.mtp_losses:
            metrics["mtp_loss"] = sum(result.mtp_losses) / len(result.mtp_losses)
            metrics |= {f"mtp_loss/depth_{depth}": loss for depth, loss in enumerate(result.mtp_losses, start=1)}
        for number, epochs in enumerate(self.inputs.epochs_per_sample, start=1):
            metrics[f"epochs/source_{number}"] = epochs * schedule.first(self.step)
        scaler = self.engine.grad_scaler
        if result.loss_scale is not None and scaler is not None:
            metrics |= {"loss_scale": result.loss_scale, "skipped_steps": scaler.skipped}
        return metrics | routing_metrics(routing)

    def _check_step(self, loss: float, grad_norm: float) -> str | None:
        for callback in self.callbacks:
            if (reason := callback.check_step(self, loss, grad_norm)) is not None:
                return reason
        return None

    def run_state(self) -> dict[str, Any]:
        """Return the part of a checkpoint that is the same on every rank: all but tensors and random generators."""
        data = resume.data_state(self.recipe, self.inputs, self.step)
        callbacks = {callback.state_key: callback.state_dict() for callback in self.callbacks}
        return {
            "step": self.step,
            "recipe": self.recipe.values(),
            "imports": self._imports,
            "optimizer": state.optimizer_state(self.engine),
            "schedule": state.schedule_state(self.engine),
            "data": {**data, "end_of_document": self.inputs.end_of_document},
            "callbacks": {key: saved for key, saved in callbacks.items() if saved},
            PUBLISHED: self._published,
        }

    def snapshot(self, buffers: HostBuffers | None = None) -> Snapshot:
        """Copy the content of a checkpoint of this step to the host.

        Collective: an error on one rank is raised on all.

        Args:
            buffers: host memory to copy into. Without it, tensors that are on the host already are not copied, so the
                snapshot must be written to disk before the next step.
        """
        with Ranks().together():
            return collect(state.pieces(self.engine), self.run_state(), state.rank_state(self.engine), buffers=buffers)

    def save(self, folder: Path) -> None:
        """Write a checkpoint of this step into ``folder``; return when it is on disk."""
        write(folder, self.step, self.snapshot())

    def resume(self, checkpoint: Checkpoint) -> None:
        """Resume from a checkpoint that `pretrain.start.resume.choose_start` chose.

        Raises:
            UserError: its tensors do not fit the model.
        """
        state.load(self.engine, checkpoint)
        self.step = checkpoint.step
        self._published = checkpoint.state.get(PUBLISHED, {})
        for callback in self.callbacks:
            saved = checkpoint.state.get("callbacks", {}).get(callback.state_key)
            if saved:
                callback.load_state_dict(saved)

    def warm_start(self, checkpoint: Checkpoint) -> None:
        """Load the model's weights and buffers from a checkpoint, and the settings of an imported model.

        Token ids among the settings are kept only with the checkpoint's tokenizer.

        Training then starts at step 0, with a new optimizer and the first sample.

        Raises:
            UserError: a tensor is missing, unexpected, or differs in shape.
        """
        state.load_weights(self.engine, checkpoint)
        tokenizer = checkpoint.state.get("data", {}).get("tokenizer")
        self._published = checkpoint.state.get(PUBLISHED, {})
        if self._published and tokenizer != self.inputs.tokenizer_fingerprint:
            self._published = without_ids(self._published)


def _largest_memory(processes: Processes) -> Metrics:
    """Return the largest peak memory of all ranks, and the first rank with it. Collective."""
    # One number, whose maximum is that of the memory in KiB and, for equal memory, of the lowest rank.
    number = int(_memory_mb(processes.device) * 1024) * processes.world_size + processes.world_size - 1 - processes.rank
    largest = torch.tensor(number, dtype=torch.int64, device=processes.device)
    dist.all_reduce(largest, dist.ReduceOp.MAX)
    memory, rest = divmod(int(largest), processes.world_size)
    return {"memory_mb/largest": memory / 1024, "memory_mb/largest_rank": processes.world_size - 1 - rest}


def _memory_mb(device: torch.device) -> float:
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device) / 2**20
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**10
