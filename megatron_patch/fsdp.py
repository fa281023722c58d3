"""ZeRO-2 and ZeRO-3 for Megatron-core models: parameters, gradients and optimizer state sharded by torch's FSDP2.

`FullyShardedDataParallel` takes the place of Megatron's DistributedDataParallel, and `ShardedOptimizer` that of its
distributed optimizer:

1. Each transformer layer, the experts of each layer, and the rest of the model are one unit each. FSDP2 gathers a
   unit's parameters before it runs, and reduces its gradients to shards after each backward pass.
2. A rank keeps its shard of each parameter in float32. Flat views of it are the tensors that the optimizer updates.
3. ``finish_grad_sync``, which Megatron's ``finalize_model_grads`` calls, passes the reduced gradients to these views.
4. From there on, everything is as with the distributed optimizer: norm, clipping, step, checkpoint.
"""

import math
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import parallel_state, tensor_parallel
from megatron.core.distributed import DistributedDataParallelConfig
from megatron.core.optimizer import OptimizerConfig
from megatron.core.optimizer.grad_scaler import ConstantGradScaler, DynamicGradScaler, MegatronGradScaler
from megatron.core.optimizer.optimizer import FP32Optimizer
from megatron.core.transformer.transformer_config import TransformerConfig
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor, Shard
from torch.optim import Optimizer

from fmoe.parallel.fsdp import expert_placement
from fmoe.parallel.gradients import is_expert
from fmoe.runtime import ownership
from megatron_patch.layer import MegatronMoE


@dataclass(frozen=True, eq=False)
class LocalShard:
    """A range of a flattened parameter that this rank holds.

    Attributes:
        parameter: the sharded parameter, a DTensor.
        main: view of the range, a flat float32 tensor.
        start: offset of the range in the flattened parameter.
    """

    parameter: Any  # the attribute main_grad of both tensors is Megatron's
    main: Any
    start: int


