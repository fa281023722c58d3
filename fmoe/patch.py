"""``fmoefy``: a model's feed-forward blocks become experts, in place, by one line.

Which models are known is a matter of adapters, entry points of the group ``fmoe.adapters``: a function that takes the
model and returns None if the model is not of its family, else a function of `fmoefy`'s options. So fmoe imports no
model library.
"""

from collections.abc import Callable
from importlib.metadata import entry_points

from torch import nn

from fmoe.errors import UserError

Convert = Callable[..., nn.Module]
Adapter = Callable[[nn.Module], Convert | None]


def fmoefy(model: nn.Module, num_experts: int, **options) -> nn.Module:
    """Turns the feed-forward blocks of ``model`` into Mixture-of-Experts layers, in place; returns it.

    Call it before DDP, a 16-bit wrapper or an optimizer sees the model.

    Args:
        num_experts: experts in all.
        options: ``top_k``, ``gate``, ``layers`` and what else the adapter of the model's family takes (for
            Megatron-core models, `megatron_patch.fmoefy`).

    Raises:
        UserError: no installed adapter knows the model.
    """
    names = []
    for entry in entry_points(group="fmoe.adapters"):
        names.append(entry.name)
        convert = entry.load()(model)
        if convert is not None:
            return convert(model, num_experts=num_experts, **options)
    raise UserError(
        f"fmoefy does not know models of {type(model).__module__}.{type(model).__qualname__}; "
        f"adapters installed: {', '.join(names) or 'none'}"
    )
