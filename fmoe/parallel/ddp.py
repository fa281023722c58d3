"""torch's DistributedDataParallel for models with expert parallelism."""

import dataclasses
import weakref
from collections.abc import Iterable, Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils import _pytree as pytree

from fmoe.errors import UserError
from fmoe.moe import MoE
from fmoe.parallel.buckets import Reduction, broadcast, buckets_of, refuse_difference
from fmoe.parallel.gradients import has_mark
from fmoe.parallel.groups import ParallelGroups, moe_layers
from fmoe.runtime import ownership


class DistributedDataParallel(nn.parallel.DistributedDataParallel):
    """torch's DistributedDataParallel for models with experts that differ between ranks.

    After the backward pass all gradients are averaged over the data parallel ranks. For an expert, this is the sum
    over the ranks that hold it, divided by the number of data parallel ranks. An expert without tokens gets a gradient
    of zeros.

    Buckets, communication hooks and `no_sync` of torch's wrapper are unchanged. Communication hooks (fp16, bf16,
    PowerSGD, post-localSGD) apply to dense gradients only. Expert gradients are summed in their own dtype.

    Experts may be frozen or unfrozen (``requires_grad``) between steps, on all ranks that hold them. A frozen expert
    gets no gradient. For dense parameters, torch's wrapper uses the value at wrapping.

    If several ranks hold an expert, they compare ``requires_grad`` in every forward pass with gradients, except in
    `no_sync`. The host waits for the result, except while a CUDA graph is captured.

    Args:
        module: model whose `MoE` layers use ``groups.moe_group``. Dense parameters are broadcast from the first data
            parallel rank, experts from the first rank that holds them.
        groups: groups of `fmoe.parallel.init`.
        options: arguments of torch's wrapper, except ``process_group`` and ``device_mesh``.

    Raises:
        UserError: a layer uses other ranks than ``groups.moe_group``; no dense parameter requires gradients; an expert
            is frozen on only some of the ranks that hold it; a group or mesh is in ``options``.
            A forward pass raises it on all these ranks if ``requires_grad`` has changed on some of them only.
        RuntimeError: in a forward pass, if the previous backward pass left gradients unreduced; in a backward pass, if
            an expert's gradient arrives twice.
    """

    def __init__(self, module: nn.Module, groups: ParallelGroups, **options: Any):
        for key in ("process_group", "device_mesh"):
            if options.get(key) is not None:
                raise UserError(f"{key}={options[key]!r} is not supported: omit {key}; groups.data_group is used")
        layers = moe_layers(module, groups)
        parameters = list(module.named_parameters(remove_duplicate=False))
        ownership.refresh()
        experts = {name: p for name, p in parameters if has_mark(p)}
        if not any(p.requires_grad for name, p in parameters if name not in experts):
            raise UserError(
                "no dense parameter requires gradients: use fmoe.parallel.average_gradients after the backward pass"
            )
        # torch's wrapper would overwrite these buffers with rank 0's values before every forward pass.
        buffers = dict(_buffers_of_a_rank(layers))
        ignored = {*experts, *buffers, *getattr(module, "_ddp_params_and_buffers_to_ignore", ())}
        self._set_params_and_buffers_to_ignore_for_model(module, ignored)
        super().__init__(module, process_group=groups.data_group, **options)
        self.groups = groups
        self._experts = experts
        if options.get("init_sync", True):
            broadcast(dict.fromkeys(experts.values()), groups.expert_data_group)  # each once, in order
            broadcast([b for b in buffers.values() if b is not None], groups.expert_data_group)
        self._hooked: set[Tensor] = set()
        self._syncs = self._is_queued = False
        self._trained: list[Tensor] = []
        self._buckets: list[list[Tensor]] = []
        self._refuse_difference()
        self._follow()

    def _refuse_difference(self) -> None:
        """Raise if an expert is frozen on only some of the ranks that hold it. Collective over these ranks."""
        refuse_difference("requires_grad", self._experts, self.groups.expert_data_group, self.groups.mesh.device_type)

    def _follow(self) -> None:
        """Prepare the reduction of the experts that are trained now."""
        # From the last layer to the first, approximately the order of the backward pass.
        trained: list[Tensor] = [p for p in reversed(dict.fromkeys(self._experts.values())) if p.requires_grad]
        if list(map(id, trained)) != list(map(id, self._trained)):
            self._trained = trained
            self._buckets = buckets_of(trained)
            self._bucket_of = {p: index for index, bucket in enumerate(self._buckets) for p in bucket}
        self._restart()
        groups = self.groups
        myself = weakref.ref(self)  # parameters outlive wrappers
        for parameter in trained:
            if parameter in self._hooked:
                continue
            self._hooked.add(parameter)
            if groups.ep > 1:
                # A rank's loss is the mean over its own tokens; an expert's gradient sums over the tokens of ep ranks.
                # Dividing before accumulation lets gradients of several synchronized passes add up.
                parameter.register_hook(lambda grad: grad / groups.ep if myself() is not None else None)
            parameter.register_post_accumulate_grad_hook(lambda p: _call(myself, DistributedDataParallel._arrived, p))

    def forward(self, *inputs: Any, **kwargs: Any) -> Any:
        if torch.is_grad_enabled():
            if self._missing != [len(bucket) for bucket in self._buckets]:
                raise RuntimeError(
                    "the last backward pass did not reach the experts of every layer, so their gradients are not "
                    "reduced: it raised an error, or the loss depends on no tensor that the forward pass returned "
                    "(alone or in lists, tuples, dicts and dataclasses)"
                )
            self._syncs = self.require_backward_grad_sync
            # Every rank takes part, changed or not: none knows whether another one has changed.
            is_captured = torch.cuda.is_available() and torch.cuda.is_current_stream_capturing()
            if self._syncs and not is_captured:
                self._refuse_difference()
            self._follow()
        output = super().forward(*inputs, **kwargs)
        if torch.is_grad_enabled() and self._syncs and self._buckets:
            myself = weakref.ref(self)
            for tensor in _tensors(output):
                if tensor.requires_grad:
                    tensor.register_hook(lambda _: _call(myself, DistributedDataParallel._begin))
        return output

    def _restart(self) -> None:
        self._missing = [len(bucket) for bucket in self._buckets]
        self._launched = 0
        self._running: list[Reduction] = []

    def _begin(self) -> None:
        """Queue `_finish` for the end of the backward pass."""
        if self._syncs and not self._is_queued:
            self._is_queued = True
            torch.autograd.Variable._execution_engine.queue_callback(self._finish)

    def _arrived(self, parameter: Tensor) -> None:
        if not self._syncs or self.static_graph:  # gradients of a static graph may arrive several times per pass
            return
        index = self._bucket_of[parameter]
        self._missing[index] -= 1
        if self._missing[index] < 0:
            raise RuntimeError(
                "an expert's gradient arrived twice in one backward pass (reentrant checkpoints of a layer that runs "
                "twice): checkpoint with use_reentrant=False, or pass static_graph=True"
            )
        # Launch in the order of the buckets, which is the same on all ranks.
        while self._launched < len(self._buckets) and not self._missing[self._launched]:
            self._launch()
        if self._launched == len(self._buckets):
            self._begin()

    def _launch(self) -> None:
        self._running.append(Reduction(self._buckets[self._launched], self.groups.expert_data_group))
        self._launched += 1

    def _finish(self) -> None:
        self._is_queued = False
        if not self._syncs:
            return
        while self._launched < len(self._buckets):
            self._launch()
        for reduction in self._running:
            reduction.finish(self.groups.dp)
        self._syncs = False  # as in torch: one reduction per forward pass
        self._restart()


