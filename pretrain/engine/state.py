"""State of a Megatron model and optimizer in a checkpoint, under global names and global offsets.

Megatron's ``sharded_state_dict`` serves as the index: it has each parameter's global name, shape and offset. Optimizer
state is stored under its parameter's name and the flat range of the parameter that this rank updates. It therefore
loads at any parallel split, sharded over data parallel ranks or not.
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
from megatron_patch.optimizer import Shard, optimizers, renew, shards
from pretrain.checkpoint import Checkpoint, Piece
from pretrain.engine import rng
from pretrain.engine.engine import Engine
from pretrain.engine.optimizer import StateTensor, restored_state, saved_state

_MODEL, _OPTIMIZER, _MEMORY = "model/", "optimizer/", "memory/"  # prefixes of tensor names in a checkpoint


@dataclass(frozen=True)
class ShardLocation:
    """Position of a piece of a local parameter in its global tensor.

    Most parameters are one piece. A gated linear layer is two: its halves are not adjacent in the global tensor.

    Attributes:
        name, shape: name and shape of the global tensor.
        offset, block: position and shape of the piece in the global tensor.
        begin: offset of the piece in the flattened parameter.
        is_main: True on the one rank that writes the piece.
        is_main_shard: True on the ranks of the data parallel group that writes the piece's sharded optimizer state.
            Each rank writes its shard.
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

    def piece(self, prefix: str, data: Tensor, start: int = 0, stop: int | None = None) -> Piece:
        """Return the `Piece` at this location, with the elements ``data``.

        The piece is the whole block, or the range [start, stop) of the flattened block.
        """
        return Piece(f"{prefix}{self.name}", self.shape, self.offset, self.block, data, start, stop)


def _locations(chunks) -> dict[int, list[ShardLocation]]:
    """Return the locations of each parameter and buffer of the chunks, by its ``id``."""
    group = parallel_state.get_data_parallel_group(with_context_parallel=True)
    locations = {}
    for chunk in chunks:
        for sharded in nested_values(chunk.sharded_state_dict(metadata={"dp_cp_group": group})):
            if isinstance(sharded, ShardedTensorFactory):
                pieces = [piece for piece in nested_values(sharded.build()) if isinstance(piece, ShardedTensor)]
            elif isinstance(sharded, ShardedTensor) and sharded.data is not None:
                pieces = [sharded]
            else:
                continue
            locations[id(sharded.data)] = [_location_of(piece, sharded.data) for piece in pieces]
    return locations


def _location_of(piece: ShardedTensor, parameter: Tensor) -> ShardLocation:
    block = (1,) * piece.prepend_axis_num + tuple(piece.local_shape)
    replica = piece.replica_id if isinstance(piece.replica_id, tuple) else (piece.replica_id,)
    begin = piece.data.storage_offset() - parameter.storage_offset()
    return ShardLocation(
        piece.key,
        tuple(piece.global_shape),
        tuple(piece.global_offset),
        block,
        begin,
        is_main=not any(replica),
        # The last number of Megatron's replica ids is the data parallel rank.
        is_main_shard=not any(replica[:-1]),
    )


