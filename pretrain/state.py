"""What of a Megatron model and optimizer goes into a checkpoint, under global names and global offsets.

Megatron's ``sharded_state_dict`` serves as the index: it knows each parameter's global name, shape and offset.
Optimizer state is addressed by the parameter it belongs to and the flat range of it that this rank steps, so that it
loads at any split, sharded over data parallel ranks or not.
"""

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from megatron.core.optimizer.optimizer import Float16OptimizerWithFloat16Params
from torch import Tensor

from fmoe.errors import UserError
from pretrain import generators
from pretrain.checkpoint import Checkpoint, Piece

_MODEL = "model/"
_MOMENTS = ("exp_avg", "exp_avg_sq")


@dataclass(frozen=True)
class _Place:
    """Where a local parameter lies in its global tensor; ``is_main`` on the one replica that writes it."""

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    block: tuple[int, ...]
    is_main: bool


@dataclass(frozen=True)
class _Shard:
    """The flat range of a parameter that this rank's optimizer steps, and where it keeps the state for it."""

    optimizer: torch.optim.Optimizer
    parameter: Tensor
    main: Tensor
    start: int
    stop: int
    is_sharded: bool

    @property
    def has_master(self) -> bool:
        """Whether the stepped values are an fp32 copy of 16-bit ones."""
        return self.parameter.dtype != torch.float32


def _places(gpt) -> dict[int, _Place]:
    """Places by id of the parameter or buffer."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    places = {}
    for sharded in nested_values(gpt.sharded_state_dict(metadata={"dp_cp_group": group})):
        if not isinstance(sharded, ShardedTensor) or sharded.data is None:
            continue
        prepended = sharded.prepend_axis_num
        block = (1,) * prepended + tuple(sharded.local_shape)
        is_main = (
            all(part == 0 for part in sharded.replica_id)
            if isinstance(sharded.replica_id, tuple)
            else (sharded.replica_id == 0)
        )
        places[id(sharded.data)] = _Place(
            sharded.key, tuple(sharded.global_shape), tuple(sharded.global_offset), block, is_main
        )
    return places


def _tensors(gpt) -> Iterator[tuple[str, Tensor]]:
    """What makes the model: its parameters and its persistent buffers (a gate's bias, a hash gate's table)."""
    yield from gpt.named_parameters()
    for prefix, module in gpt.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def _optimizers(optimizer) -> list:
    return getattr(optimizer, "chained_optimizers", [optimizer])


def _shards(optimizer) -> Iterator[_Shard]:
    for part in _optimizers(optimizer):
        if isinstance(part, DistributedOptimizer):
            for parameter, (group, index) in part.model_param_group_index_map.items():
                where = part._get_model_param_range_map(parameter)["param"]
                main = part.optimizer.param_groups[group]["params"][index]
                yield _Shard(part.optimizer, parameter, main, where.start, where.end, True)
        elif isinstance(part, Float16OptimizerWithFloat16Params):
            for mains, parameters in zip(part.fp32_from_float16_groups, part.float16_groups, strict=True):
                for main, parameter in zip(mains, parameters, strict=True):
                    yield _Shard(part.optimizer, parameter, main, 0, parameter.numel(), False)
            for parameters in part.fp32_from_fp32_groups:
                for parameter in parameters:
                    yield _Shard(part.optimizer, parameter, parameter, 0, parameter.numel(), False)
        else:
            for group in part.optimizer.param_groups:
                for parameter in group["params"]:
                    yield _Shard(part.optimizer, parameter, parameter, 0, parameter.numel(), False)


def pieces(engine) -> Iterator[Piece]:
    """What this rank writes of parameters, buffers, masters and moments."""
    places = _places(engine.gpt)
    for name, tensor in _tensors(engine.gpt):
        place = _place(places, tensor, name)
        if place.is_main:
            data = tensor.detach().view(place.block)
            yield Piece(f"{_MODEL}{place.name}", place.shape, place.offset, place.block, data)
    for shard in _shards(engine.optimizer):
        place = _place(places, shard.parameter, "a parameter of the optimizer")
        if not (shard.is_sharded or place.is_main):
            continue
        # Nothing there yet: no step was made, all of them were skipped.
        moments = shard.optimizer.state.get(shard.main) or {}
        values = {name: moments.get(name, torch.zeros_like(shard.main)) for name in _MOMENTS}
        if shard.has_master:
            values["master"] = shard.main.detach()
        for name, value in values.items():
            yield Piece(
                f"optimizer/{name}/{place.name}",
                place.shape,
                place.offset,
                place.block,
                value.reshape(-1),
                shard.start,
                shard.stop,
            )


def _place(places: dict[int, _Place], parameter: Tensor, name: str) -> _Place:
    if id(parameter) not in places:
        raise RuntimeError(f"{name} of shape {tuple(parameter.shape)} is not in the model's sharded_state_dict")
    return places[id(parameter)]


def optimizer_state(engine) -> dict[str, Any]:
    """Of the optimizer, what is one number for all parameters."""
    steps = {
        float(state["step"])
        for part in _optimizers(engine.optimizer)
        for state in part.optimizer.state.values()
        if "step" in state
    }
    steps |= {
        float(g["step"]) for part in _optimizers(engine.optimizer) for g in part.optimizer.param_groups if "step" in g
    }
    if len(steps) > 1:
        raise RuntimeError(f"parameters were stepped {sorted(steps)} times; one number is saved for all of them")
    return {"step": steps.pop() if steps else 0.0}


def schedule_state(engine) -> dict[str, Any]:
    """Of the learning rate: how far it is, and by which rule."""
    return engine.scheduler.state_dict()


def rank_state() -> dict[str, Any]:
    """Of this rank alone: its random number generators."""
    return {"rng": generators.states()}


def load(engine, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint into the model and the optimizer, at whatever split they are.

    Raises:
        UserError: the checkpoint lacks a tensor or has it in another shape.
    """
    places = _places(engine.gpt)
    step = checkpoint.state["optimizer"]["step"]
    _load_model(engine, checkpoint, places)
    with torch.no_grad():
        for shard in _shards(engine.optimizer):
            place = _place(places, shard.parameter, "a parameter of the optimizer")

            def cut(name: str, place=place, shard=shard) -> Tensor:
                value = _read(checkpoint, f"optimizer/{name}/{place.name}", place, shard.start, shard.stop)
                return value.to(shard.main.device).view(shard.main.shape)

            if shard.has_master:
                shard.main.copy_(cut("master"))
            # Each parameter has its own step tensor: torch's AdamW advances it in place.
            state = {name: cut(name).clone() for name in _MOMENTS}
            if "step" in shard.optimizer.param_groups[0]:
                shard.optimizer.param_groups[0]["step"] = int(step)
            else:
                state["step"] = torch.tensor(float(step))
            shard.optimizer.state[shard.main] = state
    # The rule is the recipe's, which may have another one now; how far it is comes from the checkpoint.
    engine.scheduler.step(increment=checkpoint.state["schedule"]["num_steps"] - engine.scheduler.num_steps)
    _load_rank_state(checkpoint)


