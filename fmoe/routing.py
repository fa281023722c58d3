"""The interface between layers and gates: `RoutingGroups` for a gate's input, `Routing` for its decision.

Shape letters: T tokens, D model width, E experts, K experts per token, G routing groups, S tokens of a group (the last
group may be padded). T and G are those of this rank, or of all ranks if `RoutingGroups.shards` is set.
"""

from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass, field

import torch
from torch import Tensor

from fmoe import random
from fmoe.errors import UserError
from fmoe.shards import TokenShards


@dataclass(frozen=True, eq=False)
class RoutingStats:
    """Statistics of one routing, as detached tensors on the tokens' device.

    Every tensor is a sum, so that sums over micro batches and ranks are the statistics of the whole batch.

    Attributes:
        load_E: kept assignments of each expert (float32).
        dropped: assignments over capacity, scalar.
        entropy: entropy of the router's probabilities in nats, summed over tokens, scalar.
        tokens: tokens routed, scalar.
        sums: vector of the four fields above, in this order, followed by each loss of ``loss_names`` times ``tokens``.
            The fields are then views of this vector. None if the fields are separate tensors.
        loss_names: names of the losses in ``sums``.
    """

    load_E: Tensor
    dropped: Tensor
    entropy: Tensor
    tokens: Tensor
    sums: Tensor | None = None
    loss_names: tuple[str, ...] = ()

    @classmethod
    def of_sums(cls, sums: Tensor, loss_names: tuple[str, ...] = ()) -> "RoutingStats":
        """Return statistics whose fields are views of the vector ``sums``."""
        num_experts = sums.shape[0] - 3 - len(loss_names)
        dropped, entropy, tokens, *_ = sums[num_experts:].unbind()
        return cls(sums[:num_experts], dropped, entropy, tokens, sums, loss_names)

    def to(self, device: torch.device) -> "RoutingStats":
        """Return a copy on another device, with separate fields; ``self`` if it is on ``device`` already."""
        if self.load_E.device == device:
            return self
        fields = (self.load_E, self.dropped, self.entropy, self.tokens)
        load_E, dropped, entropy, tokens = (value.to(device) for value in fields)
        return RoutingStats(load_E, dropped, entropy, tokens)


