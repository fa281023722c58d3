"""Memory of one rank, counted on the trainer's own engine, which is built on the meta device."""

import math
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.optimizer.distrib_optimizer import DistributedOptimizer
from torch import Tensor

from fmoe.optim import AdamW8bit, Muon
from fmoe.parallel.gradients import is_expert
from megatron_patch import cpu
from megatron_patch.models import stacks
from megatron_patch.optimizer import Shard, optimizers, shards, shards_of
from pretrain.config import Recipe
from pretrain.engine import Engine
from pretrain.engine.optimizer_state import state_tensors
from pretrain.start.process import Processes

# torchao's 8-bit moments: a code per element, a scale per block of `_BLOCK`, and per tensor a table of `_CODES` codes.
_BLOCK = 256
_CODES = 256


@dataclass(frozen=True)
class Groups:
    """Sizes of the process groups of a rank, for the dense layers and for the experts."""

    tensor: int
    context: int
    pipeline: int
    data: int
    expert: int
    expert_tensor: int
    expert_data: int


@dataclass(frozen=True)
class Holding:
    """Persistent memory of a rank: without activations and other memory that is used only within a step.

    Attributes:
        layers: numbers of the layers, from 1.
        experts: number of the rank's experts in each layer with experts; 0 without such layers.
        parameters: number of parameters in the rank's modules, replicated ones included.
        weights, gradients, masters, moments: bytes. Masters are the optimizer's fp32 copies of the weights. If
            ``parallel.shard`` is gradients or parameters, weights include those that a step gathers at a time.
            Gradients include what ``parallel.grad_compress`` remembers, and masters what ``parallel.sync_every`` does.
        on_host: bytes of these that are in host memory, by ``optimizer.cpu_offload`` and one of these two stages.
        memories: bytes of the hidden states remembered from earlier segments (``position.memory_length``).
        distinct: number of distinct parameters on all ranks of this pipeline stage. The last stage's copy of the
            embedding is not counted.
        saved: bytes that all ranks of this pipeline stage save in a checkpoint: weights, masters and moments of the
            distinct parameters, and the remembered hidden states.
    """

    layers: tuple[int, ...]
    experts: int
    parameters: int
    weights: int
    gradients: int
    masters: int
    moments: int
    on_host: int
    memories: int
    distinct: int
    saved: int

    @property
    def total(self) -> int:
        """Bytes of weights, gradients, masters, moments and memories."""
        return self.weights + self.gradients + self.masters + self.moments + self.memories


def groups() -> Groups:
    """Return the sizes of the process groups of this process's rank."""
    return Groups(
        tensor=parallel_state.get_tensor_model_parallel_world_size(),
        context=parallel_state.get_context_parallel_world_size(),
        pipeline=parallel_state.get_pipeline_model_parallel_world_size(),
        data=parallel_state.get_data_parallel_world_size(),
        expert=parallel_state.get_expert_model_parallel_world_size(),
        expert_tensor=parallel_state.get_expert_tensor_parallel_world_size(),
        expert_data=parallel_state.get_expert_data_parallel_world_size(),
    )


def build(recipe: Recipe, processes: Processes) -> Engine:
    """Build the engine of this process's rank on the meta device."""
    if not recipe.parallel.is_fully_sharded:
        # Megatron-core would allocate moments at once as pinned host memory: count them as if on the device.
        recipe = replace(recipe, optimizer=replace(recipe.optimizer, cpu_offload=0.0))
    with cpu.on_meta():
        return Engine(recipe, processes)


