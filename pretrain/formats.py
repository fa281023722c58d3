"""Numbers and tables as text for people, and numbers as JSON values."""

import math
from collections.abc import Sequence
from typing import overload


def count_text(count: float, units: Sequence[str] = ("K", "M", "B", "T", "P")) -> str:
    """Format a number with three digits and a unit for the power of 1,000: 1.57T.

    Args:
        units: of 1,000 and its powers.
    """
    return _scaled(count, 1000, units) or f"{count:,.0f}"


def size_text(num_bytes: int) -> str:
    """Format bytes in binary units: 12.3 GiB."""
    return _scaled(num_bytes, 1024, (" KiB", " MiB", " GiB", " TiB")) or f"{num_bytes} B"


def _scaled(value: float, base: int, units: Sequence[str]) -> str:
    """Return three digits and the largest unit that fits; empty if ``value`` is less than the first unit."""
    for power in range(len(units), 0, -1):
        scaled = value / base**power
        if scaled >= 0.9995:  # rounds to 1.00
            decimals = next((number for number, limit in ((2, 9.995), (1, 99.95)) if scaled < limit), 0)
            return f"{scaled:,.{decimals}f}{units[power - 1]}"
    return ""


def aligned(rows: Sequence[Sequence[str]]) -> list[str]:
    """Format rows as lines with aligned columns: the first column to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for first, *others in rows:
        cells = [cell.rjust(width) for cell, width in zip(others, widths[1:], strict=True)]
        lines.append("  ".join([first.ljust(widths[0]), *cells]).rstrip())
    return lines


def markdown(rows: Sequence[Sequence[str]]) -> str:
    """Format rows as a Markdown table; the first row is its head."""
    rows = [[cell.replace("|", "\\|") for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = []
    for row in rows:
        cells = [cell.ljust(width) for cell, width in zip(row, widths, strict=True)]
        lines.append(f"| {' | '.join(cells)} |")
    lines.insert(1, "|" + "|".join("-" * (width + 2) for width in widths) + "|")
    return "\n".join(lines)


@overload
def finite(value: float | None) -> float | None: ...
@overload
def finite(value: list[float]) -> list[float | None]: ...
def finite(value):
    """Return a number as a JSON value: None if it is not finite. The same for each number of a list."""
    if isinstance(value, list):
        return [finite(number) for number in value]
    return value if value is not None and math.isfinite(value) else None
