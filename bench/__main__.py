"""``python -m bench NAME [options]``: run one benchmark. Only the module of that benchmark is imported."""

import importlib
import sys

from fmoe.cli import run
from fmoe.errors import EXIT_USAGE, UserError, known_names

# Each module has `main(argv: list[str]) -> int | None`.
BENCHMARKS = {
    "allocator": "bench.studies.allocator",
    "checkpoint": "bench.studies.checkpoint",
    "classes": "bench.studies.classes",
    "context": "bench.studies.context",
    "convergence": "bench.convergence.main",
    "exchange": "bench.exchange",
    "experts": "bench.studies.experts",
    "fastermoe": "bench.studies.fastermoe",
    "gpipe": "bench.studies.gpipe",
    "gpu": "bench.gpu",
    "headlines": "bench.studies.headlines.main",
    "large_batch": "bench.studies.large_batch",
    "layer": "bench.layer.main",
    "memory": "bench.studies.memory",
    "optim": "bench.studies.optim",
    "pipeline": "bench.studies.pipeline",
    "plan": "bench.studies.plan",
    "published": "bench.studies.published",
    "recommender": "bench.studies.recommender",
    "recompute": "bench.studies.recompute",
    "routers": "bench.studies.routers",
    "savers": "bench.studies.savers",
    "scaling": "bench.studies.scaling",
    "step": "bench.step.main",
    "tasks": "bench.studies.tasks",
    "zero": "bench.studies.zero",
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