def hold(engine: Engine) -> Holding:
    """Return the memory that the engine's rank holds."""
    parameters = list(engine.gpt.parameters())
    masters = sum(_bytes(shard.main) for shard in shards(engine.optimizer) if shard.has_master)
    moments = sum(map(_state_bytes, optimizers(engine.optimizer)))
    on_host = 0
    if engine.recipe.parallel.is_fully_sharded:
        gathered = sum(chunk.max_gathered for chunk in engine.model) * engine.config.params_dtype.itemsize
        gradients = sum(_bytes(shard.main) for shard in shards(engine.optimizer))  # as large as all shards
        weights = gathered + gradients - masters
        if engine.recipe.optimizer.cpu_offload:
            on_host = weights - gathered + gradients + masters + moments
    else:
        buffers = [buffer for chunk in engine.model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        weights = sum(map(_bytes, parameters))
        gradients = sum(_bytes(buffer.grad_data) for buffer in buffers)
    remembered = [memory.values for compressor in engine.compressors for memory in compressor.memories()]
    gradients += 2 * sum(map(_bytes, remembered))  # with the copy that a skipped step needs
    if engine.sync is not None:
        masters += sum(_bytes(memory.values) for memory in engine.sync.memories())
    distinct = [(p, _parts(p)) for p in parameters if not getattr(p, "shared", False)]
    memory = sum(memory.length * len(memory.layers) for memory in engine.memories)  # hidden states of one stream
    memory *= engine.recipe.model.hidden_size * engine.config.params_dtype.itemsize * engine.recipe.streams
    return Holding(
        layers=tuple(sorted(_layer_numbers(engine))),
        experts=max((layer.num_local_experts for layer in engine.moe_layers), default=0),
        parameters=sum(p.numel() for p in parameters),
        weights=weights,
        gradients=gradients,
        masters=masters,
        moments=moments,
        on_host=on_host,
        memories=memory // engine.data_group.size(),
        distinct=sum(p.numel() * parts for p, parts in distinct),
        saved=sum(_saved_bytes(p, engine) * parts for p, parts in distinct) + memory,
    )


def _layer_numbers(engine: Engine) -> Iterator[int]:
    if engine.recipe.model.kind == "classifier":
        yield from engine.recipe.model.layer_numbers
        return
    for chunk in engine.chunks:
        for stack in stacks(chunk):
            for layer in stack.layers:
                yield layer.layer_number + stack.offset


def _parts(parameter: Tensor) -> int:
    """Return the number of ranks over which tensor or expert parallelism divides a parameter; 1 if it is replicated."""
    if is_expert(parameter):
        cut = parallel_state.get_expert_tensor_parallel_world_size()
        return parallel_state.get_expert_model_parallel_world_size() * cut
    is_cut = getattr(parameter, "tensor_model_parallel", False)
    return parallel_state.get_tensor_model_parallel_world_size() if is_cut else 1


def _state_bytes(part: Any) -> int:
    """Return the bytes of an optimizer's state on this rank; for a sharded Muon, on the rank that holds the most."""
    if not (isinstance(part.optimizer, Muon) and isinstance(part, DistributedOptimizer)):
        return sum(map(_moment_bytes, shards_of(part)))
    # Muon keeps one value per element of a hidden matrix and two per element of other parameters.
    ranks = part.data_parallel_group.size()
    totals = [0] * ranks
    for buffer in part.buffers:
        for bucket in buffer.buckets:
            share = bucket.grad_data.numel() // ranks
            for parameter in bucket.params_list:
                begin, end, _ = buffer.param_index_map[parameter]
                whole = Shard(part.optimizer, parameter, parameter, 0, parameter.numel())
                for rank in range((begin - bucket.offset) // share, ranks):
                    first = bucket.offset + rank * share
                    count = max(0, min(end, first + share) - max(begin, first))
                    totals[rank] += 4 * count * len(state_tensors(whole))
    return max(totals)


def _moment_bytes(shard: Shard) -> int:
    return sum(_size_of(shard, entry.shape(shard)) for entry in state_tensors(shard))


def _size_of(shard: Shard, shape: tuple[int, ...]) -> int:
    count = math.prod(shape)
    cut = shard.optimizer.cut(shard.main) if isinstance(shard.optimizer, AdamW8bit) else None
    if cut is None:
        return 4 * count
    in_8_bits = count - sum(cut)
    table = 4 * _CODES if in_8_bits else 0
    return in_8_bits + 4 * (in_8_bits // _BLOCK) + table + 4 * sum(cut)


def _saved_bytes(parameter: Tensor, engine: Engine) -> int:
    """Return the bytes of a parameter, its master and its moments in a checkpoint."""
    dtype = engine.config.params_dtype
    master = 0 if dtype == torch.float32 else 4 * parameter.numel()
    optimizer = optimizers(engine.optimizer)[0].optimizer
    whole = Shard(optimizer, parameter, parameter, 0, parameter.numel())
    return (
        dtype.itemsize * parameter.numel()
        + master
        # 8-bit moments are saved dequantized.
        + sum(4 * math.prod(entry.shape(whole)) for entry in state_tensors(whole))
    )


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
