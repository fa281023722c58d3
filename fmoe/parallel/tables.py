"""Tables whose rows are divided among the ranks of a group: embeddings of many ids.

Position p is on rank ``p // rows_per_rank``. A step exchanges the rows that it needs, never the table: gradients are
sparse tensors of the touched rows. Shape letters: U distinct ids of a rank, A rows that all ranks ask of one rank,
D width.
"""

import copy
import math
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.nn import functional as F

from fmoe import random
from fmoe.errors import UserError
from fmoe.exchange.checks import raise_on_all_ranks
from fmoe.exchange.collectives import all_to_all
from fmoe.parallel.checkpoint import path_in_state

_MAX_ROWS = 1 << 31  # `ShardedEmbedding.positions` multiplies two smaller numbers


class ShardedRows(nn.Module):
    """Table ``weight`` [num_rows, dim] whose rows are divided among the ranks of a group.

    Wrappers such as DDP and FSDP, and `fmoe.parallel.average_gradients`, ignore it: it is not among ``parameters()``,
    and its gradient is a sparse tensor, already the mean over ranks. Pass ``table.weight`` to an optimizer of its own.
    ``state_dict`` has the weight as a DTensor, which `torch.distributed.checkpoint` saves and loads at any number of
    ranks.

    Args:
        num_rows, dim: shape of the table; at most 2^31 rows.
        group: the data parallel group, such as ``fmoe.parallel.init().data_group``.
        std: standard deviation of the initial values, which depend on ``seed`` and the position of a row alone.
        seed: the same on all ranks; give each table of a model another one, or their rows begin equal.

    Attributes:
        weight: this rank's rows, a leaf tensor.
        first_row: position of the first of them.

    Raises:
        UserError: an argument is out of range.
    """

    def __init__(
        self,
        num_rows: int,
        dim: int,
        group: dist.ProcessGroup,
        *,
        std: float = 0.01,
        seed: int = 0,
    ):
        super().__init__()
        if not 1 <= num_rows <= _MAX_ROWS:
            raise UserError(f"num_rows={num_rows} must be from 1 to {_MAX_ROWS}")
        if dim < 1:
            raise UserError(f"dim={dim} must be at least 1")
        if not std >= 0:
            raise UserError(f"std={std} must be at least 0")
        self.num_rows = num_rows
        self.group = group
        self.std = std
        self.seed = seed
        self.rows_per_rank = -(-num_rows // group.size())
        self.first_row = min(num_rows, self.rows_per_rank * group.rank())
        count = min(self.rows_per_rank, num_rows - self.first_row)
        defaults: dict[str, Any] = {"dtype": torch.get_default_dtype(), "device": torch.get_default_device()}
        self.weight = torch.empty(count, dim, **defaults, requires_grad=True)
        self.reset_parameters()

    @torch.no_grad()
    def reset_parameters(self) -> None:
        """Draw the rows again, in blocks, so that no second copy of them exists."""
        key = random.derive(self.seed, "rows", self.weight.device)
        position = self.first_row
        for block in self.weight.split(1 << 16):
            rows = torch.arange(position, position + len(block), dtype=torch.int64, device=key.device)
            block.copy_(random.exact_normal(random.fold(key, rows), block.shape[1]) * self.std)
            position += len(block)

    def take(self, rows: Tensor) -> Tensor:
        """Return rows of this rank by their local index, [A] -> [A, D]; their gradient is sparse."""
        taken = F.embedding(rows, self.weight, sparse=True)
        if taken.requires_grad:
            taken.register_hook(lambda gradient: gradient / self.group.size())
        return taken

    def whole(self, local: Tensor) -> Tensor:
        """Return a tensor of one row per row of this rank as a part of that of all ranks, sharing its memory."""
        from torch.distributed.tensor import DTensor, Shard

        mesh = DeviceMesh.from_group(self.group, local.device.type)
        shape = torch.Size([self.num_rows, *local.shape[1:]])
        return DTensor.from_local(local, mesh, [Shard(0)], run_check=False, shape=shape, stride=local.stride())

    def _apply(self, fn: Any, *args: Any) -> Any:
        self.weight.data = fn(self.weight.data)
        return super()._apply(fn, *args)

    def _save_to_state_dict(self, destination: dict[str, Any], prefix: str, keep_vars: bool) -> None:
        destination[f"{prefix}weight"] = self.whole(self.weight.detach())

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _, _, missing_keys, _, errors = args
        others = dict(state_dict)
        value = others.pop(f"{prefix}weight", None)
        super()._load_from_state_dict(others, prefix, *args)  # reports unknown keys
        shape = (self.num_rows, self.weight.shape[1])
        if value is None:
            missing_keys.append(f"{prefix}weight")
        elif value.shape != shape:
            errors.append(f"{prefix}weight has shape {tuple(value.shape)}; it must be {shape}")
        else:
            is_whole = not hasattr(value, "to_local")
            self.weight.data.copy_(value[self.first_row :][: len(self.weight)] if is_whole else value.to_local())

    def __deepcopy__(self, memo: dict[int, Any]) -> Self:
        memo[id(self.group)] = self.group  # process groups cannot be copied
        twin = memo[id(self)] = type(self).__new__(type(self))
        twin.__setstate__(copy.deepcopy(self.__getstate__(), memo))
        return twin


class ShardedEmbedding(ShardedRows):
    """Embedding whose table is divided among the ranks of a group.

    A forward pass merges the duplicates of a rank's ids. All-to-alls send the ids to the ranks of their rows, and the
    rows back. The backward pass sends one gradient per distinct id. Ranks may have any number of ids, or none, but all
    must run the same forward and backward passes.

    Consecutive ids are spread over all ranks (`positions`), since small ids are often the most frequent.

    Args:
        num_embeddings, embedding_dim: as in `torch.nn.Embedding`.
        group, options: as in `ShardedRows`.

    Raises:
        UserError: an argument is out of range.
    """

    def __init__(self, num_embeddings: int, embedding_dim: int, group: dist.ProcessGroup, **options: Any):
        super().__init__(num_embeddings, embedding_dim, group, **options)
        self.stride = max(1, round(num_embeddings * 0.618))
        while math.gcd(self.stride, num_embeddings) > 1:
            self.stride += 1

    def positions(self, ids: Tensor) -> Tensor:
        """Return the positions of ids in the table, a permutation that does not depend on the number of ranks."""
        return ids.long() * self.stride % self.num_rows

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ``ids``, [...] -> [..., D].

        Raises:
            UserError: ids are not integers, or out of range.
            PeerError: those of another rank are.
        """
        where, rows, send, receive = self.route(ids)
        return F.embedding(where, _AllToAll.apply(self.take(rows), self.group, send, receive))

    def route(self, ids: Tensor) -> tuple[Tensor, Tensor, list[int], list[int]]:
        """Send the distinct ids, in the order of their positions, to the ranks of their rows.

        Returns:
            The place of each id among the U distinct ones; the local indices of the rows that the ranks ask of this
            one, [A]; the numbers of rows that this rank asks of each rank, and of those that each asks of it.
        """
        error = invalid_index("ids", ids, self.num_rows)
        distinct, where = self.positions(ids.new_empty(0) if error else ids).unique(return_inverse=True)
        counts = torch.bincount(distinct // self.rows_per_rank, minlength=self.group.size())
        send, receive = exchange_counts(self.group, counts, error)
        return where, all_to_all(self.group, distinct, receive, send).wait() - self.first_row, send, receive


class _AllToAll(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, rows: Tensor, group: dist.ProcessGroup, receive: list[int], send: list[int]) -> Tensor:
        ctx.reverse = (group, send, receive)
        return all_to_all(group, rows, receive, send).wait()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Any:
        return _AllToAll.apply(grad, *ctx.reverse), None, None, None


class CachedEmbedding(nn.Module):
    """Embedding that reads copies of rows for ``period`` steps, and so sends fewer rows than `ShardedEmbedding`.

    Without ``local_lr``, gradients are sent in every step, but the rows that a step reads are up to ``period - 1``
    optimizer steps old (bounded staleness). With it, this is Geo-SGD (PaddlePaddle): each rank updates its copies by
    SGD. At the end of each period, the gradient of the table is the mean of what the ranks subtracted: use
    ``torch.optim.SGD([table.weight], lr=1.0)``. With ``period=1``, both equal the table itself, in the second case with
    SGD. Otherwise they change the training: use `ShardedEmbedding` if the network allows.

    Call `end_backward` after the backward pass of each step, before the optimizer's step.

    Args:
        table: holds the rows, on its final device.
        period: number of steps between reads of the same row.
        local_lr: learning rate of Geo-SGD; assign the attribute to change it.

    Raises:
        UserError: an argument is out of range; from ``state_dict``, within a period. After whole periods, a resume is
            exact. ``load_state_dict`` drops the copies and begins a period.
    """

    def __init__(self, table: ShardedEmbedding, period: int, local_lr: float | None = None):
        if period < 1:
            raise UserError(f"period={period} must be at least 1")
        if local_lr is not None and not local_lr >= 0:
            raise UserError(f"local_lr={local_lr} must be at least 0")
        super().__init__()
        self.table = table
        self.period = period
        self.local_lr = local_lr
        self.steps = 0
        self._drop()

    def _drop(self) -> None:
        self._rows = self.table.weight.detach()[:0]
        self._ids = self._rows.new_empty(0, dtype=torch.int64)
        self._gradients = [(self._ids, self._rows)]

    def forward(self, ids: Tensor) -> Tensor:
        """Return the rows of ``ids``, as `ShardedEmbedding` does."""
        distinct, where = ids.unique(return_inverse=True)
        missing = distinct[~torch.isin(distinct, self._ids)]
        with torch.no_grad():
            fetched = self.table(missing)  # refuses invalid ids on all ranks
        self._ids, order = torch.cat([self._ids, missing]).sort()
        self._rows = torch.cat([self._rows, fetched])[order]
        rows = self._rows[torch.searchsorted(self._ids, distinct)]
        if torch.is_grad_enabled():
            rows.requires_grad_().register_hook(lambda gradient: self._gradients.append((distinct, gradient)))
        return F.embedding(where, rows)

    @torch.no_grad()
    def end_backward(self) -> None:
        """Send gradients to the ranks of their rows, with ``local_lr`` only at the end of a period. Collective."""
        ids, gradients = (torch.cat(parts) for parts in zip(*self._gradients, strict=True))
        del self._gradients[1:]
        self.steps += 1
        ends = self.steps % self.period == 0
        if self.local_lr is not None:
            self._rows.index_add_(0, torch.searchsorted(self._ids, ids), gradients, alpha=-self.local_lr)
            if not ends:
                return
            ids = self._ids
            gradients = self.table(ids) - self._rows  # the table is as it was read
        where, rows, send, receive = self.table.route(ids)
        sums = gradients.new_zeros(sum(send), gradients.shape[1]).index_add_(0, where, gradients)
        arrived = all_to_all(self.table.group, sums, receive, send).wait()
        with torch.enable_grad():
            self.table.take(rows).backward(arrived)
        if ends:
            self._drop()

    def _save_to_state_dict(self, *args: Any) -> None:
        if self.steps % self.period:
            raise UserError(f"steps={self.steps} must be a multiple of period={self.period} to be saved")

    def _load_from_state_dict(self, *args: Any) -> None:
        super()._load_from_state_dict(*args)
        self.steps = 0
        self._drop()


def optimizer_rows(model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Return the state of the optimizer of a model's tables, by name, for `torch.distributed.checkpoint`.

    Its tensors share memory with the optimizer: ``torch.distributed.checkpoint.load`` fills it, at any number of ranks.

    Args:
        optimizer: `fmoe.optim.RowAdagrad` or `fmoe.optim.RowAdam`; tables that it does not have are left out.
    """
    state = {}
    for name, table in model.named_modules():
        if isinstance(table, ShardedRows):
            for kind, value in optimizer.state.get(table.weight, {}).items():  # `state` adds what [] looks for
                path = ".".join([*path_in_state(model, name), kind])
                state[path] = table.whole(value) if value.dim() else value
    return state


def invalid_index(name: str, ids: Tensor, limit: int) -> UserError | None:
    """Return an error if a tensor has other values than integers from 0 to ``limit - 1``."""
    if ids.is_floating_point():
        return UserError(f"{name} are {ids.dtype}; they must be integers")
    ids = ids.long()  # narrower integers may not hold the limit
    invalid = ids[(ids < 0) | (ids >= limit)].tolist()
    return UserError(f"{name}={invalid[0]} must be from 0 to {limit - 1}") if invalid else None


def exchange_counts(group: dist.ProcessGroup, counts: Tensor, error: UserError | None) -> tuple[list[int], list[int]]:
    """Send count r to rank r; return this rank's counts and those that it received. An error raises on all ranks."""
    if error is not None:
        counts = torch.full_like(counts, -1)
    received = all_to_all(group, counts, what="exchange of counts").wait(for_host=True)
    send, receive = torch.stack([counts, received]).tolist()
    failed = [rank for rank, count in enumerate(receive) if count < 0]
    if failed:
        raise_on_all_ranks(group, failed, error, counts.device)
    return send, receive
