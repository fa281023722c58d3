"""``python -m bench NAME [options]``: run one benchmark. Only the module of that benchmark is imported."""

import importlib
import sys

from fmoe.cli import run
from fmoe.errors import EXIT_USAGE, UserError, known_names

# Each module has `main(argv: list[str]) -> int | None`.
BENCHMARKS = {
    "allocator": "bench.allocator",
    "checkpoint": "bench.checkpoint",
    "classes": "bench.classes",
    "context": "bench.context",
    "convergence": "bench.convergence.main",
    "exchange": "bench.exchange",
    "fastermoe": "bench.fastermoe",
    "gpipe": "bench.gpipe",
    "gpu": "bench.gpu",
    "headlines": "bench.headlines.main",
    "large_batch": "bench.large_batch",
    "layer": "bench.layer.main",
    "memory": "bench.memory",
    "optim": "bench.optim",
    "pipeline": "bench.pipeline",
    "recompute": "bench.recompute",
    "routers": "bench.routers",
    "savers": "bench.savers",
    "scaling": "bench.scaling",
    "step": "bench.step.main",
    "zero": "bench.zero",
}

USAGE = "usage: python -m bench NAME [options]      (python -m bench NAME --help for details)"


def main(argv: list[str] | None = None) -> int:
    """Run one benchmark; return its exit code, 2 for invalid input."""
    argv = sys.argv[1:] if argv is None else argv
    if not argv or argv[0] in ("-h", "--help"):
        print(f"{USAGE}\nbenchmarks: {', '.join(BENCHMARKS)}")
        return 0 if argv else EXIT_USAGE
    name, *rest = argv
    return run("python -m bench", lambda: _module(name).main(rest))


def _module(name: str):
    if name not in BENCHMARKS:
        raise UserError(f"unknown benchmark {name!r}; {known_names(name, BENCHMARKS)}")
    return importlib.import_module(BENCHMARKS[name])


if __name__ == "__main__":
    sys.exit(main())
