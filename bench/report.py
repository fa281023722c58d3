"""Reports of a benchmark: a Markdown table for people, and every single time as JSON for programs."""

import json
import os
import platform
import re
from collections.abc import Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch

from bench.frame import Measurement, geometric_mean_of_ratios


def describe_machine() -> dict[str, Any]:
    """Return what the times depend on besides the code, without host name and paths."""
    facts: dict[str, Any] = {
        "cpu": _cpu_model(),
        "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
        "threads": torch.get_num_threads(),
        "torch": torch.__version__,
        "python": platform.python_version(),
        "date": datetime.now(UTC).date().isoformat(),
    }
    if torch.cuda.is_available():
        facts["gpu"] = torch.cuda.get_device_name()
    return facts


def write(
    measurements: Sequence[Measurement],
    out_dir: Path,
    title: str,
    machine: dict[str, Any] | None = None,
    notes: Sequence[str] = (),
    means: bool = True,
    is_shown: bool = True,
) -> tuple[Path, Path]:
    """Write ``NAME.json`` and ``NAME.md`` and print the latter; NAME is the title in lower case with dashes.

    Args:
        measurements: the rows of the report.
        out_dir: folder, created if missing; reports of the same name are replaced.
        title: title of the report.
        machine: description of the machine; by default from `describe_machine`.
        notes: Markdown lines below the table.
        means: whether geometric means over the rows are meaningful.
        is_shown: whether to print the report.

    Returns:
        The paths of the two files.
    """
    facts = describe_machine() if machine is None else machine
    out_dir.mkdir(parents=True, exist_ok=True)
    name = file_name(title)
    json_path = out_dir / f"{name}.json"
    markdown_path = out_dir / f"{name}.md"
    values = {"title": title, "machine": facts, "measurements": [row.to_json() for row in measurements]}
    if notes:
        values["notes"] = list(notes)
    json_path.write_text(json.dumps(values, indent=1, allow_nan=False) + "\n")
    text = markdown(measurements, title, facts, notes, means)
    markdown_path.write_text(text)
    if is_shown:
        print(text)
    return json_path, markdown_path


def file_name(title: str) -> str:
    """Return the name of a report's files, without suffix."""
    return re.sub(r"[^a-z0-9]+", "-", title.lower()).strip("-")


def write_rows(values: Any, text: str, out_dir: Path, name: str) -> None:
    """Write values and the machine as ``NAME.json``, and a text as ``NAME.md``, for a benchmark without `Measurement`;
    print the text.
    """
    out_dir.mkdir(parents=True, exist_ok=True)
    (out_dir / f"{name}.json").write_text(json.dumps({"machine": describe_machine(), "rows": values}, indent=1) + "\n")
    (out_dir / f"{name}.md").write_text(text)
    print(text)


def read(path: Path) -> list[Measurement]:
    """Return the measurements of a JSON report."""
    return [Measurement.from_json(values) for values in json.loads(path.read_text())["measurements"]]


def markdown(
    measurements: Sequence[Measurement],
    title: str,
    machine: dict[str, Any],
    notes: Sequence[str] = (),
    means: bool = True,
) -> str:
    """Return the report as Markdown, with padded columns, so that it is also readable in a terminal."""
    lines = [f"# {title}", "", *rows_table(measurements), ""]
    lines += _notes(measurements, means)
    if notes:
        lines += ["", *notes]
    lines += ["", "Machine: " + ", ".join(f"{key} {value}" for key, value in machine.items()) + "."]
    return "\n".join(lines) + "\n"


def rows_table(measurements: Sequence[Measurement]) -> list[str]:
    """Return the lines of the table of all contenders of the rows."""
    has_label = any(row.label for row in measurements)
    units = list(dict.fromkeys(row.unit for row in measurements if row.work))
    facts = list(dict.fromkeys(fact for row in measurements for values in row.facts.values() for fact in values))
    header = ["row"] * has_label + ["contender", "median", "quartiles", "ratio [95% interval]"]
    cells = [[*header, *(f"{unit}/s" for unit in units), *facts]]
    for row in measurements:
        for name in row.seconds:
            first, median, third = row.quartiles(name)
            throughput = row.throughput(name)
            cells.append(
                [row.label] * has_label
                + [name, duration(median), f"{duration(first)} - {duration(third)}", _ratio_cell(row, name)]
                + [f"{throughput:,.0f}" if throughput is not None and row.unit == unit else "" for unit in units]
                + [row.facts.get(name, {}).get(fact, "") for fact in facts]
            )
    return table(cells)


def duration(seconds: float) -> str:
    """Format seconds with four digits and a suitable unit."""
    for factor, unit in ((1, "s"), (1e3, "ms"), (1e6, "us")):
        if seconds * factor >= 1:
            return f"{seconds * factor:.4g} {unit}"
    return f"{seconds * 1e9:.4g} ns"


def _notes(measurements: Sequence[Measurement], means: bool) -> list[str]:
    settings = dict.fromkeys(
        f"{row.rounds} rounds after {row.warmup} warm-up runs, order shuffled with seed {row.seed}"
        for row in measurements
    )
    references = dict.fromkeys(row.reference for row in measurements)
    notes = [
        f"Ratio: time of the reference ({', '.join(references)}) over time of the contender, round by round; above 1 "
        "the contender is faster. Geometric mean, a fifth trimmed on either side, and Student's interval. "
        f"{'; '.join(settings)}."
    ]
    if len(measurements) > 1 and means:
        names = dict.fromkeys(name for row in measurements for name in row.seconds if name != row.reference)
        over_rows = {name: geometric_mean_of_ratios(measurements, name) for name in names}
        notes += ["", *(f"* geometric mean over {len(measurements)} rows: {n} {m}" for n, m in over_rows.items() if m)]
    failed = failures(measurements)
    return notes + (["", *failed] if failed else [])


def failures(measurements: Sequence[Measurement]) -> list[str]:
    """Return a line for each contender that failed."""
    return [
        f"* failed{f' ({row.label})' if row.label else ''}: {name}, {reason}"
        for row in measurements
        for name, reason in row.failures.items()
    ]


def _ratio_cell(row: Measurement, name: str) -> str:
    if name == row.reference:
        return "reference"
    ratio = row.ratio(name)
    return "reference failed" if ratio is None else str(ratio)


def table(cells: Sequence[Sequence[str]]) -> list[str]:
    """Return the lines of a Markdown table; the first row is the header."""
    # An unescaped bar would end the cell.
    escaped = [[cell.replace("|", "\\|") for cell in row] for row in cells]
    widths = [max(3, *map(len, column)) for column in zip(*escaped, strict=True)]
    lines = ["| " + " | ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)) + " |" for row in escaped]
    return [lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]]


def _cpu_model() -> str:
    try:
        with open("/proc/cpuinfo") as file:
            for line in file:
                if line.startswith("model name"):
                    return line.partition(":")[2].strip()
    except OSError:
        pass
    return platform.processor() or platform.machine()
