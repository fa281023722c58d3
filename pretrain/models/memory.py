"""Transformer-XL's memory of the training streams, as a part of a run's state."""

from collections.abc import Iterable, Iterator

import torch
from megatron.core import parallel_state

from megatron_patch.transformer_xl import StreamMemory
from pretrain.checkpoint import Checkpoint, TensorPiece
from pretrain.models.batch import Batch

_PREFIX = "memory/layers."  # of tensor names in a checkpoint


class Memory(StreamMemory):
    """`StreamMemory` that reads the starts of streams from micro batches, and is saved in checkpoints."""

    def enter_batch(self, first: int, batch: Batch) -> None:
        """Give the layers the memory of a micro batch that begins with sample ``first``, until the next or `leave`."""
        self.enter(first, "starts" in batch and bool(batch["starts"].any()))

    def pieces(self) -> Iterator[TensorPiece]:
        """Yield the hidden states of each layer [streams, tokens, hidden_size], which tensor parallel ranks share."""
        if parallel_state.get_tensor_model_parallel_rank() != 0:
            return
        for stream, states in self.states.items():
            for layer, state in zip(self.layers, states, strict=True):
                block = state.transpose(0, 1)
                shape = (self.streams, *block.shape[1:])
                yield TensorPiece(f"{_PREFIX}{layer.layer_number}", shape, (stream, 0, 0), tuple(block.shape), block)

    def load(self, checkpoint: Checkpoint, streams: Iterable[int], size: int, device: torch.device) -> None:
        """Load the memory of micro batches of ``size`` sequences; clear it if the checkpoint has none.

        Args:
            streams: first stream of each of this rank's micro batches.
        """
        self.states.clear()
        names = [f"{_PREFIX}{layer.layer_number}" for layer in self.layers]
        if not set(names).issubset(checkpoint.names()):
            return
        blocks = {name: (size, *checkpoint.shape(name)[1:]) for name in names}
        for stream in streams:
            self.states[stream] = [
                checkpoint.read(name, (stream, 0, 0), block).view(block).transpose(0, 1).to(device, copy=True)
                for name, block in blocks.items()
            ]
