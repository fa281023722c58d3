"""The optimizer step and the validation, on Megatron-core's schedule, DDP and optimizer."""

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig, finalize_model_grads
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer_param_scheduler import OptimizerParamScheduler
from megatron.core.transformer.module import Float16Module
from torch import Tensor, nn

from fmoe import end_step, random
from fmoe.experts import FFNExperts
from fmoe.gates import skip_step
from megatron_patch import MegatronMoE, bf16_linear, mtp
from megatron_patch.layer import drop_tracked_losses
from megatron_patch.loss_scale import grad_scaler
from megatron_patch.optimizer import build_optimizer, clip_gradients
from megatron_patch.transformer_xl import StreamMemory
from pretrain.config import Recipe
from pretrain.data.samples import Samples
from pretrain.engine import rng
from pretrain.engine.model import build_model
from pretrain.engine.optimizer import make_optimizer
from pretrain.engine.pipeline import get_schedule, stages
from pretrain.engine.routing import RoutingReports, StepReport
from pretrain.models import kind_of
from pretrain.models.batch import Batch, collate, context_slice, loss_function, to_device, weigh
from pretrain.start.process import Processes, timeout

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


def init_parallel(recipe: Recipe, processes: Processes) -> None:
    """Create Megatron's process groups and seed all random number generators.

    May be called again only after `stop_parallel`.
    """
    parallel = recipe.parallel
    parallel_state.initialize_model_parallel(
        tensor_model_parallel_size=parallel.tensor,
        pipeline_model_parallel_size=parallel.pipeline,
        virtual_pipeline_model_parallel_size=parallel.virtual_pipeline if parallel.model_chunks > 1 else None,
        context_parallel_size=parallel.context,
        expert_model_parallel_size=parallel.expert,
        expert_tensor_parallel_size=parallel.expert_tensor,
        distributed_timeout_minutes=int(timeout(recipe.guard.hang_minutes).total_seconds() // 60),
        create_gloo_process_groups=dist.get_backend() == "gloo",
    )
    rng.seed(recipe.train.seed)


def stop_parallel() -> None:
    """Destroy the groups that `init_parallel` created, and empty Megatron's tracker of auxiliary losses."""
    parallel_state.destroy_model_parallel()
    drop_tracked_losses()


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
        grad_scaler: loss scaler for fp16; None in other precisions.
        memories: Transformer-XL's memory of the training streams, one object per chunk; empty without
            ``model.memory_length``.
    """

    def __init__(self, recipe: Recipe, processes: Processes, build: Callable[..., nn.Module] = build_model):
        self.recipe, self.processes = recipe, processes
        self.kind = kind_of(recipe)
        random.set_position(recipe.train.seed, step=0)
        self.chunks: list[Any] = [build(recipe, **stage) for stage in stages(recipe.parallel)]
        if bf16_linear.is_needed():
            for chunk in self.chunks:
                bf16_linear.mark_weights(chunk)
        self.gpt = self.chunks[0] if len(self.chunks) == 1 else nn.ModuleList(self.chunks)
        self.config = self.chunks[0].config
        self.moe_layers = [module for module in self.gpt.modules() if isinstance(module, MegatronMoE)]
        self.model = [self._wrap(index, chunk) for index, chunk in enumerate(self.chunks)]
        self.optimizer = build_optimizer(
            self._optimizer_config(),
            self.model,
            make_optimizer(recipe),
            use_gloo_process_groups=dist.get_backend() == "gloo",
        )
        self.memories = self._new_memories()
        self.grad_scaler = grad_scaler(self.optimizer)
        for chunk in self.chunks:
            chunk.config.grad_scale_func = self.optimizer.scale_loss
            chunk.config.finalize_model_grads_func = finalize_model_grads
            if recipe.model.num_experts:
                chunk.config.num_moe_experts = recipe.model.num_experts  # the schedule reads it from one of the chunks
        if recipe.parallel.overlap_gradients:
            no_sync = [chunk.no_sync for chunk in self.model]
            self.config.no_sync_func = no_sync if len(no_sync) > 1 else no_sync[0]
        self.scheduler = OptimizerParamScheduler(
            self.optimizer,
            init_lr=0.0,
            max_lr=recipe.max_lr,
            min_lr=recipe.min_lr,
            lr_warmup_steps=recipe.warmup_steps,
            lr_decay_steps=recipe.decay_steps,
            lr_decay_style=recipe.optimizer.schedule,
            start_wd=recipe.optimizer.weight_decay,
            end_wd=recipe.optimizer.weight_decay,
            wd_incr_steps=0,
            wd_incr_style="constant",
        )
        self._run_schedule = get_schedule(recipe.parallel)
        self.data_group = parallel_state.get_data_parallel_group()
        self.context_group = parallel_state.get_context_parallel_group()
        self._reports = RoutingReports(
            self.moe_layers, len(recipe.model.layer_numbers), self.data_group, processes.device
        )
        self.asks_to_stop = False
        self.on_progress: Callable[[], None] = lambda: None
        self.last_loss: Tensor | None = None
        self._mtp_losses: Tensor | None = None  # of this rank, in the last training step

    def _wrap(self, index: int, chunk: nn.Module) -> DistributedDataParallel:
        recipe, config = self.recipe, chunk.config
        for module in chunk.modules():
            if isinstance(module, FFNExperts):  # only the experts' operation adds to their gradients, unless shadowed
                module.into_main_grad = not recipe.parallel.shadow
        wrapped = chunk if recipe.train.precision == "fp32" else Float16Module(config, chunk)
        options = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True,
            use_distributed_optimizer=recipe.optimizer.distributed,
            overlap_grad_reduce=recipe.parallel.overlap_gradients,
            overlap_param_gather=recipe.parallel.overlap_parameters,
        )
        # The pipeline hides the reductions of later chunks, as in Megatron-LM.
        return DistributedDataParallel(config, options, wrapped, disable_bucketing=index > 0)

    def _optimizer_config(self) -> OptimizerConfig:
        recipe = self.recipe
        return OptimizerConfig(
            optimizer="adam",
            lr=recipe.max_lr,
            min_lr=recipe.min_lr,
            weight_decay=recipe.optimizer.weight_decay,
            adam_beta1=recipe.optimizer.beta1,
            adam_beta2=recipe.optimizer.beta2,
            adam_eps=recipe.optimizer.eps,
            clip_grad=recipe.optimizer.clip_grad,
            bf16=recipe.train.precision == "bf16",
            fp16=recipe.train.precision == "fp16",
            loss_scale=recipe.optimizer.loss_scale,
            **recipe.optimizer.dynamic_scale,
            params_dtype=self.config.params_dtype,
            use_distributed_optimizer=recipe.optimizer.distributed,
            overlap_param_gather=recipe.parallel.overlap_parameters,
            optimizer_cpu_offload=recipe.optimizer.cpu_offload > 0,
            optimizer_offload_fraction=recipe.optimizer.cpu_offload,
        )

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
        loss = self.backward(step, samples)
        self.scheduler.step(increment=step + 1 - self.scheduler.num_steps)
        lr = self.scheduler.get_lr(self.optimizer.param_groups[0])
        found_inf = self.optimizer.prepare_grads()  # the same on every rank
        own_norm = float("inf") if found_inf else self.optimizer.get_grad_norm()
        # One reduction for all that ranks must agree on. Sums keep non-finite values of any rank.
        mtp_losses = [] if self._mtp_losses is None else [self._mtp_losses]
        sums = torch.cat([loss.view(1), loss.new_tensor([own_norm, self.asks_to_stop]), *mtp_losses])
        dist.all_reduce(sums)
        loss_sum, norm_sum, asks_to_stop, *mtp_sums = sums.tolist()
        mean_loss, grad_norm = loss_sum / self._num_losses, norm_sum / self.processes.world_size
        if not math.isfinite(mean_loss):
            self.memories = self._new_memories()  # the step's hidden states may not be finite either
        has_overflowed = found_inf and can_fall
        reason: str | None
        if has_overflowed and scaler is not None:
            what = "an overflow" if math.isfinite(mean_loss) else "the loss is not finite"
            reason = f"{what} at loss scale {loss_scale:g}, now {float(scaler.scale):g}"
        else:
            reason = check(mean_loss, grad_norm) if check is not None else None
            if reason is None and found_inf:
                reason = f"the gradient is not finite{self.scale_limit}"
        if reason is None:
            self._update(grad_norm)
            end_step(self.gpt, self.data_group)
        else:
            skip_step(self.gpt)
        own_losses = tuple(total / self._num_losses for total in mtp_sums)
        return StepResult(mean_loss, grad_norm, lr, reason, asks_to_stop > 0, loss_scale, has_overflowed, own_losses)

    @property
    def scale_limit(self) -> str:
        """Reason why the fp16 loss scale cannot be lowered, for a message. Empty if it can be, or without fp16."""
        if self.grad_scaler is None or self.grad_scaler.can_fall:
            return ""
        own = self.recipe.optimizer
        if own.loss_scale is not None:
            return f" at optimizer.loss_scale={own.loss_scale:g}, which is fixed"
        lowest = own.dynamic_scale["min_loss_scale"]
        return f" at loss scale {float(self.grad_scaler.scale):g}, the lowest (optimizer.min_loss_scale={lowest:g})"

    def backward(self, step: int, samples: Samples | list[Batch], *, reduce: bool = True) -> Tensor:
        """Compute the gradients of a training step, which replace earlier ones; return this rank's loss.

        Args:
            reduce: reduce the gradients over ranks.
        """
        batches = self.recipe.batches
        size = batches.sequences(step)
        for chunk in self.model:
            chunk.train()
            chunk.zero_grad_buffer()
        self.optimizer.zero_grad()
        mtp.take_losses()  # of a step that was interrupted
        with contextlib.nullcontext() if reduce else self._unreduced():
            self.last_loss = self.accumulate(samples, batches.first(step), size, step)
        if depth := self.recipe.model.mtp_layers:
            losses = mtp.take_losses()
            zeros = self.last_loss.new_zeros(depth)  # on pipeline stages before the last
            self._mtp_losses = zeros if losses is None else losses / self._num_micro_batches(size)
        return self.last_loss

    def _num_micro_batches(self, count: int) -> int:
        return count // (self.recipe.train.micro_batch * self.data_group.size())

    @contextlib.contextmanager
    def _unreduced(self) -> Iterator[None]:
        """Disable the reduction of gradients over ranks in the ``with`` block."""
        config = self.config
        finalize, no_sync = config.finalize_model_grads_func, config.no_sync_func
        config.finalize_model_grads_func = config.no_sync_func = None
        try:
            with contextlib.ExitStack() as stack:
                for chunk in self.model:
                    stack.enter_context(chunk.no_sync())
                yield
        finally:
            config.finalize_model_grads_func, config.no_sync_func = finalize, no_sync

    @torch.no_grad()
    def _update(self, grad_norm: float) -> None:
        """Clip the gradients and make the optimizer step."""
        # The second half of Megatron's ChainedOptimizer.step: after the first, `train_step` may skip the step.
        for part in self.optimizer.chained_optimizers:
            if part.config.clip_grad > 0 and (parameters := part.get_parameters()):
                clip_gradients(parameters, part.config.clip_grad, grad_norm)
        self.optimizer.step_with_ready_grads()

    def evaluate(self, samples: Samples, count: int) -> float:
        """Return the mean loss of the first ``count`` samples, in nats per token. Collective."""
        for chunk in self.model:
            chunk.eval()
        loss = self.accumulate(samples, 0, count)
        dist.all_reduce(loss)
        return float(loss) / self._num_losses

    @property
    def _num_losses(self) -> int:
        # Only ranks of the last pipeline stage have a loss, and context parallel ranks share one.
        ranks = self.processes.world_size // parallel_state.get_pipeline_model_parallel_world_size()
        return ranks // self.context_group.size()

    def accumulate(self, samples: Samples | list[Batch], first: int, count: int, step: int | None = None) -> Tensor:
        """Run the pipeline schedule over samples ``first ... first + count - 1``.

        With a ``step``, also run backward passes, which add their gradients to the present ones. The gradients are
        reduced over ranks, unless `backward` was called with ``reduce=False``.

        Returns:
            This rank's loss; see `last_loss`.
        """
        train = self.recipe.train
        memories = self.memories if step is not None else self._new_memories()
        iterators = self._micro_batches(samples, first, count, step, memories)
        results = self._run_schedule(
            forward_step_func=self._forward_step,
            data_iterator=iterators,
            model=self.model,
            num_microbatches=self._num_micro_batches(count),
            seq_length=self.recipe.model.sequence_length,
            micro_batch_size=train.micro_batch,
            forward_only=step is None,
        )
        for memory in memories:
            memory.leave()
        if not results:
            return torch.zeros((), device=self.processes.device, dtype=torch.float32)
        return torch.stack([result["loss"] for result in results]).mean()

    def sync_parameters(self) -> None:
        """Wait for the all-gather of updated parameters. Call it before reading parameters outside a forward pass."""
        if self.recipe.parallel.overlap_parameters:
            for chunk in self.model:
                chunk.start_param_sync(force_sync=True)

    def collate_step(self, step: int, samples: Samples) -> list[Batch]:
        """Return this rank's micro batches of a training step. Any thread may call it, also during a step.

        Raises:
            UserError: a sample has a token id outside the vocabulary.
        """
        batches = self.recipe.batches
        return self._collate(samples, batches.first(step), batches.sequences(step))

    def _collate(self, samples: Samples, first: int, count: int) -> list[Batch]:
        size, vocab_size = self.recipe.train.micro_batch, self.recipe.model.vocab_size
        return [collate([samples[first + begin + i] for i in range(size)], vocab_size) for begin in self.begins(count)]

    def begins(self, count: int) -> range:
        """Return the index of the first sample of each micro batch that this rank has among ``count`` samples."""
        size = self.recipe.train.micro_batch
        return range(self.data_group.rank() * size, count, self.data_group.size() * size)

    def _new_memories(self) -> list[StreamMemory]:
        """Return an empty Transformer-XL memory for each chunk of the model; [] without ``model.memory_length``."""
        length, streams = self.recipe.model.memory_length, self.recipe.streams
        return [StreamMemory(chunk, length, streams) for chunk in self.chunks] if length else []

    def _micro_batches(
        self,
        samples: Samples | list[Batch],
        first: int,
        count: int,
        step: int | None,
        memories: Sequence[StreamMemory] = (),
    ) -> list[Iterator[Batch]]:
        """Return an iterator for each chunk of the model over this rank's micro batches."""
        batches = samples if isinstance(samples, list) else self._collate(samples, first, count)
        weigh(batches, self.data_group, self.processes.device)
        begins = self.begins(count)
        return [
            self._in_position(begins, batches, step, index, memories[index] if memories else None)
            for index in range(len(self.chunks))
        ]

    def _in_position(
        self,
        begins: Iterable[int],
        batches: Iterable[Batch],
        step: int | None,
        chunk: int,
        memory: StreamMemory | None,
    ) -> Iterator[Batch]:
        # Stages hold different layers of the same tokens: their dropout must differ.
        stream = chunk * self.recipe.parallel.pipeline + parallel_state.get_pipeline_model_parallel_rank()
        for begin, batch in zip(begins, batches, strict=True):
            self.on_progress()
            if step is not None:
                first_token = begin * self.recipe.model.sequence_length
                random.set_position(self.recipe.train.seed, step, first_token, stream=stream)
            if memory is not None:
                memory.enter(begin, "starts" in batch and bool(batch["starts"].any()))
            yield to_device(context_slice(batch, self.context_group), self.processes.device)

    def _forward_step(self, batches: Iterator[Batch], model: nn.Module) -> tuple[Tensor, Callable]:
        batch = next(batches)
        return self.kind.forward(model, batch), loss_function(batch, self.context_group.size())

    def routing(self) -> dict[int, StepReport]:
        """Return the routing statistics since the last call, over all ranks, by layer number (from 1). Collective."""
        return self._reports.collect()
