"""Loading of the native CPU backend, C++ that is compiled once per machine (docs/native.md).

`load` compiles and loads it, and registers the operators ``torch.ops.fmoe_native``. Importing this module does not.
"""

import logging
import os
import threading
from dataclasses import dataclass
from pathlib import Path

import torch

from fmoe.errors import BuildError, UserError, one_line
from fmoe.kernels.native.ops import register

logger = logging.getLogger("fmoe")


@dataclass(frozen=True)
class _Outcome:
    path: Path | None = None
    reason: str | None = None


_lock = threading.Lock()
_outcome: _Outcome | None = None


def load() -> bool:
    """Load the backend; first build it if the cache lacks it. Later calls return the result of the first.

    On failure, `why` returns the reason. The logger ``fmoe`` also logs it in one line, unless the backend is off.

    It reads these environment variables:

    * ``FMOE_NATIVE=0`` turns the backend off.
    * ``FMOE_HUGE_PAGES=0`` keeps memory on small pages.
    * ``FMOE_CACHE`` is the folder of built libraries.
    * ``FMOE_SANITIZE=address,undefined`` loads the build with these sanitizers.
    * ``FMOE_NATIVE_ISA`` limits the instruction set.
    * ``CXX`` is the compiler.

    Returns:
        True if ``torch.ops.fmoe_native`` has the operations.

    Raises:
        UserError: FMOE_NATIVE is invalid. If the backend is on: FMOE_HUGE_PAGES, FMOE_SANITIZE or FMOE_NATIVE_ISA is
            invalid.
    """
    global _outcome
    if _outcome is None:
        with _lock:
            if _outcome is None:
                _outcome = _load()
    return is_loaded()


def is_loaded() -> bool:
    """Return whether `load` was called and succeeded."""
    return _outcome is not None and _outcome.path is not None


def available() -> bool:
    """Return whether `load` succeeded; before it is called, whether the backend is on and its library is cached.

    This function loads nothing.
    """
    if _outcome is not None:
        return _outcome.path is not None
    return not is_off() and _cached() is not None


def why() -> str | None:
    """Return why `load` returned False; None if it returned True or was not called."""
    return None if _outcome is None else _outcome.reason


def is_off() -> bool:
    """Return whether FMOE_NATIVE=0 turns the backend off.

    Raises:
        UserError: FMOE_NATIVE is neither 0 nor 1.
    """
    return not switch("FMOE_NATIVE")


def switch(name: str) -> bool:
    """Return whether the environment variable ``name`` is on. It is on by default.

    Raises:
        UserError: the value is neither 0 (off) nor 1 (on).
    """
    value = os.environ.get(name, "")
    if value not in ("", "0", "1"):
        raise UserError(f"{name}={value!r} must be 0 (off) or 1 (on)")
    return value != "0"


def describe() -> str:
    """Return the state of the backend in one line, for ``fmoe info``. It compiles nothing."""
    from fmoe.kernels.native import build, compiler

    if is_off():
        return "off (FMOE_NATIVE=0): torch path"
    try:
        path = build.cached(sanitize=_sanitizers())
        if path is not None:
            return f"built ({compiler.current_isa()}) at {path}"
        failed = build.last_failure()
        if failed is not None:
            return f"not built, {failed}: torch path; the next start tries again"
        cxx = compiler.find()
    except BuildError as error:
        return f"{error}: torch path"
    return f"not built yet, {cxx.name} found: built when the first layer is made, or by fmoe build"


def _load() -> _Outcome:
    if is_off():
        return _Outcome(reason="FMOE_NATIVE=0 turns it off")
    from fmoe.kernels.native import compiler

    sanitize = _sanitizers()
    huge_pages = switch("FMOE_HUGE_PAGES")
    compiler.isa_limit()  # an invalid FMOE_NATIVE_ISA is an error, which the library itself does not check
    try:
        path = _load_library(sanitize)
    except BuildError as error:
        # One process per machine logs a warning.
        level = logging.WARNING if os.environ.get("LOCAL_RANK", "0") == "0" else logging.INFO
        logger.log(level, "no native CPU backend: %s; experts run on the torch path", error)
        return _Outcome(reason=str(error))
    register(huge_pages)
    return _Outcome(path)


def _load_library(sanitize: tuple[str, ...]) -> Path:
    from fmoe.kernels import cache
    from fmoe.kernels.native import build

    if "address" in sanitize and "libasan" not in Path("/proc/self/maps").read_text():
        raise BuildError(
            f"FMOE_SANITIZE={','.join(sanitize)} needs AddressSanitizer's runtime in the process from its start: set "
            'LD_PRELOAD="$(g++ -print-file-name=libasan.so) $(g++ -print-file-name=libstdc++.so.6)"'
        )
    path = build.library(sanitize=sanitize)
    failed = cache.identity(path)
    try:
        return _dlopen(path)
    except BuildError as error:
        logger.info("%s: rebuilding", error)
        try:
            path = build.library(sanitize=sanitize, instead_of=failed)
        except BuildError as again:
            raise BuildError(f"{error}, and rebuilding failed: {again}") from again
    return _dlopen(path)


def _dlopen(path: Path) -> Path:
    try:
        torch.ops.load_library(path)
    except OSError as error:
        raise BuildError(f"{path} does not load: {one_line(error.__cause__ or error)}") from error
    return path


def _cached() -> Path | None:
    from fmoe.kernels.native import build

    try:
        return build.cached(sanitize=_sanitizers())
    except BuildError:
        return None


def _sanitizers() -> tuple[str, ...]:
    value = os.environ.get("FMOE_SANITIZE", "")
    if not value:
        return ()
    from fmoe.kernels.native import compiler

    return compiler.sanitizers(value)