def load_weights(engine, checkpoint: Checkpoint) -> None:
    """Puts the model's weights and buffers alone into the model, at whatever split it is; the optimizer stays new.

    Raises:
        UserError: a tensor is there in another shape, is missing, or has no place in the model.
    """
    places = _places(engine.gpt)
    ours = {f"{_MODEL}{place.name}" for place in places.values()}
    for name in checkpoint.names():
        if name.startswith(_MODEL) and name not in ours:
            raise UserError(f"{checkpoint.path} has {name}, for which the model has no place")
    _load_model(engine, checkpoint, places)
    with torch.no_grad():
        for shard in _shards(engine.optimizer):
            if shard.has_master:
                shard.main.copy_(shard.parameter.view(-1)[shard.start : shard.stop].view(shard.main.shape))


def _load_model(engine, checkpoint: Checkpoint, places: dict[int, _Place]) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(engine.gpt):
            place = _place(places, tensor, name)
            tensor.copy_(_read(checkpoint, f"{_MODEL}{place.name}", place).view(tensor.shape))


def _read(checkpoint: Checkpoint, name: str, place: _Place, start: int = 0, stop: int | None = None) -> Tensor:
    if checkpoint.shape(name) != place.shape:
        raise UserError(f"{checkpoint.path} has {name} of shape {checkpoint.shape(name)}, the model {place.shape}")
    return checkpoint.read(name, place.offset, place.block, start, stop)


def _load_rank_state(checkpoint: Checkpoint) -> None:
    rank = torch.distributed.get_rank()
    # A rank that was not there takes the generators of rank 0: the same on every data parallel rank in Megatron.
    generators.restore(checkpoint.rank_state(rank if rank < checkpoint.num_ranks else 0)["rng"])
