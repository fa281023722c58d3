"""The optimizer step and the validation, on Megatron-core's schedule, DDP and optimizer."""

import contextlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import finalize_model_grads
from torch import Tensor, nn
from torch.profiler import record_function

from fmoe import MoE, end_step, random
from fmoe.activations import SavedActivations
from fmoe.gates import skip_step
from fmoe.runtime.phases import phase
from megatron_patch import bf16_linear, mtp
from megatron_patch.loss_scale import grad_scaler
from megatron_patch.optimizer import clip_gradients
from pretrain.config import Recipe
from pretrain.data.samples import Samples
from pretrain.engine import compression
from pretrain.engine.model import build_model, wrap
from pretrain.engine.optimizer import optimizer_of, scheduler_of
from pretrain.engine.pipeline import get_schedule, stages
from pretrain.engine.routing import RoutingReports, StepReport
from pretrain.engine.sync import RareSync
from pretrain.models import kind_of
from pretrain.models.batch import Batch, collate, context_slice, loss_function, to_device, weigh
from pretrain.models.memory import Memory
from pretrain.start.process import Processes


def _reduce_gradients(chunks: list[Any], *arguments: Any, **options: Any) -> None:
    with phase("reduction"), record_function("fmoe: reduce gradients"):
        finalize_model_grads(chunks, *arguments, **options)
        for chunk in chunks:
            for parameter in chunk.parameters():
                if getattr(parameter, "is_shared_by_stages", False):
                    dist.all_reduce(parameter.main_grad, group=parallel_state.get_pipeline_model_parallel_group())


CheckStep = Callable[[float, float], str | None]


@dataclass(frozen=True)
class StepResult:
    """Result of one optimizer step, the same on every rank.

    Attributes:
        loss: mean loss of the global batch, in nats per token.
        grad_norm: norm of the gradient before clipping.
        lr: learning rate of the step.
        skipped: reason for which the step was skipped; None if it was applied.
        asks_to_stop: True if any rank asks to stop.
        loss_scale: factor of the loss; None unless the precision is fp16.
        has_overflowed: True if the step was skipped for an fp16 overflow that a lower loss scale may cure.
        mtp_losses: mean loss of the global batch for each of the ``model.mtp_layers`` multi-token prediction layers, in
            nats per token.
    """

    loss: float
    grad_norm: float
    lr: float
    skipped: str | None = None
    asks_to_stop: bool = False
    loss_scale: float | None = None
    has_overflowed: bool = False
    mtp_losses: tuple[float, ...] = ()


