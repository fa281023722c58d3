"""State of models and optimizers with expert parallelism, for `torch.distributed.checkpoint`.

The state does not depend on the split: its keys, shapes and values are those of one process. Stacked experts are
DTensors over all experts. Experts that are separate modules have global ids in their keys, and each rank has only the
keys of its own experts.
"""

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from fmoe.errors import UserError
from fmoe.moe import ONE_RANK, MoE
from fmoe.parallel.groups import ParallelGroups, moe_layers
from fmoe.runtime import collectives
from fmoe.runtime.adapters import adapted

_WRAPPERS = ("_orig_mod", "_checkpoint_wrapped_module")  # of torch.compile and of activation checkpointing


def state_dict(model: nn.Module, groups: ParallelGroups) -> dict[str, Any]:
    """Return the parameters and buffers of a model, with the experts of all ranks.

    The result is like that of `torch.distributed.checkpoint.state_dict.get_model_state_dict`. Its tensors share memory
    with the model.

    Args:
        model: model whose `MoE` layers use ``groups.moe_group``; wrapped by `DistributedDataParallel` or `fully_shard`,
            or not wrapped.
        groups: groups of `fmoe.parallel.init`.

    Raises:
        UserError: experts are split over other ranks than ``groups.moe_group``; with several EP ranks, experts are
            split over tensor parallel ranks, have adapters, or have a tensor without an axis of experts.
    """
    from torch.distributed.checkpoint.state_dict import get_model_state_dict

    layers = _layers(model, groups)
    state = {}
    for name, value in get_model_state_dict(model).items():
        if not name.endswith(ONE_RANK):
            layer = _layer_of(name, layers)
            state[_key(name, layer)] = _whole(name, value, layer)
    return state


def whole_tensors(
    model: nn.Module, groups: ParallelGroups, leave_out: Collection[str] = ()
) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors of `state_dict` by name, each gathered when it is due, with the experts of all ranks.

    Collective: iterate to the end on all ranks.

    Args:
        leave_out: names of tensors that are not yielded.
    """
    layers = _layers(model, groups)
    for name, value in state_dict(model, groups).items():
        if not isinstance(value, Tensor) or name in leave_out:
            continue
        whole: Tensor = value.full_tensor() if hasattr(value, "full_tensor") else value
        whole = whole.detach()
        layer = _layer_of(name, layers)
        if layer is None or not _is_listed(name, layers):
            yield name, whole
            continue
        # The ranks hold tensors of different experts, equally many and in the same order.
        path, _, inside = name.removeprefix(layer.prefix).partition(".")
        kind = path.rstrip("0123456789")
        row = int(path.removeprefix(kind)) - layer.first
        for first in range(0, layer.total, layer.count):
            tensor = whole.contiguous() if first == layer.first else whole.new_empty(whole.shape)
            collectives.run(dist.broadcast, tensor, group=groups.moe_group, group_src=first // layer.count)
            yield f"{layer.prefix}{kind}{first + row}.{inside}", tensor


def load_state_dict(model: nn.Module, state: Mapping[str, Any], groups: ParallelGroups, *, strict: bool = True) -> None:
    """Load a model's state, which `state_dict` returned and `torch.distributed.checkpoint.load` filled.

    ``state`` may also be the whole state of a model on one process, with plain tensors.

    Args:
        model, groups: as in `state_dict`.
        strict: raise if keys of the model are missing in ``state``, or if ``state`` has unknown keys.

    Raises:
        UserError: as in `state_dict`; ``state`` has the experts of one rank only; a key is missing.
        RuntimeError: a key is unknown, or a tensor has another shape than the model's.
    """
    from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, set_model_state_dict

    if isinstance(model, nn.parallel.DistributedDataParallel):  # torch looks for its prefix in names of parameters
        model = model.module
    layers = _layers(model, groups)
    if (held := next((name for name in state if name.endswith(ONE_RANK)), None)) is not None:
        raise UserError(f"{held}: the state has the experts of one rank only: save fmoe.parallel.state_dict instead")
    unknown = {name: value for name, value in state.items() if not _is_listed(name, layers)}
    local = {}
    for name, like in get_model_state_dict(model).items():
        layer = _layer_of(name, layers)
        key = _key(name, layer)
        if name.endswith(ONE_RANK):
            local[name] = like
        elif key in state:
            local[name] = _local(name, state[key], like, layer)
            unknown.pop(key, None)
        elif strict:
            raise UserError(f"the state lacks {key}: pass the state of the same model, or strict=False")
    set_model_state_dict(model, {**unknown, **local}, options=StateDictOptions(strict=strict))


def optimizer_state_dict(model: nn.Module, optimizer: torch.optim.Optimizer, groups: ParallelGroups) -> dict[str, Any]:
    """Return the state of the model's optimizer, with the state of the experts of all ranks.

    The result is like that of `torch.distributed.checkpoint.state_dict.get_optimizer_state_dict`: its keys are
    ``state`` and ``param_groups``, and parameters have their names. Call it on all ranks: an optimizer without state
    takes a step with gradients of zero.

    Args:
        model, groups: as in `state_dict`.

    Raises:
        UserError: as in `state_dict`; state of experts has no axis of experts.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict

    layers = _layers(model, groups)
    local: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    state = {}
    for name, entry in local["state"].items():
        layer = _layer_of(name, layers)
        state[_key(name, layer)] = {kind: _whole(f"{kind} of {name}", value, layer) for kind, value in entry.items()}
    for group in local["param_groups"]:
        group["params"] = [_key(name, _layer_of(name, layers)) for name in group["params"]]
    return {"state": state, "param_groups": local["param_groups"]}


