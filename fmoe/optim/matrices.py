"""Hidden matrices of a model, and the division of fused and stacked weights into matrices.

Shape letters: B blocks (experts of a stack), M rows, N columns.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.utils.parametrize import ParametrizationList

from fmoe.errors import UserError
from fmoe.experts.ffn import FFNExperts
from fmoe.experts.shared import SharedExpert
from fmoe.optim.layout import has_mark
from fmoe.runtime import collectives, ownership


@dataclass(frozen=True)
class Matrices:
    """The matrices of a parameter [M, N], or of a stack of experts [B, M, N].

    Attributes:
        blocks, rows, columns: B, M and N; with tensor parallelism, those of this rank's slice.
        sections: number of rows of each matrix of a fused weight, such as gate and value, or query, key and value. With
            several groups of heads, the pattern repeats down the rows. A single entry for an unfused weight.
        axis: axis along which every matrix is split over the ranks of ``group``: 0 for rows, 1 for columns.
        group: tensor parallel group; None if this rank has whole matrices.

    Raises:
        UserError: a section is 0, or the sum of the sections does not divide the rows.
    """

    blocks: int
    rows: int
    columns: int
    sections: tuple[int, ...]
    axis: int = 0
    group: dist.ProcessGroup | None = None

    def __post_init__(self):
        if not all(self.sections) or self.rows % sum(self.sections):
            raise UserError(f"sections={self.sections} must be positive, with a sum that divides the {self.rows} rows")

    @classmethod
    def of(cls, parameter: Tensor, parts: int = 1, **split: Any) -> "Matrices | None":
        """Describe ``parameter``, a matrix or a stack of experts' matrices; None for other or empty tensors.

        Args:
            parts: number of matrices of equal height that are fused along the rows.
            split: ``axis`` and ``group``.
        """
        if parameter.dim() != 2 + has_mark(parameter):
            return None
        blocks = parameter.shape[0] if has_mark(parameter) else 1
        rows, columns = parameter.shape[-2:]
        return cls(blocks, rows, columns, (rows // parts,) * parts, **split) if parameter.numel() else None

    @property
    def block_size(self) -> int:
        """Elements of one block [M, N] on this rank."""
        return self.rows * self.columns

    @property
    def whole_size(self) -> int:
        """Number of elements of one block, summed over the ranks of ``group`` that share the block."""
        return self.block_size * (1 if self.group is None else self.group.size())

    @property
    def kind(self) -> tuple:
        """Key: blocks of parameters with equal keys can be orthogonalized in one batch."""
        return self.rows, self.columns, self.sections, self.axis, self.group

    def cut(self, x_BMN: Tensor) -> list[Tensor]:
        """Return one matrix [B, m, N] per section. Its m rows are from all repetitions of the sections."""
        if len(self.sections) == 1:
            return [x_BMN]
        repeated = x_BMN.unflatten(1, (-1, sum(self.sections)))
        return [part.flatten(1, 2) for part in repeated.split(self.sections, 2)]

    def join(self, parts: Sequence[Tensor]) -> Tensor:
        """Return the fused weight [B, M, N], given what `cut` returns."""
        if len(parts) == 1:
            return parts[0]
        repeated = [part.unflatten(1, (-1, rows)) for part, rows in zip(parts, self.sections, strict=True)]
        return torch.cat(repeated, 2).flatten(1, 2)

    def whole(self, x_BMN: Tensor) -> list[Tensor]:
        """Gather the weight over ``group``, and return its matrices as `cut` does. All ranks must make this call."""
        if self.group is None:
            return self.cut(x_BMN)
        slices = [torch.empty_like(x_BMN) for _ in range(self.group.size())]
        collectives.run(dist.all_gather, slices, x_BMN, group=self.group)
        return [torch.cat(of_ranks, 1 + self.axis) for of_ranks in zip(*map(self.cut, slices), strict=True)]

    def own(self, wholes: Sequence[Tensor]) -> Tensor:
        """Return this rank's slice [B, M, N], given what `whole` returns."""
        if self.group is None:
            return self.join(wholes)
        rank = self.group.rank()
        return self.join([whole.chunk(self.group.size(), 1 + self.axis)[rank] for whole in wholes])

    def with_sections(self, *rows: int) -> "Matrices":
        """Return the description of a fused weight with these sections."""
        return replace(self, sections=rows)

    def split_over(self, group: dist.ProcessGroup, axis: int) -> "Matrices":
        """Return the description of this rank's slice of a weight that is split along an axis."""
        if group.size() == 1:
            return replace(self, axis=0, group=None)
        return replace(self, axis=axis, group=group)


