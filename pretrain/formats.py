"""Numbers and tables as text for people, and numbers as JSON values."""

import math
from collections.abc import Sequence
from typing import overload


def count_text(count: float) -> str:
    """Format a number with three digits and a letter for the power of 1,000: 1.57T."""
    for letter, unit in (("P", 1e15), ("T", 1e12), ("B", 1e9), ("M", 1e6), ("K", 1e3)):
        if count >= unit:
            return f"{_three_digits(count / unit)}{letter}"
    return f"{count:,.0f}"


def size_text(num_bytes: int) -> str:
    """Format bytes in binary units: 12.3 GiB."""
    for name, unit in (("TiB", 2**40), ("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if num_bytes >= unit:
            return f"{_three_digits(num_bytes / unit)} {name}"
    return f"{num_bytes} B"


def _three_digits(value: float) -> str:
    for decimals, limit in ((2, 9.995), (1, 99.95)):
        if value < limit:
            return f"{value:.{decimals}f}"
    return f"{value:,.0f}"


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