def load_optimizer_state_dict(
    model: nn.Module, optimizer: torch.optim.Optimizer, state: Mapping[str, Any], groups: ParallelGroups
) -> None:
    """Load an optimizer's state, which `optimizer_state_dict` returned and `torch.distributed.checkpoint.load` filled.

    ``state`` may also be the whole state of an optimizer on one process. Its parameter groups must be those of
    ``optimizer``, in the same order.

    Args:
        model, groups: as in `state_dict`.

    Raises:
        UserError: as in `optimizer_state_dict`; the state of a parameter is missing; the number of parameter groups
            differs.
    """
    from torch.distributed.checkpoint.state_dict import get_optimizer_state_dict, set_optimizer_state_dict

    layers = _layers(model, groups)
    local: dict[str, Any] = get_optimizer_state_dict(model, optimizer)
    if len(local["param_groups"]) != len(state["param_groups"]):
        numbers = f"{len(state['param_groups'])} parameter groups, but the optimizer has {len(local['param_groups'])}"
        raise UserError(f"the state has {numbers}: pass the state of an optimizer with the same groups")
    entries = {}
    for name, likes in local["state"].items():
        layer = _layer_of(name, layers)
        key = _key(name, layer)
        if key not in state["state"]:
            raise UserError(f"the state lacks {key}: pass the state of an optimizer of the same parameters")
        entries[name] = {
            kind: _local(f"{kind} of {name}", value, likes.get(kind), layer)
            for kind, value in state["state"][key].items()
        }
    # A saved list of parameters has only the separate experts of the rank that wrote it.
    param_groups = [
        {**saved, "params": group["params"]}
        for saved, group in zip(state["param_groups"], local["param_groups"], strict=True)
    ]
    loaded: dict[str, Any] = {"state": entries, "param_groups": param_groups}
    set_optimizer_state_dict(model, optimizer, loaded)


@dataclass(frozen=True)
class _Experts:
    """The experts of a layer that are spread over EP ranks.

    Attributes:
        prefix: prefix of their tensors in a state, which ends with a period.
        mesh: mesh (ep, dp) of the ranks; (ep, replicate, shard) with ``shard_size``.
        first, count, total: id of this rank's first expert, number of its experts, and of all experts.
        are_listed: whether they are separate modules, whose local ids follow the prefix.
    """

    prefix: str
    mesh: DeviceMesh
    first: int
    count: int
    total: int
    are_listed: bool


