"""Pretraining: recipe, trainer, data, checkpoints, reports."""

import importlib.util
import os
import sys

_ROOT = os.path.dirname(os.path.dirname(os.path.realpath(__file__)))


def leave_working_folder() -> None:
    """Remove the working folder from the module search path, unless it contains this package, as a git clone does.

    ``python -m`` puts the working folder on this path. A ``random.py`` there would be imported instead of the standard
    module. The removal also applies to child processes.

    Exits with code 2 if ``fmoe`` or ``megatron_patch`` is not installed in this package's environment.
    """
    here = os.path.realpath(os.getcwd())
    if not sys.flags.safe_path and os.path.realpath(sys.path[0]) == here:
        if here == _ROOT:
            return
        del sys.path[0]
    os.environ["PYTHONSAFEPATH"] = "1"
    for name in ("fmoe", "megatron_patch"):
        spec = importlib.util.find_spec(name)
        found = os.path.dirname(os.path.dirname(os.path.realpath(spec.origin))) if spec and spec.origin else None
        if found != _ROOT:
            problem = "is missing there; install fmoe again"
            if spec and spec.origin:
                problem = f"comes from {spec.origin}, which hides the real one; check PYTHONPATH"
            sys.stderr.write(f"pretrain: error: pretrain is installed in {_ROOT}, but {name} {problem}\n")
            sys.exit(2)


def safe_environment() -> dict[str, str]:
    """Return ``os.environ`` with variables that keep the working folder off the module search path of child processes.

    A working folder that contains this package, as a git clone does, stays on the path.
    """
    environment = os.environ | {"PYTHONSAFEPATH": "1"}
    if os.path.realpath(os.getcwd()) == _ROOT:
        environment["PYTHONPATH"] = os.pathsep.join([_ROOT, *filter(None, [os.environ.get("PYTHONPATH")])])
    return environment
