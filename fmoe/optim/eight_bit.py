"""AdamW with 8-bit moments, arXiv 2110.02861: torchao's, which runs on CPUs and GPUs."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer

from fmoe.errors import require
from fmoe.optim.checks import check

BLOCK = 256
_SMALLEST = 4096


def is_quantized(numel: int) -> bool:
    """Whether the moments of a tensor of so many elements are held in 8 bits; else they are float32."""
    return numel >= _SMALLEST and numel % BLOCK == 0


class AdamW8bit(Optimizer):
    """AdamW whose moments are 8-bit codes of a dynamic map, with a float32 scale for each 256 consecutive elements.

    A tensor of less than 4,096 elements, or of a number that 256 does not divide, keeps float32 moments. On a GPU
    torchao compiles the update; on a CPU it runs uncompiled. State: ``exp_avg`` and ``exp_avg_sq``, torchao's tensors
    with ``codes`` and ``scale``, and ``step``.

    Raises:
        MissingPackageError: torchao is not installed.
        UserError: a number is out of range.
    """

    def __init__(
        self,
        params,
        lr: float = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0.01,
    ):
        check(lr=lr, betas=betas, eps=eps, weight_decay=weight_decay)
        torchao = require("torchao.optim", "adamw8bit", "AdamW8bit")
        # Beside, not above it: torchao wants the learning rate in a tensor, schedulers put numbers there.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        groups = [dict(group) for group in self.param_groups]
        self._torchao = torchao.AdamW8bit(groups, lr=lr, betas=betas, eps=eps, block_size=BLOCK)

    @torch.no_grad()
    def step(self, closure: Callable[[], Tensor] | None = None) -> Tensor | None:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inner = self._torchao
        inner.state = self.state
        inner.param_groups = [
            {**group, "amsgrad": False, "lr": torch.as_tensor(group["lr"], dtype=torch.float32)}
            for group in self.param_groups
        ]
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        with torch.compiler.set_stance("force_eager" if on_cpu else "default"):
            inner.step()
        return loss

    def new_moment(self, parameter: Tensor, name: str) -> Any:
        """Zeros for ``exp_avg`` or ``exp_avg_sq`` of a tensor."""
        return self._torchao._new_buffer(parameter, name == "exp_avg")
