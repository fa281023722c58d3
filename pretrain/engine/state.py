"""State of a Megatron model and optimizer in a checkpoint, under global names and global offsets.

Optimizer state is stored under its parameter's name and the flat range of the parameter that this rank updates. It
therefore loads at any parallel split, sharded over data parallel ranks or not.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from fmoe.errors import UserError
from fmoe.parallel.compression import Memory
from megatron_patch.fsdp import local_slices
from megatron_patch.optimizer import Shard, optimizers, renew, shards
from pretrain.checkpoint import Checkpoint, TensorPiece
from pretrain.engine import compression, rng, sync
from pretrain.engine.engine import Engine
from pretrain.engine.locations import ShardLocation, ShardLocations, named_tensors
from pretrain.engine.optimizer_state import StateTensor, restored_state, saved_state
from pretrain.engine.sync import RareSync

# Prefixes of tensor names in a checkpoint.
_MODEL = "model/"
_OPTIMIZER = "optimizer/"


# Saving


def pieces(engine: Engine) -> Iterator[TensorPiece]:
    """Yield this rank's pieces of a checkpoint: parameters, buffers, master weights, optimizer state and memories."""
    engine.sync_parameters()
    locations = ShardLocations(engine.chunks)
    for _, tensor in named_tensors(engine.chunks):
        if isinstance(tensor, DTensor):
            for values, start in local_slices(tensor):
                writers = [place for place in locations.of(tensor) if place.is_main_shard]
                yield from _slice_pieces(_MODEL, values.to(engine.config.params_dtype), start, writers)
            continue
        for location in locations.of(tensor):
            if location.is_main:
                data = tensor.detach().reshape(-1)[location.begin : location.end].view(location.block)
                yield _piece(_MODEL, location, data)
    for shard in _shards_with_elements(engine):
        yield from _optimizer_pieces(shard, locations.of(shard.parameter))
        rank = 0 if engine.sync is None else sync.group_of(shard).rank()
        if rank:  # the first rank's are those of all, for other splits
            yield from _optimizer_pieces(shard, locations.of(shard.parameter), rank)
    for memory in engine.memories:
        yield from memory.pieces()
    saved = list(compression.saved_memories(engine.compressors))
    if engine.sync is not None:
        saved += [(f"sync/{held.name}/", held) for held in engine.sync.memories() if held.is_saved]
    for prefix, held in saved:
        writers = [place for place in locations.of(held.parameter) if place.is_main_shard]
        yield from _slice_pieces(prefix, held.values, held.start, writers)


def _piece(prefix: str, location: ShardLocation, data: Tensor, start: int = 0, stop: int | None = None) -> TensorPiece:
    """Return the `TensorPiece` with the elements ``data``: a location's block, or a range of the flattened block."""
    return TensorPiece(f"{prefix}{location.name}", location.shape, location.offset, location.block, data, start, stop)


def _shards_with_elements(engine: Engine) -> Iterator[Shard]:
    """Yield this rank's shards whose optimizer state is saved and loaded: all but those of empty parameters."""
    yield from (shard for shard in shards(engine.optimizer) if shard.start < shard.stop)


def _optimizer_pieces(shard: Shard, locations: list[ShardLocation], rank: int = 0) -> Iterator[TensorPiece]:
    """Yield the pieces of a shard's state; those of a rank with other values than rank 0, if ``rank`` is not 0."""
    tensors = list(saved_state(shard))
    if shard.has_master or rank:
        tensors.append((StateTensor("master"), shard.main.detach()))
    for entry, value in tensors:
        prefix = _prefix(entry, rank)
        writers = [p for p in locations if (p.is_main_shard if shard.is_sharded or rank else p.is_main)]
        if entry.axes:
            if shard.start == 0:  # every rank with a shard has the whole tensor
                for location, view in _factor_views(entry, value, shard.parameter.shape, writers):
                    yield _piece(prefix, location, view)
            continue
        yield from _slice_pieces(prefix, value, shard.start, writers)


def _prefix(entry: StateTensor, rank: int) -> str:
    return f"{_OPTIMIZER}{entry.name}@{rank}/" if rank else f"{_OPTIMIZER}{entry.name}/"


