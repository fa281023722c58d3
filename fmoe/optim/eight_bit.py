"""torchao's AdamW with 8-bit moments (arXiv 2110.02861), for CPUs and GPUs.

Shape letters: B blocks, S elements per block.
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


class AdamW8bit(Optimizer):
    """AdamW with 8-bit moments: indices into a map of 256 values, and a float32 scale per 256 consecutive elements.

    A tensor has moments in its own dtype if it has fewer than 4,096 elements, or their number is not a multiple of 256.
    If all parameters are on a CPU, the update runs eagerly. Otherwise torchao compiles it. The state is ``step`` and
    the moments ``exp_avg`` and ``exp_avg_sq``. 8-bit moments are torchao's tensors with ``codes`` and ``scale``.

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
        # Wrapped, not inherited: torchao needs the learning rate as a tensor, but schedulers assign numbers.
        super().__init__(params, {"lr": lr, "betas": betas, "eps": eps, "weight_decay": weight_decay})
        groups = [dict(group) for group in self.param_groups]
        self._torchao = torchao.AdamW8bit(groups, lr=lr, betas=betas, eps=eps, block_size=BLOCK)

    @torch.no_grad()
    def step(self, closure: Callable[[], Any] | None = None) -> Any:
        """Take one step."""
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
        """Return ``values`` in the format of the parameter's moment ``name``: 8-bit, or in the parameter's dtype.

        Values that come from ``.dequantize()`` of a moment with the same blocks are reproduced exactly.
        """
        with _float32_by_default():
            moment = self._torchao._new_buffer(parameter, name == "exp_avg")
        moment.copy_(values)
        if hasattr(moment, "codes"):
            _find_scales(moment, values.float().view(-1, BLOCK))
        return moment


@contextlib.contextmanager
def _float32_by_default() -> Iterator[None]:
    """Set torch's default dtype to float32 within this context."""
    # torchao makes maps, scales and steps in the default dtype.
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
    """Set scale and codes of each block of ``moment`` that can hold ``values_BS`` exactly; keep the other blocks."""
    # The largest magnitude of a block was quantized to q = 1 or, because the map has no -1, to the map's lowest value
    # q < 0. The scale is this magnitude divided by abs(q), up to two units in the last place.
    largest_B = values_BS.abs().amax(1)
    order = moment.qmap.argsort()
    midpoints = (moment.qmap[order][1:] + moment.qmap[order][:-1]) / 2
    codes_BS = moment.codes.view(-1, BLOCK)
    is_found_B = torch.zeros_like(largest_B, dtype=torch.bool)
    for extreme in (moment.qmap.max(), -moment.qmap.min()):
        for bits in range(-2, 3):
            if extreme <= 0:
                continue  # exp_avg_sq: its map has no negative values
            tried_B = ((largest_B / extreme).view(torch.int32) + bits).clamp(min=1).view(torch.float32)
            tried_BS = order[torch.bucketize(values_BS / tried_B.unsqueeze(1), midpoints)]
            fits_B = (moment.qmap[tried_BS] * tried_B.unsqueeze(1) == values_BS).all(1) & ~is_found_B
            codes_BS[fits_B] = tried_BS[fits_B].to(codes_BS.dtype)
            moment.scale[fits_B] = tried_B[fits_B]
            is_found_B |= fits_B
