"""The figures of other publications: benchmarks with these options, one after the other. See docs/headlines.md."""

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrain.start.ranks import die_with_parent

# Of the layer: two naive layers, in processor seconds of one thread.
_NAIVE = (
    "--shapes",
    "A,fastmoe-half",
    "--only",
    "fmoe native",
    "brute force",
    "token loop",
    *["--threads", "1", "--clock", "cpu", "--patience", "300", "--no-peak"],
)
NUMBERS: dict[str, tuple[str, ...]] = {
    "gpipe": (),
    "zero": (),
    "classes": (),
    "layer": _NAIVE,
    "fastermoe": (),
    "savers": (),
    "recompute": (),
    "scaling": (),
    "large_batch": ("--gap", "0.25", "--gap-of", "lamb"),
}


def command(name: str, out: Path) -> list[str]:
    """Return the command that measures a benchmark and writes its reports to the folder ``out``."""
    return [sys.executable, "-m", "bench", name, *NUMBERS[name], "--out", str(out)]


def measure(names: Sequence[str], folder: Path) -> int:
    """Run the benchmarks that have no reports in ``folder / NAME`` yet.

    A benchmark that fails leaves its reports in ``folder / NAME.unfinished``, and runs again at the next call. The
    others still run.

    Returns:
        0, or the exit code of the first benchmark that failed.
    """
    failed = 0
    for name in names:
        out = folder / name
        if out.exists():
            continue
        unfinished = out.with_suffix(".unfinished")
        unfinished.mkdir(parents=True, exist_ok=True)
        print(f"python -m bench {name} {' '.join(NUMBERS[name])}".rstrip(), flush=True)
        code = subprocess.run(command(name, unfinished), preexec_fn=die_with_parent).returncode
        if code:
            print(f"bench {name} ended with code {code}", flush=True)
            failed = failed or (code if code > 0 else 128 - code)
        else:
            unfinished.rename(out)
    return failed


def reports(names: Sequence[str], folder: Path) -> list[str]:
    """Return the Markdown reports of the finished benchmarks."""
    return [path.read_text() for name in names for path in sorted((folder / name).glob("*.md"))]