class Engine:
    """The model, its optimizer and its learning rate schedule, split over ranks as in the recipe.

    Args:
        recipe: a recipe that passed `Recipe.check`.
        processes: rank and device of this process, for which `init_parallel` has been called.
        build: replacement for `build_model`, with the same arguments.

    Attributes:
        chunks: this rank's parts of the model, unwrapped; several with ``parallel.virtual_pipeline``.
        gpt: the only one of ``chunks``, or a ModuleList of all.
        model: the chunks as the pipeline schedule runs them: wrapped for precision and data parallelism.
        asks_to_stop: set on any rank, e.g. by a signal; the next `StepResult` of all ranks reports it.
        on_progress: called at the beginning of each micro batch, in training and validation.
        last_loss: this rank's loss in the last training step, zero on all pipeline stages but the last. Summed over
            context parallel ranks and averaged over data parallel ranks, it is the loss of the global batch.
        mtp_losses: this rank's losses of the multi-token prediction layers in the last training step [layers], zero on
            all pipeline stages but the last; empty without such layers.
        activations: encoding of the activations that autograd keeps; None without ``train.activations``.
        compressors: what reduces gradients with ``parallel.grad_compress``: one for dense layers, one for experts.
        sync: averages of the parameters, with ``parallel.sync_every`` above 1; else None.
        grad_scaler: loss scaler for fp16; None in other precisions.
        memories: what the model carries between micro batches of the training streams, one object per chunk; empty if
            it carries nothing (`pretrain.models.Kind`).
    """

    def __init__(self, recipe: Recipe, processes: Processes, build: Callable[..., nn.Module] = build_model):
        self.recipe = recipe
        self.processes = processes
        self.kind = kind_of(recipe)

        random.set_position(recipe.train.seed, step=0)
        self.chunks: list[Any] = [build(recipe, **stage) for stage in stages(recipe.parallel)]
        if bf16_linear.is_needed():
            for chunk in self.chunks:
                bf16_linear.mark_weights(chunk)
        self.gpt = self.chunks[0] if len(self.chunks) == 1 else nn.ModuleList(self.chunks)
        self.config = self.chunks[0].config
        self.moe_layers: list[Any] = [module for module in self.gpt.modules() if isinstance(module, MoE)]
        self.model: list[Any] = [wrap(recipe, chunk, index) for index, chunk in enumerate(self.chunks)]
        self.memories: list[Memory] = self.kind.memories(recipe, self.chunks)
        encoding = recipe.train.activations
        self.activations = None if encoding == "full" else SavedActivations(encoding, self.gpt.parameters())

        self.compressors = compression.install(recipe, self.model)

        self.optimizer = optimizer_of(recipe, self.model)
        self.sync = RareSync(recipe, self.optimizer) if recipe.parallel.sync_every > 1 else None
        self.grad_scaler = grad_scaler(self.optimizer)
        self.scheduler = scheduler_of(recipe, self.optimizer)

        for chunk in self.chunks:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
            chunk.config.finalize_model_grads_func = _reduce_gradients
            if recipe.model.moe.num_experts:
                # The schedule reads it from one of the chunks.
                chunk.config.num_moe_experts = recipe.model.moe.num_experts
        if recipe.parallel.overlap_gradients:
            no_sync = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self._run_schedule = get_schedule(recipe.parallel)
        self.data_group = parallel_state.get_data_parallel_group()
        self.context_group = parallel_state.get_context_parallel_group()
        # Only ranks of the last pipeline stage have a loss, and context parallel ranks share one.
        stage_size = processes.world_size // parallel_state.get_pipeline_model_parallel_world_size()
        self._num_losses = stage_size // self.context_group.size()
        self._reports = RoutingReports.of(self.moe_layers, recipe.model, processes.device)

        self.asks_to_stop = False
        self.on_progress: Callable[[], None] = lambda: None
        self.last_loss: Tensor | None = None
        self.mtp_losses = torch.zeros(recipe.model.mtp_layers, dtype=torch.float32, device=processes.device)

    def train_step(self, step: int, samples: Samples | list[Batch], check: CheckStep | None = None) -> StepResult:
        """Make one optimizer step on the step's global batch (``recipe.batches``).

        A skipped step changes no weight, optimizer state or gate buffer, but advances the learning rate.

        Args:
            step: number of the step, from 0.
            samples: the endless sequence of samples, or the step's batches from `collate_step`.
            check: function of mean loss and gradient norm, called before the update. Each of the two values is
                non-finite if it is non-finite on any rank. The function returns the reason to skip the step, or None.
                If it raises, the model is unchanged. It is not called for an fp16 overflow that a lower loss scale may
                cure.
        """
        self._reports.begin()
        scaler = self.grad_scaler
        loss_scale = None if scaler is None else float(scaler.scale)
        can_fall = scaler is not None and scaler.can_fall

        # 1. Compute the gradients, averaged over ranks.
        loss = self.backward(step, samples)

        # 2. Set the learning rate. It belongs to the step, so a skipped step advances it too.
        self.scheduler.step(increment=step + 1 - self.scheduler.num_steps)
        lr = self.scheduler.get_lr(self.optimizer.param_groups[0])

        # 3. Pass the gradients to the optimizer without the loss scale. All ranks find the same overflow.
        with phase("optimizer"):
            has_inf = self.optimizer.prepare_grads()
            rank_norm = math.inf if has_inf else self.optimizer.get_grad_norm()

        # 4. Agree on all figures in one reduction. Sums keep non-finite values of any rank: so the norm, which is equal
        # on all ranks, is summed and divided again.
        sums = torch.cat([loss.view(1), loss.new_tensor([rank_norm, self.asks_to_stop]), self.mtp_losses])
        dist.all_reduce(sums)
        loss_sum, norm_sum, asks_to_stop, *mtp_sums = sums.tolist()
        mean_loss = loss_sum / self._num_losses
        grad_norm = norm_sum / self.processes.world_size
        if not math.isfinite(mean_loss):
            self.memories = self.kind.memories(self.recipe, self.chunks)  # its hidden states may not be finite either

        # 5. Decide whether to skip the step.
        has_overflowed = has_inf and can_fall
        reason: str | None = None
        if has_overflowed and scaler is not None:
            what = "an overflow" if math.isfinite(mean_loss) else "the loss is not finite"
            reason = f"{what} at loss scale {loss_scale:g}, now {float(scaler.scale):g}"
        elif check is not None:
            reason = check(mean_loss, grad_norm)
        if reason is None and has_inf:
            reason = f"the gradient is not finite{self.scale_limit}"

        # 6. Update weights and gates. As in Megatron's ChainedOptimizer.step, whose first half is step 3.
        if reason is None:
            with torch.no_grad(), phase("optimizer"):
                for part in self.optimizer.chained_optimizers:
                    parameters = part.get_parameters()
                    if part.config.clip_grad > 0 and parameters:
                        clip_gradients(parameters, part.config.clip_grad, grad_norm)
                with record_function("fmoe: optimizer"):
                    self.optimizer.step_with_ready_grads()
            end_step(self.gpt, self.data_group)
        else:
            skip_step(self.gpt)
            for compressor in self.compressors:
                compressor.undo()
        if self.sync is not None:
            with phase("reduction"):
                self.sync.step(step, mean_loss, lr)
        return StepResult(
            loss=mean_loss,
            grad_norm=grad_norm,
            lr=lr,
            skipped=reason,
            asks_to_stop=asks_to_stop > 0,
            loss_scale=loss_scale,
            has_overflowed=has_overflowed,
            mtp_losses=tuple(total / self._num_losses for total in mtp_sums),
        )

    @property
    def scale_limit(self) -> str:
        """Reason why the fp16 loss scale cannot be lowered, for a message. Empty if it can be, or without fp16."""
        if self.grad_scaler is None or self.grad_scaler.can_fall:
            return ""
        options = self.recipe.optimizer
        if options.loss_scale is not None:
            return f" at optimizer.loss_scale={options.loss_scale:g}, which is fixed"
        lowest = options.dynamic_scale["min_loss_scale"]
        return f" at loss scale {float(self.grad_scaler.scale):g}, the lowest (optimizer.min_loss_scale={lowest:g})"

    def backward(self, step: int, samples: Samples | list[Batch]) -> Tensor:
        """Compute the gradients of a training step, which replace earlier ones; return this rank's loss."""
        batches = self.recipe.batches
        count = batches.sequences(step)
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        for compressor in self.compressors:
            compressor.begin()
        mtp.take_losses()  # of a step that was interrupted
        self.last_loss = self.accumulate(samples, batches.first(step), count, step)
        mtp_losses = mtp.take_losses()
        if mtp_losses is None:
            self.mtp_losses.zero_()
        else:
            self.mtp_losses = mtp_losses / self._num_micro_batches(count)
        return self.last_loss

    def evaluate(self, samples: Samples, count: int) -> float:
        """Return the mean loss of the first ``count`` samples, in nats per token. Collective."""
        for chunk in self.model:
            chunk.eval()
        loss = self.accumulate(samples, 0, count)
        if self.recipe.parallel.is_fully_sharded:
            for chunk in self.model:
                chunk.reshard()
        dist.all_reduce(loss)
        return float(loss) / self._num_losses

    def accumulate(self, samples: Samples | list[Batch], first: int, count: int, step: int | None = None) -> Tensor:
        """Run the pipeline schedule over samples ``first ... first + count - 1``.

        With a ``step``, also run backward passes, which add their gradients to the present ones, and reduce the
        gradients over ranks.

        Returns:
            This rank's loss; see `last_loss`.
        """
        batches = samples if isinstance(samples, list) else self._collate(samples, first, count)
        weigh(batches, self.data_group, self.processes.device)
        memories = self.memories
        if step is None:
            memories = self.kind.memories(self.recipe, self.chunks)
        results = self._run_schedule(
            forward_step_func=self._forward_step,
            data_iterator=[
                self._micro_batches(batches, count, step, chunk, memories[chunk] if memories else None)
                for chunk in range(len(self.chunks))
            ],
            model=self.model,
            num_microbatches=self._num_micro_batches(count),
            seq_length=self.recipe.tokens_per_sequence,
            micro_batch_size=self.recipe.train.micro_batch,
            forward_only=step is None,
        )
        for memory in memories:
            memory.leave()
        if not results:
            return torch.zeros((), device=self.processes.device, dtype=torch.float32)
        return torch.stack([result["loss"] for result in results]).mean()

    def _micro_batches(
        self, batches: list[Batch], count: int, step: int | None, chunk: int, memory: Memory | None
    ) -> Iterator[Batch]:
        """Yield this rank's micro batches of ``count`` samples, each when the schedule runs chunk ``chunk`` on it."""
        # Stages hold different layers of the same tokens: their dropout must differ.
        stream = chunk * self.recipe.parallel.pipeline + parallel_state.get_pipeline_model_parallel_rank()
        for begin, batch in zip(self.begins(count), batches, strict=True):
            self.on_progress()
            if step is not None:
                first_token = begin * self.recipe.model.sequence_length
                random.set_position(self.recipe.train.seed, step, first_token, stream=stream)
            if memory is not None:
                memory.enter_batch(begin, batch)
            yield to_device(context_slice(batch, self.context_group), self.processes.device)

    def _forward_step(self, batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Callable]:
        batch = next(batches)
        with self.activations or contextlib.nullcontext(), phase("forward"), record_function("fmoe: forward"):
            output = self.kind.forward(model, batch)
        return output, loss_function(batch, self.context_group.size())

    def collate_step(self, step: int, samples: Samples) -> list[Batch]:
        """Return this rank's micro batches of a training step. Any thread may call it, also during a step.

        Raises:
            UserError: a sample has a token id outside the vocabulary.
        """
        batches = self.recipe.batches
        return self._collate(samples, batches.first(step), batches.sequences(step))

    def _collate(self, samples: Samples, first: int, count: int) -> list[Batch]:
        size = self.recipe.train.micro_batch
        starts = [first + begin for begin in self.begins(count)]
        return [
            collate([samples[n] for n in range(start, start + size)], self.recipe.model.vocab_size) for start in starts
        ]

    def begins(self, count: int) -> range:
        """Return the index of the first sample of each micro batch that this rank has among ``count`` samples."""
        size = self.recipe.train.micro_batch
        return range(self.data_group.rank() * size, count, self.data_group.size() * size)

    def _num_micro_batches(self, count: int) -> int:
        return count // (self.recipe.train.micro_batch * self.data_group.size())

    def sync_parameters(self) -> None:
        """Wait for the all-gather of updated parameters. Call it before reading parameters outside a forward pass."""
        if self.recipe.parallel.overlap_parameters:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)

    def routing(self) -> dict[int, StepReport]:
        """Return the routing statistics since the last call, over all ranks, by layer number (from 1). Collective."""
        return self._reports.collect()