class DenseAverager:
    """Wrapper of torch's ``PeriodicModelAverager`` or ``HierarchicalModelAverager`` that leaves experts out.

    Without it, torch would average different experts with each other. Pass it to ``PostLocalSGDOptimizer``, and use
    ``post_localSGD_hook`` on `DistributedDataParallel`. Replicas of an expert stay equal, because their gradients are
    reduced in every step.
    """

    def __init__(self, averager: Any):
        self.averager = averager

    @property
    def step(self) -> int:
        """The averager's number of steps, which ``PostLocalSGDOptimizer`` saves."""
        return self.averager.step

    @step.setter
    def step(self, value: int) -> None:
        self.averager.step = value

    def average_parameters(self, params: Iterable[nn.Parameter] | Iterable[dict[str, Any]]) -> None:
        """Average the dense parameters, in those steps in which the wrapped averager does so.

        Args:
            params: parameters of a model, or parameter groups of an optimizer.
        """
        flat = [p for entry in params for p in (entry["params"] if isinstance(entry, dict) else [entry])]
        ownership.refresh()
        self.averager.average_parameters(p for p in flat if not has_mark(p))


def _call(reference: weakref.ref, method: Any, *args: Any) -> None:
    owner = reference()
    if owner is not None:
        method(owner, *args)


def _buffers_of_a_rank(layers: dict[str, MoE]) -> Iterator[tuple[str, Tensor | None]]:
    """Yield (name, buffer) of the buffers that torch's wrapper must not overwrite.

    These are the buffers of experts, and all other non-persistent buffers; the latter are yielded as (name, None).
    """
    for layer_name, layer in layers.items():
        prefix = f"{layer_name}." if layer_name else ""
        for module_name, module in layer.named_modules():
            for name, buffer in module.named_buffers(recurse=False):
                full = f"{prefix}{module_name}.{name}" if module_name else f"{prefix}{name}"
                if module_name.split(".")[0] == "experts":
                    yield full, buffer
                elif name in module._non_persistent_buffers_set:
                    yield full, None


def _tensors(output: Any) -> Iterator[Tensor]:
    for leaf in pytree.tree_leaves(output):
        if isinstance(leaf, Tensor):
            yield leaf
        elif dataclasses.is_dataclass(leaf) and not isinstance(leaf, type):
            yield from _tensors([getattr(leaf, field.name) for field in dataclasses.fields(leaf)])