def _slice_pieces(prefix: str, values: Tensor, begin: int, locations: list[ShardLocation]) -> Iterator[TensorPiece]:
    """Yield the pieces of ``values``, a parameter's elements from offset ``begin`` on, at each of ``locations``."""
    flat = values.reshape(-1)
    for location in locations:
        start = max(begin, location.begin)
        stop = min(begin + flat.numel(), location.end)
        if start < stop:
            data = flat[start - begin : stop - begin]
            yield _piece(prefix, location, data, start - location.begin, stop - location.begin)


def _factor_views(
    entry: StateTensor, value: Tensor, shape: Sequence[int], locations: list[ShardLocation]
) -> Iterator[tuple[ShardLocation, Tensor]]:
    """Yield the location and value of each part of a state tensor whose size along ``entry.axes`` is 1."""
    offsets = set()
    for location in locations:
        reduced = replace(
            location,
            shape=entry.along(location.shape, 1),
            offset=entry.along(location.offset, 0),
            block=entry.along(location.block, 1),
        )
        if reduced.offset in offsets:  # pieces of the parameter that differ only along the axis share a location
            continue
        offsets.add(reduced.offset)
        axes = len(location.block)
        whole = value.view((1,) * (axes - value.dim()) + tuple(value.shape))
        parameter_shape = (1,) * (axes - len(shape)) + tuple(shape)
        corner = entry.along([int(i) for i in np.unravel_index(location.begin, parameter_shape)], 0)
        yield reduced, whole[tuple(slice(c, c + n) for c, n in zip(corner, reduced.block, strict=True))]


def optimizer_state(engine: Engine) -> dict[str, Any]:
    """Return the optimizer state that is common to all parameters: the number of steps, and the loss scale."""
    steps = set()
    for part in optimizers(engine.optimizer):
        for tensor, state in part.optimizer.state.items():
            if "step" in state and tensor.numel():  # Adafactor does not step an empty tensor
                steps.add(float(state["step"]))
        steps.update(float(group["step"]) for group in part.optimizer.param_groups if "step" in group)
    if len(steps) > 1:
        raise RuntimeError(f"parameters have different step counts {sorted(steps)}; only one is saved for all of them")
    common: dict[str, Any] = {"step": steps.pop() if steps else 0.0}
    if engine.grad_scaler is not None:
        common["loss_scale"] = engine.grad_scaler.state_dict()
    return common


def schedule_state(engine: Engine) -> dict[str, Any]:
    """Return the state of the learning rate schedule: its step and its settings."""
    return engine.scheduler.state_dict()


def rank_state(engine: Engine | None = None) -> dict[str, Any]:
    """Return the state of this rank alone: its random number generators, and what its compressors count."""
    state = {"rng": rng.states()}
    if engine is not None and engine.compressors:
        state["compression"] = compression.numbers(engine.recipe, engine.compressors)
    if engine is not None and engine.sync is not None:
        state["sync"] = engine.sync.numbers()
    return state


# Loading