def sum_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over micro batches: float64, or float32 on MPS, which has no float64.

    Counts in float32 are exact only to 2^24.
    """
    return torch.float32 if device.type == "mps" else torch.float64


@dataclass(frozen=True, eq=False)
class Routing:
    """A gate's decision: the experts and combine weights of each token.

    Attributes:
        expert_TK: global expert ids, int64; -1 for assignments that are dropped or not made.
        weight_TK: combine weights, differentiable, in the router's precision. Weights of dropped assignments are
            ignored.
        losses: unscaled auxiliary losses by name, scalars; empty in evaluation.
        stats: statistics of the decision; None if the gate collects none.
        max_load: upper bound on the assignments of any expert, known without reading values from the device; None for
            T * K.
    """

    expert_TK: Tensor
    weight_TK: Tensor
    losses: Mapping[str, Tensor] = field(default_factory=dict)
    stats: RoutingStats | None = None
    max_load: int | None = None


@dataclass(eq=False, repr=False)
class RoutingGroups:
    """The groups of tokens within which a gate applies capacity and balance losses, and the noise of these groups.

    A group is ``size`` consecutive tokens, counted sequence after sequence (GShard's local groups, arXiv 2006.16668
    section 2.2). It does not depend on the tokens' order in memory, nor on their spread over ranks. If each micro batch
    holds whole groups, routing is therefore the same for every data parallel, expert parallel and micro batch size.

    Methods that return noise take a ``purpose``, which is any name. Different purposes have independent noise.

    Attributes:
        num_sequences, sequence_length: shape of the token stream; T is their product.
        size: tokens of a group; None for ``sequence_length``.
        sequence_first: the memory layout is [sequence_length, num_sequences] (Megatron's), not the reverse.
        mask_T: bool, True for tokens to route (padding is False); None for all.
        token_ids_T: vocabulary ids of the tokens, for gates that route by them; None if they were not given.
        first_group: index of the first group within the global batch of the step; a scalar tensor on the host while
            torch.compile traces.
        noise_key: function that returns the key from which noise is drawn (`fmoe.random.noise_key`); only gates that
            draw noise call it.
        shards: how the tokens are spread over ranks, if this rank holds only a part of them; None if it holds all.
        num_tokens: T.
        count: number of groups, G.
        padding: number of tokens by which the last group is shorter than ``size``.

    Raises:
        UserError: the shape of ``mask_T`` or ``token_ids_T`` is not [T].
    """

    num_sequences: int
    sequence_length: int
    _: KW_ONLY
    size: int = None  # type: ignore[assignment]  # None until __post_init__
    sequence_first: bool = False
    mask_T: Tensor | None = None
    token_ids_T: Tensor | None = None
    first_group: int | Tensor = 0
    noise_key: Callable[[], int | Tensor] = lambda: random.noise_key(0)
    shards: TokenShards | None = None
    _key: int | Tensor | None = field(default=None, init=False)

    def __post_init__(self) -> None:
        self.num_tokens = self.num_sequences * self.sequence_length
        self.size = max(self.sequence_length if self.size is None else self.size, 1)
        self.count = -(-self.num_tokens // self.size)
        self.padding = self.count * self.size - self.num_tokens
        self.sequence_first = self.sequence_first and self.num_sequences > 1
        for name, value in (("mask_T", self.mask_T), ("token_ids_T", self.token_ids_T)):
            if value is not None and value.shape != (self.num_tokens,):
                raise UserError(f"{name} has shape {tuple(value.shape)}; it must be [T]=({self.num_tokens},)")

    def sizes(self) -> list[int]:
        """Return the number of tokens of each group: ``size``, and the rest for the last group."""
        return [self.size] * (self.count - 1) + [self.size - self.padding] if self.count else []

    def split(self, x_TX: Tensor, pad: float = 0) -> Tensor:
        """Map [T, ...] in memory order to [G, S, ...] in group order; the last group is padded with ``pad``."""
        shape = x_TX.shape[1:]
        if self.sequence_first:
            x_TX = x_TX.reshape(self.sequence_length, self.num_sequences, *shape).transpose(0, 1).flatten(0, 1)
        if self.padding:
            x_TX = torch.cat([x_TX, x_TX.new_full((self.padding, *shape), pad)])
        return x_TX.reshape(self.count, self.size, *shape)

    def join(self, x_GSX: Tensor) -> Tensor:
        """Map [G, S, ...] in group order to [T, ...] in memory order; the inverse of `split`."""
        shape = x_GSX.shape[2:]
        x_TX = x_GSX.reshape(self.count * self.size, *shape)[: self.num_tokens]
        if self.sequence_first:
            x_TX = x_TX.reshape(self.num_sequences, self.sequence_length, *shape).transpose(0, 1).flatten(0, 1)
        return x_TX

    def valid(self, device: torch.device) -> Tensor:
        """Return a mask, bool [G, S], of the positions that hold a token to route."""
        mask_T = self.mask_T
        if mask_T is None:
            mask_T = torch.ones(self.num_tokens, dtype=torch.bool, device=device)
        return self.split(mask_T, pad=False)

    def valid_or_none(self, device: torch.device) -> Tensor | None:
        """Return `valid`, or None if every position holds a token to route."""
        is_ragged = self.mask_T is not None or self.padding > 0
        return self.valid(device) if is_ragged else None

    def key_on_host(self, purpose: str) -> int:
        """Return the number from which the noise of a purpose is derived; unsupported by torch.compile."""
        if self._key is None:
            self._key = self.noise_key()
        return random.key(int(self._key), purpose)

    def _group_keys(self, purpose: str, device: torch.device) -> Tensor:
        """Return a noise key for each group, int64 [G], the same however the batch is split."""
        if self._key is None:
            self._key = self.noise_key()
        index_G = torch.arange(self.count, device=device, dtype=torch.int64) + self.first_group
        return random.fold(random.derive(self._key, purpose, device), index_G)

    def uniform(self, width: int, purpose: str, device: torch.device) -> Tensor:
        """Return noise in [0, 1), float32 [T, width], the same for a token however the batch is split."""
        noise_GN = random.uniform(self._group_keys(purpose, device), self.size * width)
        return self.join(noise_GN.view(-1, self.size, width))

    def local_uniform16(self, width: int, purpose: str, device: torch.device) -> Tensor:
        """Return noise in [0, 1) for this rank's tokens, float32 [tokens of this rank, width], in multiples of 2^-16.

        A token gets the same noise however the batch is split over ranks and micro batches.
        """
        keys_G = self._group_keys(purpose, device)
        shards = self.shards
        length = self.sequence_length
        if (
            shards is not None
            and self.size == length
            and (self.sequence_first or (self.num_sequences == 1 and shards.length == length))
        ):
            # Every sequence is a group, and this rank holds the same part of each.
            begin, end = shards.bounds
            noise_GN = random.uniform16(keys_G, (end - begin) * width, begin * width)
            return noise_GN.view(self.num_sequences, end - begin, width).transpose(0, 1).reshape(-1, width)
        noise_TD = self.join(random.uniform16(keys_G, self.size * width).view(-1, self.size, width))
        return noise_TD if shards is None else shards.local(noise_TD, self._rows)

    def gather(self, x_TX: Tensor) -> Tensor:
        """Return the values of all ranks' tokens, given this rank's values; ``x_TX`` itself without ``shards``.

        The backward pass does not sum gradients over ranks. All ranks must therefore compute the same from the result.
        Combine weights are an exception: each rank uses only those of its own tokens. A token's combine weights
        must depend only on that token's values.
        """
        if self.shards is None:
            return x_TX
        begin, end = self.shards.bounds
        return self.shards.gather(x_TX.unflatten(0, (end - begin, self._rows)), alike=True).flatten(0, 1)

    @property
    def _rows(self) -> int:
        """T divided by the size of the dimension that ``shards`` splits; 1 without ``shards``."""
        return self.num_tokens // self.shards.length if self.shards and self.shards.length else 1

    def normal(self, width: int, purpose: str, device: torch.device) -> Tensor:
        """Return standard normal noise, float32 [T, width], the same for a token however the batch is split."""
        noise_GN = random.normal(self._group_keys(purpose, device), self.size * width)
        return self.join(noise_GN.view(-1, self.size, width))

    def token_keys(self, purpose: str, device: torch.device) -> Tensor:
        """Return a noise key for each token, int64 [T], the same however the batch is split."""
        keys_G1 = self._group_keys(purpose, device).unsqueeze(1)
        return self.join(random.fold(keys_G1, torch.arange(self.size, device=device, dtype=torch.int64)))