def hidden_matrices(model: nn.Module, others: Iterable[nn.Module] = ()) -> dict[Tensor, Matrices]:
    """Return the trained hidden matrices of a model, found through the modules that own them.

    Hidden matrices are the parameters with two axes and the stacks of matrices. Excluded are the parameters of
    embeddings (even if other modules share them), of MoE gates, of shared experts' output gates, and of ``others``. A
    module names further parameters to exclude in its attribute ``router_parameters``. Gated `FFNExperts` have two
    matrices per expert in ``weight_in``.

    Args:
        others: modules that are excluded too, such as the output layer.
    """
    ownership.refresh()
    excluded: list[nn.Module] = [*others]
    spared: set[Tensor] = set()
    for module in model.modules():
        if isinstance(module, nn.Embedding | nn.EmbeddingBag):
            excluded.append(module)
        children: Any = module._modules
        if "experts" in children:  # an MoE layer, of this package or another
            gates = [children.get(name) for name in ("gate", "router", "shared_expert_gate")]
            excluded += [gate for gate in gates if gate is not None]
        for name in getattr(module, "router_parameters", ()):
            spared.add(getattr(module, name))
        if isinstance(module, SharedExpert) and module.output_gate is not None:
            excluded.append(module.output_gate)
    for module in excluded:
        spared.update(module.parameters())
    hidden: dict[Tensor, Matrices] = {}
    for module in model.modules():
        for name, parameter in _own_parameters(module):
            if parameter in spared or not parameter.requires_grad:
                continue
            matrices = _described(module, name, parameter)
            if matrices is not None:
                hidden[parameter] = matrices
    return hidden


def _own_parameters(module: nn.Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the parameters of ``module``, without submodules. Parametrized ones have the name of the parametrization.

    The magnitude of weight_norm is left out, as it is a vector.
    """
    if isinstance(module, ParametrizationList):  # its owner yields the parameters
        return
    yield from module.named_parameters(recurse=False)
    for name, parametrization in getattr(module, "parametrizations", {}).items():
        shape = getattr(module, name).shape
        for parameter in parametrization.parameters(recurse=False):
            if not any(size == 1 < whole for size, whole in zip(parameter.shape, shape, strict=False)):
                yield name, parameter


def _described(module: nn.Module, name: str, parameter: Tensor) -> Matrices | None:
    if not isinstance(module, FFNExperts) or not name.startswith("weight"):
        return Matrices.of(parameter)
    is_first = name == "weight_in"
    split: dict[str, Any] = {}
    if module.hidden_parts > 1:  # ShardedFFNExperts
        split = {"axis": 0 if is_first else 1, "group": module.group}
    return Matrices.of(parameter, parts=1 + (module.gated and is_first), **split)


# Elements of matrices that are orthogonalized together on a CPU: the temporaries of more would leave the caches.
_ON_CPU = 1 << 18


@torch.no_grad()
def orthogonalize(x: Tensor, steps: int = 5) -> Tensor:
    """Return an approximation of U V^T for matrices with singular value decomposition U S V^T.

    This is the quintic Newton-Schulz iteration of Muon (Jordan et al. 2024), with its published coefficients. After 5
    steps, singular values above 1/500 of the Frobenius norm have become 0.68 to 1.21, and zeros are still zero.

    Args:
        x: [..., M, N] in float32 or float64, the precision of the iteration.
    """
    rows, columns = x.shape[-2:]
    stack = x.reshape(math.prod(x.shape[:-2]), rows, columns)
    if x.device.type != "cpu":
        return _newton_schulz(stack, steps).view(x.shape)
    result = torch.empty_like(stack)
    together = max(_ON_CPU // max(rows * columns, 1), 1)
    for few, into in zip(stack.split(together), result.split(together), strict=True):
        into.copy_(_newton_schulz(few, steps))
    return result.view(x.shape)


def _newton_schulz(x_BMN: Tensor, steps: int) -> Tensor:
    a, b, c = 3.4445, -4.7750, 2.0315
    is_tall = x_BMN.shape[1] > x_BMN.shape[2]  # the products are smaller with fewer rows than columns
    # Contiguous, because rounding depends on strides, and slices of a fused weight have other strides than the whole.
    x = (x_BMN.mT if is_tall else x_BMN).contiguous()
    x = x / (torch.linalg.vector_norm(x, dim=(1, 2), keepdim=True) + 1e-7)
    for _ in range(steps):
        gram = torch.bmm(x, x.mT)
        x = torch.baddbmm(x, torch.baddbmm(gram, gram, gram, beta=b, alpha=c), x, beta=a)
    return x.mT.contiguous() if is_tall else x