def _tensors(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each parameter and persistent buffer of the chunks."""
    for chunk in chunks:
        yield from chunk.named_parameters()
        for prefix, module in chunk.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}", buffer


def pieces(engine: Engine) -> Iterator[Piece]:
    """Yield this rank's pieces of a checkpoint: parameters, buffers, master weights, optimizer state and
    Transformer-XL's memory."""
    engine.sync_parameters()
    locations = _locations(engine.chunks)
    for name, tensor in _tensors(engine.chunks):
        for location in _locations_of(locations, tensor, name):
            if location.is_main:
                data = tensor.detach().reshape(-1)[location.begin : location.end].view(location.block)
                yield location.piece(_MODEL, data)
    for shard in _shards_with_elements(engine):
        values = list(saved_state(shard))
        if shard.has_master:
            values.append((StateTensor("master"), shard.main.detach()))
        at = _locations_of(locations, shard.parameter, "a parameter of the optimizer")
        for entry, value in values:
            if entry.axis is not None:
                for location, view in _factor_views(entry, value, shard.main.shape, at):
                    if location.is_main:
                        yield location.piece(f"{_OPTIMIZER}{entry.name}/", view)
                continue
            for location in at:
                start, stop = max(shard.start, location.begin), min(shard.stop, location.end)
                if start >= stop or not (location.is_main_shard if shard.is_sharded else location.is_main):
                    continue
                data = value.reshape(-1)[start - shard.start : stop - shard.start]
                yield location.piece(f"{_OPTIMIZER}{entry.name}/", data, start - location.begin, stop - location.begin)
    if parallel_state.get_tensor_model_parallel_rank() == 0:  # the ranks of the group have the same memory
        yield from _memory_pieces(engine)


def _shards_with_elements(engine: Engine) -> Iterator[Shard]:
    """Yield this rank's shards whose optimizer state is saved and loaded: all but those of empty parameters."""
    yield from (shard for shard in shards(engine.optimizer) if shard.start < shard.stop)


def _memory_pieces(engine: Engine) -> Iterator[Piece]:
    """Yield the hidden states of this rank's Transformer-XL memory by layer, [streams, tokens, hidden_size]."""
    for memory in engine.memories:
        for stream, states in memory.states.items():
            for layer, state in zip(memory.layers, states, strict=True):
                block = state.transpose(0, 1)
                shape, offset = (memory.streams, *block.shape[1:]), (stream, 0, 0)
                yield Piece(f"{_MEMORY}layers.{layer.layer_number}", shape, offset, tuple(block.shape), block)


def _load_memories(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load this rank's Transformer-XL memory; clear it if the checkpoint has none."""
    size, names = engine.recipe.train.micro_batch, set(checkpoint.names())
    for memory in engine.memories:
        memory.states.clear()
        layers = [f"{_MEMORY}layers.{layer.layer_number}" for layer in memory.layers]
        for stream in engine.begins(memory.streams) if names.issuperset(layers) else ():
            memory.states[stream] = [
                checkpoint.read(name, (stream, 0, 0), block)
                .view(block)
                .transpose(0, 1)
                .to(engine.processes.device, copy=True)
                for name in layers
                for block in [(size, *checkpoint.shape(name)[1:])]
            ]


def _factor_views(
    entry: StateTensor, value: Tensor, shape: Sequence[int], locations: list[ShardLocation]
) -> Iterator[tuple[ShardLocation, Tensor]]:
    """Yield the location and value of each part of a state tensor whose size along ``entry.axis`` is 1."""
    seen = set()
    for location in locations:
        of = replace(
            location,
            shape=entry.along(location.shape, 1),
            offset=entry.along(location.offset, 0),
            block=entry.along(location.block, 1),
        )
        if of.offset in seen:  # pieces of the parameter that differ only along the axis share a location
            continue
        seen.add(of.offset)
        whole = value.view((1,) * (len(location.block) - value.dim()) + tuple(value.shape))
        full = (1,) * (len(location.block) - len(shape)) + tuple(shape)
        corner = entry.along([int(i) for i in np.unravel_index(location.begin, full)], 0)
        yield of, whole[tuple(slice(c, c + n) for c, n in zip(corner, of.block, strict=True))]


def tensor_layouts(chunks: Sequence[nn.Module]) -> dict[str, tuple[tuple[int, ...], torch.dtype]]:
    """Return the global shape and the dtype of each parameter and persistent buffer of a model's chunks.

    The keys are the names in a checkpoint without the prefix ``model/``.
    """
    locations = _locations(chunks)
    found: dict[str, tuple[tuple[int, ...], torch.dtype]] = {}
    for name, tensor in _tensors(chunks):
        found |= {at.name: (at.shape, tensor.dtype) for at in _locations_of(locations, tensor, name)}
    return found


def _locations_of(locations: dict[int, list[ShardLocation]], parameter: Tensor, name: str) -> list[ShardLocation]:
    if id(parameter) not in locations:
        raise RuntimeError(f"{name} of shape {tuple(parameter.shape)} is not in the model's sharded_state_dict")
    return locations[id(parameter)]


def optimizer_state(engine: Engine) -> dict[str, Any]:
    """Return the optimizer state that is common to all parameters: the number of steps, and the loss scale."""
    steps = {
        float(state["step"])
        for part in optimizers(engine.optimizer)
        for tensor, state in part.optimizer.state.items()
        if "step" in state and tensor.numel()  # Adafactor does not step an empty tensor
    }
    steps |= {
        float(g["step"]) for part in optimizers(engine.optimizer) for g in part.optimizer.param_groups if "step" in g
    }
    if len(steps) > 1:
        raise RuntimeError(f"parameters have different step counts {sorted(steps)}; only one is saved for all of them")
    found: dict[str, Any] = {"step": steps.pop() if steps else 0.0}
    if engine.grad_scaler is not None:
        found["loss_scale"] = engine.grad_scaler.state_dict()
    return found


def schedule_state(engine: Engine) -> dict[str, Any]:
    """Return the state of the learning rate schedule: its step and its settings."""
    return engine.scheduler.state_dict()


def rank_state() -> dict[str, Any]:
    """Return the state of this rank alone: its random number generators."""
    return {"rng": rng.states()}


def load(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restore the whole state of a run into the engine.

    The state is the model, the optimizer, the step of the learning rate schedule, Transformer-XL's memory and the
    random generators. The checkpoint may come from a run with another parallel split.

    Raises:
        UserError: the checkpoint lacks a tensor, or one differs in shape.
    """
    locations = _locations(engine.chunks)
    step = checkpoint.state["optimizer"]["step"]
    _load_model(engine.chunks, checkpoint, locations)
    # SGD without momentum has no buffers: a resumed run's momentum begins with zeros, as a new run's.
    then = checkpoint.state.get("recipe", {}).get("optimizer", {})
    had_no_momentum = then.get("name") == "sgd" and then.get("momentum") == 0
    with torch.no_grad():
        for shard in _shards_with_elements(engine):
            at = _locations_of(locations, shard.parameter, "a parameter of the optimizer")

            def cut(entry: StateTensor, at=at, shard=shard) -> Tensor:
                if had_no_momentum and entry.name == "momentum_buffer":
                    return torch.zeros_like(shard.main, device="cpu")
                prefix = f"{_OPTIMIZER}{entry.name}/"
                if entry.axis is None:
                    return _read(checkpoint, prefix, at, shard.start, shard.stop)
                value = torch.empty(entry.along(shard.main.shape, 1), dtype=torch.float32, device="cpu")
                for location, view in _factor_views(entry, value, shard.main.shape, at):
                    part = _read(checkpoint, prefix, [replace(location, begin=0)], 0, view.numel())
                    view.copy_(part.view(view.shape))
                return value

            if shard.has_master:
                shard.main.copy_(cut(StateTensor("master")).view(shard.main.shape))
            renew(shard, restored_state(shard, step, cut))
    if engine.grad_scaler is not None:
        engine.grad_scaler.load_state_dict(checkpoint.state["optimizer"]["loss_scale"])
    # The rule is the recipe's, which may have changed; the progress comes from the checkpoint.
    engine.scheduler.step(increment=checkpoint.state["schedule"]["num_steps"] - engine.scheduler.num_steps)
    _load_memories(engine, checkpoint)
    _load_rank_state(engine, checkpoint)


def load_weights(engine: Engine, checkpoint: Checkpoint) -> None:
    """Load only weights and buffers into the engine's model. The optimizer starts anew.

    The checkpoint may come from a run with another parallel split.

    Raises:
        UserError: a tensor of the model is missing or differs in shape, or the checkpoint has one that the model lacks.
    """
    load_model(engine.chunks, checkpoint, engine.processes.device)
    with torch.no_grad():
        for shard in shards(engine.optimizer):
            if shard.has_master:
                shard.main.copy_(shard.parameter.view(-1)[shard.start : shard.stop].view(shard.main.shape))
            renew(shard)


def load_model(chunks: Sequence[nn.Module], checkpoint: Checkpoint, device: torch.device) -> None:
    """Load the weights and buffers of a model without an optimizer. Collective.

    Args:
        chunks: this rank's chunks of the model.
        device: device of the process group.

    Raises:
        UserError: as for `load_weights`.
    """
    locations = _locations(chunks)
    ours = {f"{_MODEL}{location.name}" for at in locations.values() for location in at}
    theirs = [name for name in checkpoint.names() if name.startswith(_MODEL)]
    known = torch.tensor([name in ours for name in theirs], dtype=torch.int32, device=device)
    dist.all_reduce(known, dist.ReduceOp.MAX)  # on any stage of the pipeline
    for name, is_known in zip(theirs, known.tolist(), strict=True):
        if not is_known:
            raise UserError(f"{checkpoint.path} has the tensor {name}, which is not in the model")
    _load_model(chunks, checkpoint, locations)


def _load_model(chunks: Sequence[nn.Module], checkpoint: Checkpoint, locations: dict[int, list[ShardLocation]]) -> None:
    with torch.no_grad():
        for name, tensor in _tensors(chunks):
            tensor.copy_(
                _read(checkpoint, _MODEL, _locations_of(locations, tensor, name), 0, tensor.numel()).view(tensor.shape)
            )


def _read(checkpoint: Checkpoint, prefix: str, locations: list[ShardLocation], start: int, stop: int) -> Tensor:
    """Read the elements [start, stop) of a flattened parameter, whose pieces are at ``locations``."""
    parts = []
    for location in locations:
        name = f"{prefix}{location.name}"
        if checkpoint.shape(name) != location.shape:
            raise UserError(f"{checkpoint.path}: {name} has shape {checkpoint.shape(name)}, expected {location.shape}")
        first, last = max(start, location.begin), min(stop, location.end)
        if first < last:
            values = checkpoint.read(
                name, location.offset, location.block, first - location.begin, last - location.begin
            )
            parts.append(values.reshape(-1))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")


def _load_rank_state(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restore the random generators of this rank."""
    saved, here = checkpoint.state.get("recipe", {}).get("parallel", {}), engine.recipe.parallel
    parts = {name: (saved.get(name, 1), getattr(here, name)) for name in ("tensor", "context", "pipeline")}
    if any(there != now for there, now in parts.values()):
        # Megatron's generators differ between parts of the model: those of other parts must not be reused.
        states = checkpoint.rank_state(0)["rng"]
        rng.restore({name: state for name, state in states.items() if name != "megatron"})
        return
    # The saved rank with the same part of the model and of the data.
    inner, stages = here.tensor * here.context, here.pipeline
    data, tensor = divmod(dist.get_rank() % (dist.get_world_size() // stages), inner)
    per_stage = checkpoint.num_ranks // stages
    data = data if data * inner < per_stage else 0  # no rank had this part of the data: take the first part's
    rank = parallel_state.get_pipeline_model_parallel_rank() * per_stage + data * inner + tensor
    rng.restore(checkpoint.rank_state(rank)["rng"])