def _layers(model: nn.Module, groups: ParallelGroups) -> list[_Experts]:
    moe_layers(model, groups)
    if groups.ep == 1:
        return []
    ranks = groups.mesh.mesh if groups.mesh.mesh_dim_names == (groups.ep_name, groups.dp_name) else groups.mesh.mesh.T
    over = groups.expert_shard_mesh
    mesh = DeviceMesh.from_group(
        [groups.moe_group, *(over.get_group(dim) for dim in range(over.ndim))],
        groups.mesh.device_type,
        mesh=ranks.reshape(groups.ep, *over.shape).contiguous(),
        mesh_dim_names=(groups.ep_name, *(over.mesh_dim_names or ())),
    )
    spread = []
    for name, layer in model.named_modules(remove_duplicate=False):
        if isinstance(layer, MoE):
            path = ".".join([*path_in_state(model, name), ""])
            prefix = f"{path}experts."
            if adapted(layer.experts) is not layer.experts:
                raise UserError(
                    f"{prefix}* have adapters, which ep={groups.ep} does not support: save them on each rank"
                )
            if getattr(layer.experts, "hidden_parts", 1) > 1:
                raise UserError(f"{prefix}* are split over expert_tensor_group, which ep={groups.ep} does not support")
            are_listed = isinstance(layer.experts, nn.ModuleList)
            sizes = (layer.first_expert, layer.num_local_experts, layer.exchange.num_experts)
            spread.append(_Experts(prefix, mesh, *sizes, are_listed))
            if (form := getattr(layer, "form", None)) is not None:  # of `fmoe.convert.RoutedMoE`: names in its state
                spread.append(_Experts(path, mesh, *sizes, form.is_listed))
    return spread


def path_in_state(model: nn.Module, name: str) -> list[str]:
    """Return the parts of a module's name that are part of the names in a state: those of wrappers are not."""
    path = []
    module = model
    for part in name.split(".") if name else []:
        if part not in _WRAPPERS and not isinstance(module, nn.parallel.DistributedDataParallel):
            path.append(part)
        module = module.get_submodule(part)
    return path


def _layer_of(name: str, layers: list[_Experts]) -> _Experts | None:
    return next((layer for layer in layers if name.startswith(layer.prefix)), None)


def _is_listed(key: str, layers: list[_Experts]) -> bool:
    """Return whether a key of a state belongs to an expert, of any rank, that is a separate module."""
    layer = _layer_of(key, layers)
    if layer is None or not layer.are_listed:
        return False
    return key.removeprefix(layer.prefix).partition(".")[0].rpartition("_")[2].isdecimal()  # also expert_3


def _key(name: str, layer: _Experts | None) -> str:
    """Return the key in the whole state for the name of a tensor on this rank."""
    if layer is None or not layer.are_listed:
        return name
    local, _, inside = name.removeprefix(layer.prefix).partition(".")
    return f"{layer.prefix}{layer.first + int(local)}.{inside}" if local.isdecimal() else name  # of a RoutedMoE: global


def _whole(name: str, value: Any, layer: _Experts | None) -> Any:
    """Return a stack of this rank's experts as a part of the stack of all experts; other values as they are."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    if layer is None or layer.are_listed or not isinstance(value, Tensor) or not value.dim():
        return value
    local = value.to_local() if isinstance(value, DTensor) else value
    if type(local) not in (Tensor, nn.Parameter):
        raise UserError(f"{name} is a {type(local).__name__}, which cannot be saved for another number of ranks")
    if value.shape[0] != layer.count:
        raise UserError(
            f"{name} has shape {tuple(value.shape)}, whose first axis is not that of the {layer.count} experts of this "
            "rank"
        )
    shape = torch.Size((layer.total, *value.shape[1:]))
    inside = value.placements if isinstance(value, DTensor) else [Replicate()] * (layer.mesh.ndim - 1)
    placements = [Shard(0), *inside]
    stride = torch.empty(shape, device="meta", dtype=local.dtype).stride()
    return DTensor.from_local(local, layer.mesh, placements, run_check=False, shape=shape, stride=stride)


def _local(name: str, value: Any, like: Any, layer: _Experts | None) -> Any:
    """Return this rank's part of a value of the whole state, in the layout of ``like``."""
    from torch.distributed.tensor import DTensor, distribute_tensor

    if not isinstance(value, Tensor):
        return value
    if layer is not None and not layer.are_listed and value.dim():
        if value.shape[0] != layer.total:
            raise UserError(
                f"{name} has shape {tuple(value.shape)} in the state, whose first axis is not that of all "
                f"{layer.total} experts"
            )
        if not isinstance(value, DTensor):
            value = value[layer.first : layer.first + layer.count]
        elif isinstance(like, DTensor):
            return DTensor.from_local(
                value.to_local(),
                like.device_mesh,
                like.placements,
                run_check=False,
                shape=like.shape,
                stride=like.stride(),
            )
        else:
            return value.to_local()
    if isinstance(like, DTensor) and not isinstance(value, DTensor):
        return distribute_tensor(value, like.device_mesh, like.placements, src_data_rank=None)
    return value