def load(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restore the whole state of a run into the engine.

    The state is the model, the optimizer, the step of the learning rate schedule, the model's memories and the random
    generators. The checkpoint may come from a run with another parallel split.

    Raises:
        UserError: the checkpoint lacks a tensor, or one differs in shape.
    """
    locations = ShardLocations(engine.chunks)
    optimizer = checkpoint.state["optimizer"]
    _load_model(engine.chunks, checkpoint, locations)
    with torch.no_grad():
        for shard in _shards_with_elements(engine):
            read = partial(_read_state, checkpoint, shard, locations.of(shard.parameter))
            if shard.has_master:
                shard.main.copy_(read(StateTensor("master")).view(shard.main.shape))
            renew(shard, restored_state(shard, optimizer["step"], read))
    if engine.grad_scaler is not None:
        engine.grad_scaler.load_state_dict(optimizer["loss_scale"])
    # The rule is the recipe's, which may have changed; the progress comes from the checkpoint.
    engine.scheduler.step(increment=checkpoint.state["schedule"]["num_steps"] - engine.scheduler.num_steps)
    for memory in engine.memories:
        streams = engine.begins(memory.streams)
        memory.load(checkpoint, streams, engine.recipe.train.micro_batch, engine.processes.device)
    _load_compressors(engine, checkpoint, locations)
    if engine.sync is not None:
        _load_sync(engine, engine.sync, checkpoint, locations)
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
            if shard.has_master and not isinstance(shard.parameter, DTensor):
                shard.main.copy_(shard.parameter.view(-1)[shard.start : shard.stop].view(shard.main.shape))
            renew(shard)
    if engine.sync is not None:
        engine.sync.restart(0)


def load_model(chunks: Sequence[nn.Module], checkpoint: Checkpoint, device: torch.device) -> None:
    """Load the weights and buffers of a model without an optimizer. Collective.

    Args:
        chunks: this rank's chunks of the model.
        device: device of the process group.

    Raises:
        UserError: as for `load_weights`.
    """
    locations = ShardLocations(chunks)
    names = [name for name in checkpoint.names() if name.startswith(_MODEL)]
    is_used = [name.removeprefix(_MODEL) in locations.names for name in names]
    on_any_stage = torch.tensor(is_used, dtype=torch.int32, device=device)
    dist.all_reduce(on_any_stage, dist.ReduceOp.MAX)
    for name, is_known in zip(names, on_any_stage.tolist(), strict=True):
        if not is_known:
            raise UserError(f"{checkpoint.path} has the tensor {name}, which is not in the model")
    _load_model(chunks, checkpoint, locations)


@torch.no_grad()
def _load_model(chunks: Sequence[nn.Module], checkpoint: Checkpoint, locations: ShardLocations) -> None:
    for _, tensor in named_tensors(chunks):
        for part, start in local_slices(tensor):
            values = _read(checkpoint, _MODEL, locations.of(tensor), start, start + part.numel())
            part.copy_(values.view(part.shape))


@torch.no_grad()
def _load_compressors(engine: Engine, checkpoint: Checkpoint, locations: ShardLocations) -> None:
    """Restore what compressors remember. A checkpoint of another compressor, or of none, restores nothing.

    Memories of single ranks, of another number of ranks, become their mean, which is what all ranks together have not
    sent.
    """
    saved_numbers = checkpoint.rank_state(_saved_rank(engine, checkpoint)).get("compression")
    if not engine.compressors or not saved_numbers or not compression.is_same_method(engine.recipe, saved_numbers):
        return
    names = set(checkpoint.names())
    for compressor in engine.compressors:
        for memory in compressor.memories():
            ranks = [""] if memory.is_shared else [f"@{rank}" for rank in range(checkpoint.num_ranks)]
            prefixes = [f"compressor/{memory.name}{k}/" for k in ranks]
            saved = _saved_memories(checkpoint, names, prefixes, memory, locations)
            if memory.is_shared or len(saved) != compressor.group.size():
                values = torch.stack(saved).mean(0) if saved else memory.values
            else:
                values = saved[compressor.group.rank()]
            memory.values.copy_(values)
    compression.set_numbers(engine.recipe, engine.compressors, saved_numbers)


@torch.no_grad()
def _load_sync(engine: Engine, rare: RareSync, checkpoint: Checkpoint, locations: ShardLocations) -> None:
    """Restore what ranks have between averages of the parameters, after the first rank's state was loaded.

    At another number of ranks, all go on with the mean of the parameters, and with the first rank's optimizer state.
    """
    names = set(checkpoint.names())
    saved = checkpoint.rank_state(_saved_rank(engine, checkpoint)).get("sync")
    for shard in _shards_with_elements(engine):
        places = locations.of(shard.parameter)
        master = StateTensor("master")
        ranks = [k for k in range(1, checkpoint.num_ranks) if f"{_prefix(master, k)}{places[0].name}" in names]
        read = partial(_read_state, checkpoint, shard, places)
        group = sync.group_of(shard)
        rank = group.rank()
        if len(ranks) + 1 == group.size():
            if rank:
                shard.main.copy_(read(master, rank=rank).view(shard.main.shape))
                renew(shard, restored_state(shard, checkpoint.state["optimizer"]["step"], partial(read, rank=rank)))
        elif ranks:
            others = [read(master, rank=k).view(shard.main.shape) for k in ranks]
            shard.main.copy_(torch.stack([shard.main.cpu(), *others]).mean(0))
        shard.parameter.copy_(shard.main.view(shard.parameter.shape))
    for memory in rare.memories():
        saved_values = _saved_memories(checkpoint, names, [f"sync/{memory.name}/"], memory, locations)
        if saved_values:
            memory.values.copy_(saved_values[0])
        elif memory.name == "base":  # a run that averaged gradients: parameters are equal on all ranks
            rare.restart(checkpoint.step)
    if saved:
        rare.set_numbers(saved)


def _saved_memories(
    checkpoint: Checkpoint, names: set[str], prefixes: list[str], memory: Memory, locations: ShardLocations
) -> list[Tensor]:
    """Return the values of a memory under those of the prefixes that the checkpoint's ``names`` have."""
    places = locations.of(memory.parameter)
    stop = memory.start + memory.values.numel()
    return [
        _read(checkpoint, prefix, places, memory.start, stop)
        for prefix in prefixes
        if f"{prefix}{places[0].name}" in names
    ]


def _read_state(
    checkpoint: Checkpoint, shard: Shard, locations: list[ShardLocation], entry: StateTensor, rank: int = 0
) -> Tensor:
    """Read a shard's values of a state tensor, or those of another rank (`_optimizer_pieces`)."""
    if entry.name == "momentum_buffer":
        # SGD without momentum has no buffers: a resumed run's momentum begins with zeros, as a new run's.
        options = checkpoint.state.get("recipe", {}).get("optimizer", {})
        if options.get("name") == "sgd" and options.get("momentum") == 0:
            return torch.zeros_like(shard.main, device="cpu")
    prefix = _prefix(entry, rank)
    if not entry.axes:
        return _read(checkpoint, prefix, locations, shard.start, shard.stop)
    value = torch.empty(entry.shape(shard), dtype=torch.float32, device="cpu")
    for location, view in _factor_views(entry, value, shard.parameter.shape, locations):
        part = _read(checkpoint, prefix, [replace(location, begin=0)], 0, view.numel())
        view.copy_(part.view(view.shape))
    return value


def _read(checkpoint: Checkpoint, prefix: str, locations: list[ShardLocation], start: int, stop: int) -> Tensor:
    """Read the elements [start, stop) of a flattened parameter, whose pieces are at ``locations``."""
    parts = []
    for location in locations:
        name = f"{prefix}{location.name}"
        if checkpoint.shape(name) != location.shape:
            raise UserError(f"{checkpoint.path}: {name} has shape {checkpoint.shape(name)}, expected {location.shape}")
        first = max(start, location.begin) - location.begin
        last = min(stop, location.end) - location.begin
        if first < last:
            parts.append(checkpoint.read(name, location.offset, location.block, first, last).reshape(-1))
    return torch.cat(parts) if parts else torch.empty(0, dtype=torch.float32, device="cpu")


def _load_rank_state(engine: Engine, checkpoint: Checkpoint) -> None:
    """Restore the random generators of this rank."""
    parallel = engine.recipe.parallel
    saved = checkpoint.state.get("recipe", {}).get("parallel", {})
    if any(saved.get(name, 1) != getattr(parallel, name) for name in ("tensor", "context", "pipeline")):
        # Megatron's generators differ between parts of the model: those of other parts must not be reused.
        states = checkpoint.rank_state(0)["rng"]
        rng.restore({name: state for name, state in states.items() if name != "megatron"})
        return
    rng.restore(checkpoint.rank_state(_saved_rank(engine, checkpoint))["rng"])


def _saved_rank(engine: Engine, checkpoint: Checkpoint) -> int:
    """Return the rank of the saved run with the same part of the model and of the data, if the split is the same."""
    parallel = engine.recipe.parallel
    ranks_per_part = parallel.tensor * parallel.context
    data, tensor = divmod(dist.get_rank() % (dist.get_world_size() // parallel.pipeline), ranks_per_part)
    saved_per_stage = checkpoint.num_ranks // parallel.pipeline
    if data * ranks_per_part >= saved_per_stage:
        data = 0  # no rank had this part of the data: take the first part's
    rank = parallel_state.get_pipeline_model_parallel_rank() * saved_per_stage + data * ranks_per_part + tensor
    return min(rank, checkpoint.num_ranks - 1)
