"""torch's Adafactor (arXiv 1804.04235), with each expert as a separate tensor."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from fmoe.optim.adafactor_shards import ShardedAdafactor
from fmoe.optim.layout import Shards, has_mark, is_matrix, loss_of
from fmoe.runtime import ownership


class Adafactor(torch.optim.Adafactor):
    """`torch.optim.Adafactor` in which each expert of a stacked weight has its own scale and its own clipped update.

    torch's class takes root mean squares of weight and update over the whole tensor. An expert's step would then depend
    on the other experts of its stack. Here each expert is stepped separately. An empty parameter is skipped.

    The state is ``row_var`` [..., m, 1] and ``col_var`` [..., 1, n] of a matrix [..., m, n], ``variance`` of a vector,
    and ``step``. The arguments are the same as in torch's class. Set weight decay by parameter group
    (`fmoe.optim.param_groups`).
    """

    _sharded: ShardedAdafactor | None = None

    def set_shards(self, shards: Shards) -> None:
        """Set which range of a parameter each optimized tensor holds. The tensors are flat.

        A rank keeps the whole ``row_var`` and ``col_var`` of each matrix of which it has a range, if only an empty one,
        in the state of its first tensor of the matrix. From then on, all ranks of the process group in ``shards`` must
        take the same steps.
        """
        self._sharded = ShardedAdafactor(shards)

    def keeps_factors(self, tensor: Tensor) -> bool:
        """Return whether the state of ``tensor`` has the factors of its parameter, if that is a matrix."""
        return self._sharded is None or self._sharded.keeps_factors(tensor)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step, together with all ranks of the process group given to `set_shards`."""
        if self._sharded is None:
            return super().step(closure)
        loss = loss_of(closure)
        self._sharded.step(self)
        return loss

    def _init_group(self, group, params_with_grad, grads, row_vars, col_vars, variances, state_steps) -> bool:
        ownership.refresh()
        for parameter in group["params"]:
            if has_mark(parameter) and not is_matrix(parameter) and not self.state[parameter]:
                # torch would factor stacked biases as a matrix.
                self.state[parameter] |= {
                    "step": torch.tensor(0.0, dtype=torch.float32, device="cpu"),
                    "variance": torch.zeros_like(parameter),
                }
        lists = (params_with_grad, grads, row_vars, col_vars, variances, state_steps)
        # torch divides by the number of elements.
        group = {**group, "params": [parameter for parameter in group["params"] if parameter.numel()]}
        whole: tuple[list[Tensor | None], ...] = ([], [], [], [], [], [])
        has_complex = super()._init_group(group, *whole)
        for columns in zip(*whole, strict=True):
            for one in _experts(*columns) if has_mark(columns[0]) else [columns]:
                for values, value in zip(lists, one, strict=True):
                    values.append(value)
        return has_complex


def _experts(*columns):
    """Yield each expert's slices of the tensors in ``columns``. The last column is the step, which has no slices."""
    *tensors, step = columns  # torch increments `step` once per expert: all but the first get a copy
    for expert in range(tensors[0].shape[0]):
        views = [None if tensor is None else tensor[expert] for tensor in tensors]
        yield *views, step if expert == 0 else step.clone()
