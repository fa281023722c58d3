"""Position of a rank's parameters and buffers in the global tensors of a model.

Megatron's ``sharded_state_dict`` serves as the index: it has each parameter's global name, shape and offset.
"""

import contextlib
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.dist_checkpointing.dict_utils import nested_values
from megatron.core.dist_checkpointing.mapping import ShardedTensor, ShardedTensorFactory
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from megatron_patch.fsdp import is_in_first_copy
from pretrain.checkpoint.geometry import Shape


@dataclass(frozen=True)
class ShardLocation:
    """Position of a piece of a local parameter in its global tensor.

    Most parameters are one piece. A gated linear layer is two: its halves are not adjacent in the global tensor.

    Attributes:
        name, shape: name and shape of the global tensor.
        offset, block: position and shape of the piece in the global tensor.
        begin: offset of the piece in the flattened parameter.
        is_main: True on the one rank that writes the piece.
        is_main_shard: True on the data parallel ranks that write the piece's sharded optimizer state, each its shard.
    """

    name: str
    shape: Shape
    offset: Shape
    block: Shape
    begin: int
    is_main: bool
    is_main_shard: bool

    @property
    def end(self) -> int:
        return self.begin + math.prod(self.block)


class ShardLocations:
    """Locations of all parameters and persistent buffers of a model.

    Args:
        chunks: this rank's chunks of the model, unwrapped.

    Attributes:
        names: names of the global tensors of which this rank has a piece.
    """

    def __init__(self, chunks: Sequence[Any]):
        group = parallel_state.get_data_parallel_group(with_context_parallel=True)
        self._by_id: dict[int, list[ShardLocation]] = {}
        for chunk in chunks:
            with _whole_parameters(chunk) as dtensors:
                state = chunk.sharded_state_dict(metadata={"dp_cp_group": group})
            for sharded in nested_values(state):
                if isinstance(sharded, ShardedTensorFactory):
                    pieces = [piece for piece in nested_values(sharded.build()) if isinstance(piece, ShardedTensor)]
                elif isinstance(sharded, ShardedTensor) and sharded.data is not None:
                    pieces = [sharded]
                else:
                    continue
                tensor = dtensors.get(sharded.data, sharded.data)
                self._by_id[id(tensor)] = [_location_of(piece, sharded.data) for piece in pieces]
        self.names = {location.name for locations in self._by_id.values() for location in locations}

    def of(self, tensor: Tensor) -> list[ShardLocation]:
        """Return the locations of the pieces of a parameter or buffer."""
        if id(tensor) not in self._by_id:
            raise RuntimeError(f"a tensor of shape {tuple(tensor.shape)} is not in the model's sharded_state_dict")
        return self._by_id[id(tensor)]


@contextlib.contextmanager
def _whole_parameters(chunk: nn.Module) -> Iterator[dict[Tensor, Any]]:
    """Replace parameters that are DTensors by whole ones on the meta device; yield the DTensors by their replacements.

    Megatron-core's ``sharded_state_dict`` splits parameters, which a DTensor cannot do without communication.
    """
    owners: list[tuple[nn.Module, str, nn.Parameter]] = []
    dtensors: dict[Tensor, Any] = {}
    for module in chunk.modules():
        for name, parameter in module._parameters.items():
            if isinstance(parameter, DTensor):
                whole = nn.Parameter(torch.empty(parameter.shape, dtype=parameter.dtype, device="meta"))
                vars(whole).update(vars(parameter))
                dtensors[whole] = parameter
                owners.append((module, name, whole))
    for module, name, whole in owners:
        module._parameters[name] = whole
    try:
        yield dtensors
    finally:
        for module, name, whole in owners:
            module._parameters[name] = dtensors[whole]


def _location_of(piece: ShardedTensor, parameter: Tensor) -> ShardLocation:
    replica = piece.replica_id if isinstance(piece.replica_id, tuple) else (piece.replica_id,)
    return ShardLocation(
        piece.key,
        tuple(piece.global_shape),
        tuple(piece.global_offset),
        block=(1,) * piece.prepend_axis_num + tuple(piece.local_shape),
        begin=piece.data.storage_offset() - parameter.storage_offset(),
        is_main=not any(replica),
        # The last number of Megatron's replica ids is the data parallel rank.
        is_main_shard=not any(replica[:-1]) and is_in_first_copy(),
    )


def named_tensors(chunks: Sequence[nn.Module]) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and value of each parameter and persistent buffer of a model's chunks."""
    for chunk in chunks:
        yield from chunk.named_parameters()
        for prefix, module in chunk.named_modules():
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    yield f"{prefix}.{name}", buffer


def tensor_layouts(chunks: Sequence[nn.Module]) -> dict[str, tuple[Shape, torch.dtype]]:
    """Return the global shape and the dtype of each parameter and persistent buffer of a model's chunks.

    The keys are the names in a checkpoint without the prefix ``model/``.
    """
    locations = ShardLocations(chunks)
    layouts = {}
    for _, tensor in named_tensors(chunks):
        for location in locations.of(tensor):
            layouts[location.name] = (location.shape, tensor.dtype)
    return layouts
