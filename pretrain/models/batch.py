"""Conversion of samples to micro batches, and of token losses to the loss of a global batch.

The loss of a step is the mean over all predicted tokens of the global batch. If samples differ in their number of
predicted tokens, a mean of means would depend on the split into micro batches and ranks. `weigh` therefore gives each
token the weight that it has in the global batch.
"""

from collections.abc import Callable, Sequence
from functools import partial

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from fmoe.errors import UserError
from fmoe.shards import slice_bounds

Batch = dict[str, Tensor]

_ALIGNED = 16  # bytes; tensors of a packed batch begin at multiples of it
_IDS = ("tokens", "decoder_tokens", "labels")


def collate(samples: Sequence[np.ndarray | dict[str, np.ndarray]], vocab_size: int | None = None) -> Batch:
    """Collate b samples into a micro batch.

    Token arrays [s + 1] become ``tokens`` and ``labels`` [b, s]. Dictionaries are stacked by name. ``loss_mask``
    [b, s], if present, is 1 where a token is predicted.

    Raises:
        UserError: ``vocab_size`` is given, and a token id is outside ``0 <= id < vocab_size``.
    """
    # Only numpy: an operation of torch in another thread would start another pool of OpenMP threads.
    if isinstance(samples[0], dict):
        arrays = {name: np.stack([sample[name] for sample in samples]) for name in samples[0]}
    else:
        tokens = np.stack([np.asarray(sample) for sample in samples])
        arrays = {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]}
    if vocab_size is not None:
        for name in _IDS:
            if name in arrays:
                _check_ids(arrays[name], vocab_size)
    return {name: torch.from_numpy(np.ascontiguousarray(array)) for name, array in arrays.items()}


def other_document(queries: Tensor, keys: Tensor) -> Tensor:
    """Return Megatron's attention mask, bool [b, 1, s of queries, s of keys], from the document numbers of tokens.

    The mask is True where a query must not see a key, because the key is in another document.

    Args:
        queries, keys: document numbers [b, s].
    """
    return (queries.unsqueeze(2) != keys.unsqueeze(1)).unsqueeze(1)


def to_device(batch: Batch, device: torch.device | str) -> Batch:
    """Move a batch to a device; to a GPU in a single asynchronous transfer from pinned memory."""
    device = torch.device(device)
    return batch if device.type == "cpu" else _packed(batch, device, pin_memory=device.type == "cuda")


def _packed(batch: Batch, device: torch.device, pin_memory: bool) -> Batch:
    ends = np.cumsum([-(-tensor.nbytes // _ALIGNED) * _ALIGNED for tensor in batch.values()]).tolist()
    buffer = torch.empty(ends[-1], dtype=torch.uint8, device="cpu", pin_memory=pin_memory)
    begins = dict(zip(batch, [0, *ends], strict=False))

    def part(buffer: Tensor, name: str) -> Tensor:
        begin = begins[name]
        tensor = batch[name]
        return buffer[begin : begin + tensor.nbytes].view(tensor.dtype).view(tensor.shape)

    for name, tensor in batch.items():
        part(buffer, name).copy_(tensor)
    moved = buffer.to(device, non_blocking=True)
    return {name: part(moved, name) for name in batch}


def _check_ids(ids: np.ndarray, vocab_size: int) -> None:
    invalid = ids[(ids < 0) | (ids >= vocab_size)]
    if invalid.size:
        raise UserError(
            f"a sample has the token id {invalid[0]}, outside model.vocab_size={vocab_size}: its corpus was prepared "
            "with another tokenizer, or has changed (check with fmoe data show PREFIX --verify)"
        )


def weigh(batches: Sequence[Batch], group: dist.ProcessGroup, device: torch.device) -> None:
    """Replace ``loss_mask`` by ``loss_weight`` in batches that have a mask.

    With these weights, the sums of weighted token losses, averaged over all micro batches and ranks, give the mean loss
    over all predicted tokens. Collective over the data parallel ``group`` if there are masks.
    """
    if not batches or "loss_mask" not in batches[0]:
        return
    total = torch.tensor(sum(int(batch["loss_mask"].sum()) for batch in batches), device=device, dtype=torch.int64)
    dist.all_reduce(total, group=group)
    weight = len(batches) * group.size() / max(int(total), 1)
    for batch in batches:
        batch["loss_weight"] = batch.pop("loss_mask").float() * weight


def context_slice(batch: Batch, group: dist.ProcessGroup) -> Batch:
    """Return this context parallel rank's contiguous slice of each sequence, with its ``positions``.

    ``documents``, from which attention makes its mask, remain whole. A group of one rank gets the batch unchanged.
    """
    if group.size() == 1:
        return batch
    tokens = batch["tokens"]
    begin, end = slice_bounds(tokens.shape[1], group.rank(), group.size())
    positions = torch.arange(tokens.shape[1], device=tokens.device, dtype=torch.int64).expand_as(tokens)
    batch = {"positions": positions, **batch}
    return {name: x if name == "documents" else x[:, begin:end].contiguous() for name, x in batch.items()}


def loss_function(batch: Batch, slices: int = 1) -> Callable[[Tensor], tuple[Tensor, dict[str, Tensor]]]:
    """Return the loss function of a micro batch, which the pipeline schedule calls with the model's output.

    Args:
        slices: context parallel size. The losses of the context parallel ranks, each of one slice of the sequences, add
            up to the loss of the micro batch.
    """
    return partial(_loss, batch.get("loss_weight"), slices)


def _loss(weight: Tensor | None, slices: int, output: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
    # The schedule multiplies it by the context parallel size (schedules.py:268): gradients are averaged over ranks.
    loss = output.float().mean() / slices if weight is None else (output.float() * weight).sum()
    # The schedule divides the loss in place (schedules.py:269): log a copy.
    return loss, {"loss": loss.detach().clone()}
