"""What of a Megatron model and optimizer goes into a checkpoint, under global names and global offsets.

Megatron's ``sharded_state_dict`` serves as the index: it knows each parameter's global name, shape and offset.
Optimizer state is addressed by the parameter it belongs to and the flat range of it that this rank steps, so that it
loads at any split, sharded over data parallel ranks or not.
"""

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn

from fmoe.errors import UserError
from megatron_patch.optimizer import optimizers, renew, shards
from pretrain.checkpoint import Checkpoint, Piece
from pretrain.engine import rng
from pretrain.engine.optimizer import Moment, restored, saved

_MODEL = "model/"


@dataclass(frozen=True)
class _Place:
    """Where a piece of a local parameter lies in its global tensor. Most are one piece; the two halves of a gated
    linear map are not neighbours in the whole of it.

    Attributes:
        begin: of the piece in the flattened parameter.
        is_main: on the one rank that writes it.
        is_main_shard: on the ranks whose data parallel group writes it together, each its shard.
    """

    name: str
    shape: tuple[int, ...]
    offset: tuple[int, ...]
    block: tuple[int, ...]
    begin: int
    is_main: bool
    is_main_shard: bool

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.block)


def _places(chunks) -> dict[int, list[_Place]]:
    """Places by id of the parameter or buffer, of all chunks of the model that this rank holds."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    places = {}
    for chunk in chunks:
        for sharded in nested_values(chunk.sharded_state_dict(metadata={"dp_cp_group": group})):
            if isinstance(sharded, ShardedTensorFactory):
                pieces = [piece for piece in nested_values(sharded.build()) if isinstance(piece, ShardedTensor)]
            elif isinstance(sharded, ShardedTensor) and sharded.data is not None:
                pieces = [sharded]
            else:
                continue
            places[id(sharded.data)] = [_place_of(piece, sharded.data) for piece in pieces]
    return places


def _place_of(piece: ShardedTensor, parameter: Tensor) -> _Place:
    block = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
    replica = piece.replica_id if isinstance(piece.replica_id, tuple) else (piece.replica_id,)
    begin = piece.data.storage_offset() - parameter.storage_offset()
    return _Place(
        piece.key,
        tuple(piece.global_shape),
        tuple(piece.global_offset),
        block,
        begin,
        is_main=not any(replica),
        # The last number of Megatron's replica ids is the data parallel rank.
        is_main_shard=not any(replica[:-1]),
    )


def _tensors(gpt) -> Iterator[tuple[str, Tensor]]:
    """What makes the model: its parameters and its persistent buffers (a gate's bias, a hash gate's table)."""
    yield from gpt.named_parameters()
    for prefix, module in gpt.named_modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield f"{prefix}.{name}", buffer


def pieces(engine) -> Iterator[Piece]:
    """What this rank writes of parameters, buffers, masters and moments."""
    engine.sync_parameters()
    places = _places(engine.chunks)
    for name, tensor in _all_tensors(engine.chunks):
        for place in _place(places, tensor, name):
            if place.is_main:
                data = tensor.detach().reshape(-1)[place.begin : place.end].view(place.block)
                yield Piece(f"{_MODEL}{place.name}", place.shape, place.offset, place.block, data)
    for shard in shards(engine.optimizer):
        values = list(saved(shard))
        if shard.has_master:
            values.append((Moment("master"), shard.main.detach()))
        at = _place(places, shard.parameter, "a parameter of the optimizer")
        for moment, value in values:
            if moment.axis is not None:
                yield from _factor_pieces(moment, value, shard.main.shape, at)
                continue
            for place in at:
                start, stop = max(shard.start, place.begin), min(shard.stop, place.end)
                if start >= stop or not (place.is_main_shard if shard.is_sharded else place.is_main):
                    continue
                yield Piece(
                    f"optimizer/{moment.name}/{place.name}",
                    place.shape,
                    place.offset,
                    place.block,
                    value.reshape(-1)[start - shard.start : stop - shard.start],
                    start - place.begin,
                    stop - place.begin,
                )


def _factor_pieces(moment: Moment, value: Tensor, shape: Sequence[int], places: list[_Place]) -> Iterator[Piece]:
    for place, view in _factor_views(moment, value, shape, places):
        if place.is_main:
            yield Piece(f"optimizer/{moment.name}/{place.name}", place.shape, place.offset, place.block, view)


def _factor_views(
    moment: Moment, value: Tensor, shape: Sequence[int], places: list[_Place]
) -> Iterator[tuple[_Place, Tensor]]:
    """Of a moment of a parameter that has one element along an axis: where it lies, and its part there. Pieces of the
    parameter that differ along that axis alone have one part between them.
    """
    seen = set()
    for place in places:
        of = replace(
            place,
            shape=moment.along(place.shape, 1),
            offset=moment.along(place.offset, 0),
            block=moment.along(place.block, 1),
        )
        if of.offset in seen:
            continue
        seen.add(of.offset)
        whole = value.view((1,) * (len(place.block) - value.dim()) + tuple(value.shape))
        full = (1,) * (len(place.block) - len(shape)) + tuple(shape)
        corner = moment.along([int(i) for i in np.unravel_index(place.begin, full)], 0)
        yield of, whole[tuple(slice(c, c + n) for c, n in zip(corner, of.block, strict=True))]


def _all_tensors(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    for chunk in chunks:
        yield from _tensors(chunk)


def _place(places: dict[int, list[_Place]], parameter: Tensor, name: str) -> list[_Place]:
    if id(parameter) not in places:
        raise RuntimeError(f"{name} of shape {tuple(parameter.shape)} is not in the model's sharded_state_dict")
    return places[id(parameter)]


def optimizer_state(engine) -> dict[str, Any]:
    """Of the optimizer, what is one number for all parameters."""
    steps = {
        float(state["step"])
        for part in optimizers(engine.optimizer)
        for state in part.optimizer.state.values()
        if "step" in state
    }
    steps |= {
        float(g["step"]) for part in optimizers(engine.optimizer) for g in part.optimizer.param_groups if "step" in g
    }
    if len(steps) > 1:
        raise RuntimeError(f"parameters were stepped {sorted(steps)} times; one number is saved for all of them")
    found: dict[str, Any] = {"step": steps.pop() if steps else 0.0}
    if engine.grad_scaler is not None:
        found["loss_scale"] = engine.grad_scaler.state_dict()
    return found


def schedule_state(engine) -> dict[str, Any]:
    """Of the learning rate: how far it is, and by which rule."""
    return engine.scheduler.state_dict()


def rank_state() -> dict[str, Any]:
    """Of this rank alone: its random number generators."""
    return {"rng": rng.states()}


def load(engine, checkpoint: Checkpoint) -> None:
    """Puts a checkpoint into the model and the optimizer, at whatever split they are.

    Raises:
        UserError: the checkpoint lacks a tensor or has it in another shape.
    """
    places = _places(engine.chunks)
    step = checkpoint.state["optimizer"]["step"]
    _load_model(engine.chunks, checkpoint, places)
    with torch.no_grad():
        for shard in shards(engine.optimizer):
            at = _place(places, shard.parameter, "a parameter of the optimizer")

            def cut(moment: Moment, at=at, shard=shard) -> Tensor:
                if moment.axis is None:
                    return _read(checkpoint, f"optimizer/{moment.name}/", at, shard.start, shard.stop)
                value = torch.empty(moment.along(shard.main.shape, 1), dtype=torch.float32, device="cpu")
                for place, view in _factor_views(moment, value, shard.main.shape, at):
                    part = _read(checkpoint, f"optimizer/{moment.name}/", [replace(place, begin=0)], 0, view.numel())
                    view.copy_(part.view(view.shape))
                return value

            if shard.has_master:
                shard.main.copy_(cut(Moment("master")).view(shard.main.shape))
            renew(shard, restored(shard, step, cut))
    if engine.grad_scaler is not None:
        engine.grad_scaler.load_state_dict(checkpoint.state["optimizer"]["loss_scale"])
    # The rule is the recipe's, which may have another one now; how far it is comes from the checkpoint.
    engine.scheduler.step(increment=checkpoint.state["schedule"]["num_steps"] - engine.scheduler.num_steps)
    _load_rank_state(engine, checkpoint)


def load_weights(engine, checkpoint: Checkpoint) -> None:
    """Puts the model's weights and buffers alone into the model, at whatever split it is; the optimizer stays new.

    Raises:
        UserError: a tensor is there in another shape, is missing, or has no place in the model.
    """
    load_model(engine.chunks, checkpoint, engine.processes.device)
    with torch.no_grad():
        for shard in shards(engine.optimizer):
            if shard.has_master:
                shard.main.copy_(shard.parameter.view(-1)[shard.start : shard.stop].view(shard.main.shape))
            renew(shard)


def load_model(chunks: Sequence[nn.Module], checkpoint: Checkpoint, device: torch.device) -> None:
    """The same of a model without an optimizer. Collective.

    Args:
        chunks: this rank's parts of the model.
        device: of the process group.
    """
    places = _places(chunks)
    ours = {f"{_MODEL}{place.name}" for at in places.values() for place in at}
    theirs = [name for name in checkpoint.names() if name.startswith(_MODEL)]
    known = torch.tensor([name in ours for name in theirs], dtype=torch.int32, device=device)
    dist.all_reduce(known, dist.ReduceOp.MAX)  # on any stage of the pipeline
    for name, is_known in zip(theirs, known.tolist(), strict=True):
        if not is_known:
            raise UserError(f"{checkpoint.path} has {name}, for which the model has no place")
    _load_model(chunks, checkpoint, places)


def _load_model(chunks: Sequence[nn.Module], checkpoint: Checkpoint, places: dict[int, list[_Place]]) -> None:
    with torch.no_grad():
        for name, tensor in _all_tensors(chunks):
            tensor.copy_(_read(checkpoint, _MODEL, _place(places, tensor, name), 0, tensor.numel()).view(tensor.shape))


def _read(checkpoint: Checkpoint, prefix: str, places: list[_Place], start: int, stop: int) -> Tensor:
    """The range of a flattened parameter that lies at ``places``, in their order."""
    parts = []
    for place in places:
        name = f"{prefix}{place.name}"
        if checkpoint.shape(name) != place.shape:
            raise UserError(f"{checkpoint.path} has {name} of shape {checkpoint.shape(name)}, the model {place.shape}")
        first, last = max(start, place.begin), min(stop, place.end)
        if first < last:
            values = checkpoint.read(name, place.offset, place.block, first - place.begin, last - place.begin)
            parts.append(values.reshape(-1))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")


def _load_rank_state(engine, checkpoint: Checkpoint) -> None:
    """The generators of the rank that held the same part of the model and, if there was one, of the data."""
    saved, here = checkpoint.state.get("recipe", {}).get("parallel", {}), engine.recipe.parallel
    parts = {name: (saved.get(name, 1), getattr(here, name)) for name in ("tensor", "context", "pipeline")}
    if any(there != now for there, now in parts.values()):
        # Megatron's own generators differ between parts of the model: those of other parts are nothing to go on with.
        states = checkpoint.rank_state(0)["rng"]
        rng.restore({name: state for name, state in states.items() if name != "megatron"})
        return
    inner, stages = here.tensor * here.context, here.pipeline
    data, tensor = divmod(dist.get_rank() % (dist.get_world_size() // stages), inner)
    per_stage = checkpoint.num_ranks // stages
    data = data if data * inner < per_stage else 0
    rank = parallel_state.get_pipeline_model_parallel_rank() * per_stage + data * inner + tensor
    rng.restore(checkpoint.rank_state(rank)["rng"])