def local_slices(tensor: Tensor) -> list[tuple[Tensor, int]]:
    """Return this rank's elements of a tensor, each contiguous range with its offset in the flattened tensor.

    Ranges of a DTensor are flat views of its local tensor. A plain tensor is its own only range.
    """
    if not isinstance(tensor, DTensor):
        return [(tensor, 0)]
    local = tensor.to_local().detach()
    placement = tensor.placements[-1]
    assert isinstance(placement, Shard)
    axis = placement.dim
    mesh = tensor.device_mesh
    rank = mesh.get_local_rank(mesh.ndim - 1)
    first = rank * -(-tensor.shape[axis] // mesh.size(mesh.ndim - 1))  # all shards but the last ones are equal
    if axis == 0:
        return [(local.view(-1), min(first, tensor.shape[0]) * math.prod(tensor.shape[1:]))]
    inner = math.prod(tensor.shape[2:])
    return [(row.view(-1), (n * tensor.shape[1] + first) * inner) for n, row in enumerate(local.unbind(0))]


class FullyShardedDataParallel(nn.Module):
    """A Megatron-core model whose parameters and gradients are sharded over data parallel ranks, by torch's FSDP2.

    Experts are sharded over the ranks that hold the same experts. With several of Megatron's optimizer instances, each
    instance has a copy of all shards (HSDP). Gradients are averaged like those of Megatron's DistributedDataParallel,
    and reduced once per micro batch, so that no rank accumulates whole gradients.

    Args:
        config: config of the model. The model computes in ``config.params_dtype``, and shards are float32.
        module: the model, or the model in a Float16Module. Its parameters are replaced by DTensors.
        reshard_after_forward: free gathered parameters after the forward pass of each unit (ZeRO-3). False keeps them
            until the end of the step (ZeRO-2).
        reduce_dtype: dtype in which gradients are reduced.
        on_host: keep shards and their gradients in host memory.

    Attributes:
        shards: the ranges of parameters that this rank holds.
        max_gathered: largest number of parameters that are gathered at a time, without prefetched ones.
    """

    def __init__(
        self,
        config: TransformerConfig,
        module: Any,
        *,
        reshard_after_forward: bool,
        reduce_dtype: torch.dtype = torch.float32,
        on_host: bool = False,
    ):
        super().__init__()
        # A model returns its loss as a view, which nobody changes in place.
        warnings.filterwarnings("ignore", message="FSDP2-wrapped module .* returned a view tensor")
        self.config = config
        self.ddp_config = DistributedDataParallelConfig()  # Megatron's reductions read it
        self.module = module
        model = getattr(module, "module", module)
        data_size = parallel_state.get_data_parallel_world_size(with_context_parallel=True)
        expert_size = parallel_state.get_expert_data_parallel_world_size()
        data_group = _shard_group(for_experts=False)
        expert_group = _shard_group(for_experts=True)
        ownership.refresh()
        marks = {}
        for name, parameter in model.named_parameters():
            parameter.data = parameter.data.float()
            marks[name] = dict(vars(parameter))
        options: dict[str, Any] = {
            "reshard_after_forward": reshard_after_forward,
            "mp_policy": MixedPrecisionPolicy(config.params_dtype, reduce_dtype, cast_forward_inputs=False),
        }
        if on_host:
            options["offload_policy"] = CPUOffloadPolicy(pin_memory=torch.cuda.is_available())
        dense = options | {"mesh": _mesh_of(data_group)}
        experts = options | {"mesh": _mesh_of(expert_group)}
        if expert_group.size() > 1:
            experts["shard_placement_fn"] = expert_placement(expert_group.size())
        layers = [layer for layer in model.modules() if isinstance(layer, TransformerLayer)]
        for layer in list(model.modules()):
            if isinstance(layer, MegatronMoE):
                fully_shard(layer.experts, **experts)
                # FSDP2 divides by the size of its mesh, but the gradient sums over the tokens of more ranks.
                # set_gradient_divide_factor is not an alternative: see `fmoe.parallel.fully_shard`.
                ratio = data_size / expert_size
                layer.experts.set_all_reduce_hook(lambda gradient, ratio=ratio: gradient.div_(ratio))
        for layer in layers:
            fully_shard(layer, **dense)
        # The embedding and the output layer, which may share a weight, run first and last.
        fully_shard(model, **dense | {"reshard_after_forward": False})
        model.set_reshard_after_backward(reshard_after_forward)
        sizes = [_num_parameters(layer) for layer in layers]
        self.max_gathered = _num_parameters(model)
        if reshard_after_forward:
            self.max_gathered += max(sizes, default=0) - sum(sizes)
        self._units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
        if dist.get_backend(data_group) != "nccl":  # gloo has no mean
            for unit in self._units:
                unit.set_force_sum_reduction_for_comms(True)
        self.shards: list[LocalShard] = []
        for name, parameter in model.named_parameters():
            vars(parameter).update(marks[name])
            for main, start in local_slices(parameter):
                tensor_parallel.copy_tensor_model_parallel_attributes(main, parameter)
                # Norms skip weights of other pipeline stages.
                main.shared = getattr(parameter, "shared", False)  # type: ignore[attr-defined]
                self.shards.append(LocalShard(parameter, main, start))

    def forward(self, *inputs: Any, **options: Any) -> Any:
        return self.module(*inputs, **options)

    def zero_grad_buffer(self) -> None:
        """Drop the gradients."""
        for shard in self.shards:
            shard.parameter.grad = None
            shard.parameter.main_grad = None
            shard.main.main_grad = None

    def finish_grad_sync(self, force_all_reduce: bool | None = False) -> None:
        """Pass the reduced gradients to the attributes ``main_grad`` of parameters and `shards`. A missing one is 0.

        Also free all gathered parameters, so that Megatron's reductions over tensor parallel ranks see the shards.
        """
        self.reshard()
        gradients = {}
        for shard in self.shards:
            parameter = shard.parameter
            if parameter not in gradients:
                gradient: Any = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
                gradients[parameter] = {start: part for part, start in local_slices(gradient)}
                parameter.main_grad = gradient.to_local()
            shard.main.main_grad = gradients[parameter][shard.start]

    def reshard(self) -> None:
        """Free all gathered parameters."""
        for unit in self._units:
            unit.reshard()


def _num_parameters(module: nn.Module) -> int:
    return sum(parameter.numel() for parameter in module.parameters())


def _shard_group(for_experts: bool) -> dist.ProcessGroup:
    """Return the ranks over which a parameter is sharded."""
    if for_experts:
        return parallel_state.get_expert_data_parallel_group(partial_expert_data_parallel=True)
    return parallel_state.get_data_parallel_group(with_context_parallel=True, partial_data_parallel=True)


def _copy_group() -> dist.ProcessGroup | None:
    """Return the ranks that hold the same shards, of dense parameters and of experts; None if there are no others."""
    return parallel_state.get_inter_distributed_optimizer_instance_group(check_initialized=False)


def is_in_first_copy() -> bool:
    """Return whether this rank is one of those that write shards to checkpoints."""
    copies = _copy_group()
    return copies is None or copies.rank() == 0


def _mesh_of(shards: dist.ProcessGroup) -> DeviceMesh:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    copies = _copy_group()
    with torch.device("cpu"):  # not on the meta device, on which a dry run builds models
        if copies is None:
            return DeviceMesh.from_group(shards, device)
        # The ranks of a copy are adjacent in a data parallel group, at equal distances in all copies.
        first = dist.get_rank()
        members = dist.get_process_group_ranks(shards)
        ranks = [[rank + other - first for rank in members] for other in dist.get_process_group_ranks(copies)]
        return DeviceMesh.from_group([copies, shards], device, mesh=ranks, mesh_dim_names=("copy", "shard"))


def gathered_in_turn(model: nn.Module) -> Iterator[None]:
    """Gather the parameters of each FSDP2 unit in turn, during one iteration. Other models get one iteration."""
    units = [unit for unit in model.modules() if isinstance(unit, FSDPModule)]
    if not units:
        yield
    for unit in units:
        unit.unshard()
        yield
        unit.reshard()


class ShardedOptimizer(FP32Optimizer):
    """An optimizer of the dense parameters, or of the experts, of chunks in `FullyShardedDataParallel`.

    Attributes:
        shards: the ranges of parameters that this rank updates.
        data_parallel_group: ranks over which each of the parameters is sharded.
        grad_scaler: scaler of the loss for fp16; None for no scale.
    """

    def __init__(self, optimizer: Optimizer, config: OptimizerConfig, shards: list[LocalShard], for_experts: bool):
        super().__init__(optimizer, config, lambda *_: None)
        self.shards = shards
        self.data_parallel_group = _shard_group(for_experts)
        if for_experts:
            self.tp_group = parallel_state.get_expert_tensor_parallel_group()
        else:
            self.tp_group = parallel_state.get_tensor_model_parallel_group()
        self.grad_stats_parallel_group = parallel_state.get_intra_distributed_optimizer_instance_group()
        self.grad_scaler: MegatronGradScaler | None = _grad_scaler(config) if config.fp16 else None

    def get_loss_scale(self) -> Tensor:
        return super().get_loss_scale() if self.grad_scaler is None else self.grad_scaler.scale

    @torch.no_grad()
    def prepare_grads(self) -> bool:
        """Take and unscale the gradients; return whether one of this rank overflowed."""
        super().prepare_grads()
        if self.grad_scaler is None:
            return False
        gradients = [shard.main.grad for shard in self.shards]
        factor = self.grad_scaler.inv_scale.to(gradients[0].device)
        overflow = torch.zeros_like(factor)
        torch._amp_foreach_non_finite_check_and_unscale_(gradients, overflow, factor)
        return bool(overflow)

    def get_main_grads_for_grad_norm(self) -> list[Tensor]:
        gradients = super().get_main_grads_for_grad_norm()
        device = self.get_loss_scale().device
        if not gradients or gradients[0].device == device:
            return gradients
        return [torch.nn.utils.get_total_norm(gradients).view(1).to(device)]  # of gradients in host memory


def _grad_scaler(config: OptimizerConfig) -> MegatronGradScaler:
    if config.loss_scale:
        return ConstantGradScaler(config.loss_scale)
    return DynamicGradScaler(
        initial_scale=config.initial_loss_scale,
        min_scale=config.min_loss_scale,
        growth_factor=2.0,
        backoff_factor=0.5,
        growth_interval=config.loss_scale_window,
        hysteresis=config.hysteresis,
    )


def shards_by_kind(chunks: Iterable[FullyShardedDataParallel]) -> dict[bool, list[LocalShard]]:
    """Return the trained shards of chunks: of dense parameters (False), and of experts (True) if there are any."""
    kinds: dict[bool, list[LocalShard]] = {}
    for chunk in chunks:
        for shard in chunk.shards:
            if shard.parameter.requires_grad:
                kinds.setdefault(is_expert(shard.parameter), []).append(shard)
    return kinds
