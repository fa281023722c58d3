"""One forward pass of a layer's experts, which the exchanges call.

Shape letters: T tokens, K experts per token, R rows, L experts of this rank, D model width.
"""

from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.module import _has_any_global_hook

from fmoe.errors import UserError
from fmoe.experts.ffn import FFNExperts, autocast_dtype
from fmoe.kernels.rows import DispatchPlan, weigh_gradient
from fmoe.runtime.adapters import adapted
from fmoe.runtime.phases import phase

# Kinds of module hooks. They see rows and outputs, which one operation of a backend does not have.
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class ExpertCall:
    """One forward pass of a layer's experts: of tokens with `combined`, of rows with `rows`.

    The constructor chooses once how to compute the experts. One operation of a backend (`FFNExperts.operation`) does
    it, unless they have module hooks or dropout, or are no plain `FFNExperts`. Otherwise the module is called. Its
    hooks, such as FSDP's, then run in every call, except for the experts of other ranks.

    Args:
        module: the experts.
        name: the layer's name in errors.
        x_TD: the tokens.
        training: whether the layer is in training mode, in which dropout drops hidden units.

    Attributes:
        is_training: the argument ``training``.
        needs_keys: whether the experts need dropout keys (`FFNExperts.wants_row_keys`). The keys are the last tensor of
            the argument ``inputs`` or ``rows``, int64 [T, 1] or [R, 1].

    Raises:
        UserError: tokens and experts have different dtypes, and autocast is off or one of the dtypes is float64; or the
            experts' backend does not support the tokens.
    """

    module: Any  # an nn.Module; its type lacks the experts' own methods

    def __init__(self, module: nn.Module, name: str, x_TD: Tensor, training: bool):
        self.module = module
        self.name = name
        self.is_training = training
        experts = module if isinstance(module, FFNExperts) else adapted(module)
        self.needs_keys = training and getattr(experts, "wants_row_keys", False)
        dtype = getattr(experts, "dtype", x_TD.dtype)
        # The mixed precision policy of fully_shard casts weights and rows when the experts are called.
        is_managed = getattr(module, "_is_fsdp_managed_module", False)
        if x_TD.dtype != dtype and not is_managed and autocast_dtype(x_TD.device, x_TD.dtype, dtype) is None:
            raise UserError(f"the input of {name} is {x_TD.dtype}, its experts are {dtype}: cast one, or use autocast")
        is_fused = self.is_plain() and not self.needs_keys
        self._operation = self.module.operation(x_TD) if is_fused else None

    def combined(self, inputs: list[Tensor], weight_TK: Tensor, plan: DispatchPlan) -> list[Tensor]:
        """Permute tokens to the order of experts, run the experts, and return the combined outputs.

        Args:
            inputs: the tokens, as tensors [T, ...].
            plan: order of the rows. All its experts are on this rank.
        """
        if self._operation is not None:
            arguments = plan.fused_arguments(weight_TK)
            with phase("experts"):
                return [self.module.fused_forward(self._operation, inputs[0], plan.count_E, **arguments)]
        counts = plan.counts  # the only wait for the device
        rows = [plan.permute(x, sum(counts)) for x in inputs]
        return [plan.combine(y, weight_TK) for y in self.rows(rows, counts)]

    def rows(
        self,
        rows: list[Tensor],
        counts: Sequence[int],
        weight_R: Tensor | None = None,
        parameters: list[list[Tensor]] | None = None,
    ) -> list[Tensor]:
        """Return the experts' outputs for their rows.

        Args:
            rows: tensors [R, ...], sorted by expert.
            counts: number of rows of each expert.
            weight_R: weights by which the backward pass multiplies the gradient of each row's output, for the sender's
                `fmoe.kernels.rows.combine_unsaved`; None for no multiplication.
            parameters: parameters of experts of other ranks (`FFNExperts.shadow`), to use instead of this rank's.

        Raises:
            UserError: the experts returned another number of rows.
        """
        counts_L = torch.tensor(counts, dtype=torch.int64, device="cpu")
        if self._operation is not None and parameters is None:
            with phase("experts"):
                return [self.module.fused_forward(self._operation, rows[0], counts_L, weight_TK=weight_R)]
        with phase("experts"):
            outputs = self.compute(rows, counts_L, parameters)
        for out in outputs:
            if out.shape[0] != sum(counts):
                raise UserError(
                    f"the experts of {self.name} returned {out.shape[0]} rows for {sum(counts)} rows of input"
                )
        return outputs if weight_R is None else [weigh_gradient(y, weight_R) for y in outputs]

    def compute(self, rows: list[Tensor], counts_L: Tensor, parameters: list[list[Tensor]] | None) -> list[Tensor]:
        """Call the module, or run it with the ``parameters`` of other experts. Arguments as in `rows`."""
        keys = [rows[-1].squeeze(1)] if self.needs_keys else []
        if parameters is None:
            return [self.module(rows[0], counts_L, *keys)]
        return [self.module.run_with(parameters, rows[0], counts_L, *keys)]

    def is_plain(self) -> bool:
        """Return whether the module is `FFNExperts` without module hooks, whose ``forward`` is not overridden."""
        is_ffn = isinstance(self.module, FFNExperts) and is_unchanged(self.module, "forward", FFNExperts.forward)
        return is_ffn and not any(getattr(self.module, hooks) for hooks in _HOOKS) and not _has_any_global_hook()


def is_unchanged(owner: object, name: str, function: Callable[..., Any]) -> bool:
    """Return whether the method ``name`` of ``owner`` is ``function``: neither class nor instance overrides it."""
    return getattr(type(owner), name) is function and name not in owner.__dict__
