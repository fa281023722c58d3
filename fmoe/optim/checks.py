"""Checks of optimizer arguments."""

from collections.abc import Mapping

from fmoe.errors import UserError


def check(
    *,
    betas: tuple[float, ...] = (),
    momentum: float = 0.0,
    max_trust: float | None = None,
    positive: Mapping[str, float] | None = None,
    **not_negative: float,
) -> None:
    """Check arguments of an optimizer.

    Args:
        betas, momentum: must be in [0, 1).
        max_trust: must be positive or None.
        positive: values by name that must be positive.
        not_negative: values by name that must be at least 0.

    Raises:
        UserError: a value is NaN or outside its range.
    """
    for name, value in not_negative.items():
        if not float(value) >= 0:
            raise UserError(f"{name}={value} must be at least 0")
    decays = {"momentum": momentum} | {f"betas[{index}]": beta for index, beta in enumerate(betas)}
    for name, value in decays.items():
        if not 0 <= value < 1:
            raise UserError(f"{name}={value} is not in [0, 1)")
    if max_trust is not None and not max_trust > 0:
        raise UserError(f"max_trust={max_trust} is not positive; use None for no bound")
    for name, value in (positive or {}).items():
        if not value > 0:
            raise UserError(f"{name}={value} is not positive")
