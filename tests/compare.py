"""Norm-wise comparison: element-wise relative differences are large from the order of summation alone."""

from torch import Tensor


def relative_error(actual: Tensor, expected: Tensor) -> float:
    """``|actual - expected| / |expected|`` in 2-norms, in float64; of what is zero up to rounding, the norm of the
    difference."""
    difference = (actual.detach().double() - expected.detach().double()).norm().item()
    scale = expected.detach().double().norm().item()
    return difference / scale if scale > 1e-12 else difference


def assert_close(actual: Tensor, expected: Tensor, limit: float, name: str) -> None:
    """Same shape, and relative error at most ``limit``; the message tells the error."""
    assert actual.shape == expected.shape, f"{name}: shape {tuple(actual.shape)}, expected {tuple(expected.shape)}"
    error = relative_error(actual, expected)
    assert error <= limit, f"{name}: relative error {error:.3g}, limit {limit:.3g}"


def assert_all_close(actual: dict[str, Tensor], expected: dict[str, Tensor], limit: float) -> None:
    """`assert_close` for each tensor of ``expected``."""
    for name, value in expected.items():
        assert_close(actual[name], value, limit, name)
