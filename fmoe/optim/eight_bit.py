"""AdamW with 8-bit moments, arXiv 2110.02861: torchao's, which runs on CPUs and GPUs.

Shape letters: B blocks, S elements of a block.
"""

import contextlib
from collections.abc import Callable, Iterator
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
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """One step."""
        loss = None
        if closure is not None:
            with torch.enable_grad():
                loss = closure()
        inner = self._torchao
        inner.state = self.state
        inner.param_groups = [{**group, "amsgrad": False, "lr": _as_tensor(group["lr"])} for group in self.param_groups]
        on_cpu = all(p.device.type == "cpu" for group in self.param_groups for p in group["params"])
        with torch.compiler.set_stance("force_eager" if on_cpu else "default"), _float32_by_default():
            inner.step()
        return loss

    def moment_of(self, parameter: Tensor, name: str, values: Tensor) -> Tensor:
        """``exp_avg`` or ``exp_avg_sq`` of a parameter from numbers.

        Numbers that a moment of the same blocks stood for (``.dequantize()``) give it again, to the last bit of what it
        stands for.
        """
        with _float32_by_default():
            moment = self._torchao._new_buffer(parameter, name == "exp_avg")
        moment.copy_(values)
        if hasattr(moment, "codes"):
            _find_scales(moment, values.float().view(-1, BLOCK))
        return moment


@contextlib.contextmanager
def _float32_by_default() -> Iterator[None]:
    """torchao makes maps, scales and steps in the default dtype."""
    before = torch.get_default_dtype()
    if before == torch.float32:
        yield
        return
    torch.set_default_dtype(torch.float32)
    try:
        yield
    finally:
        torch.set_default_dtype(before)


def _as_tensor(lr: float | Tensor) -> Tensor:
    return lr.float() if isinstance(lr, Tensor) else torch.tensor(lr, dtype=torch.float32, device="cpu")


def _find_scales(moment, values_BS: Tensor) -> None:
    """Scales and codes under which a moment is the values [B, S] exactly, in the blocks that have them.

    The largest magnitude of a block was quantized to 1 or, since the map has no -1, to its lowest value; divided by
    that it is the scale, up to two last bits.
    """
    largest_B = values_BS.abs().amax(1)
    order = moment.qmap.argsort()
    midpoints = (moment.qmap[order][1:] + moment.qmap[order][:-1]) / 2
    codes_BS, scale_B = moment.codes.view(-1, BLOCK), moment.scale
    is_found_B = torch.zeros_like(largest_B, dtype=torch.bool)
    for extreme in (moment.qmap.max(), -moment.qmap.min()):
        for bits in range(-2, 3):
            if extreme <= 0:
                continue  # the map of squares
            tried_B = ((largest_B / extreme).view(torch.int32) + bits).clamp(min=1).view(torch.float32)
            tried_BS = order[torch.bucketize(values_BS / tried_B.unsqueeze(1), midpoints)]
            fits_B = (moment.qmap[tried_BS] * tried_B.unsqueeze(1) == values_BS).all(1) & ~is_found_B
            codes_BS[fits_B], scale_B[fits_B] = tried_BS[fits_B].to(codes_BS.dtype), tried_B[fits_B]
            is_found_B |= fits_B
