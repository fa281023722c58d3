"""Loading of the CUDA backend, kernels that NVRTC compiles once per architecture (docs/cuda.md).

`load` compiles and loads them. Importing this module does not, and needs neither cuda.core nor a GPU.
"""

import logging
import os
import threading

import torch

from fmoe.errors import BuildError, UserError, one_line
from fmoe.kernels.cuda import launch, selfcheck, tuning
from fmoe.kernels.cuda.launch import architecture
from fmoe.kernels.native.loader import switch

logger = logging.getLogger("fmoe")
tuning.self_check = selfcheck.failure

_lock = threading.Lock()
_reasons: dict[str, str | None] = {}  # by architecture: why `load` failed, or None if it succeeded
_warned = False


def load(device: torch.device | int | str | None = None) -> bool:
    """Load the kernels for a GPU, once per architecture; first compile them if the cache lacks them.

    On failure, `why` returns the reason. The logger ``fmoe`` also logs it in one line, unless the backend is off or
    there is no GPU.

    It reads these environment variables:

    * ``FMOE_CUDA=0`` turns the backend off.
    * ``FMOE_CACHE`` is the folder of compiled kernels.

    Args:
        device: a CUDA device; None for the current one.

    Returns:
        True if kernels are loaded for the device.

    Raises:
        UserError: FMOE_CUDA is neither 0 nor 1.
    """
    arch = _architecture(device)
    if arch not in _reasons:
        with _lock:
            if arch not in _reasons:
                _reasons[arch] = _load(arch, device)
    return _reasons[arch] is None


def why(device: torch.device | int | str | None = None) -> str | None:
    """Return why `load` returned False; None if it returned True or was not called."""
    return _reasons.get(_architecture(device))


def is_off() -> bool:
    """Return whether FMOE_CUDA=0 turns the backend off.

    Raises:
        UserError: FMOE_CUDA is neither 0 nor 1.
    """
    return not switch("FMOE_CUDA")


def describe() -> str:
    """Return the state of the backend in one line, for ``fmoe info``. It compiles nothing."""
    from fmoe.kernels.cuda import build, nvrtc

    if is_off():
        return "off (FMOE_CUDA=0): torch path"
    here = architectures()
    built = [arch for arch in dict.fromkeys((*here, *AHEAD)) if build.cached(arch) is not None]
    parts = [f"built for {', '.join(built)}" if built else "nothing built"]
    supported: tuple[str, ...] = ()
    try:
        compiler = nvrtc.find()
        supported = compiler.architectures
        parts.append(compiler.name)
    except BuildError as error:
        parts.append(str(error))
    if not here:
        return ", ".join([*parts, "no GPU here"])
    for arch in here:
        if arch in built:
            continue
        failed = build.last_failure(arch)
        if arch not in supported:
            parts.append(f"no compiler for {arch}: torch path")
        elif failed is not None:
            parts.append(f"{arch} was not built, {failed}: torch path; the next start tries again")
        else:
            parts.append(f"{arch} is built when the first layer is made, or by fmoe build --arch {arch}")
    return ", ".join(parts)


def architectures() -> list[str]:
    """Return the architectures of the GPUs of this machine."""
    if not torch.cuda.is_available():
        return []
    return sorted({architecture(number) for number in range(torch.cuda.device_count())})


AHEAD = ("sm_80", "sm_90", "sm_100")  # architectures for which `describe` also reports kernels built in advance


def _architecture(device: torch.device | int | str | None) -> str:
    """Return `architecture`, or "unusable", with its reason, if torch cannot start CUDA, as in a forked process."""
    try:
        return architecture(device)
    except Exception as error:
        if "unusable" not in _reasons:
            _reasons["unusable"] = _give_up("this GPU", one_line(error, 200, with_type=True))
        return "unusable"


def _load(arch: str, device: torch.device | int | str | None) -> str | None:
    """Register a launcher for the architecture and return None; on failure, return the reason."""
    if is_off():
        return "FMOE_CUDA=0 turns it off"
    if arch in ("cpu", "none"):
        return "there is no CUDA device"
    try:
        launch.launchers[arch] = _launcher(arch)
    except (BuildError, UserError) as error:
        return _give_up(arch, str(error))
    except Exception as error:  # of packages and drivers in versions that nobody has tried: layers run without them
        return _give_up(arch, one_line(error, 200, with_type=True))
    wrong = tuning.failure(torch.device("cuda" if device is None else device))
    if wrong is None:
        return None
    del launch.launchers[arch]
    return _give_up(arch, f"the kernels fail a self-check on this device ({wrong})")


def _give_up(arch: str, reason: str) -> str:
    """Log and return the reason."""
    global _warned  # only the first reason, and only on local rank 0, is a warning
    is_loud = not _warned and os.environ.get("LOCAL_RANK", "0") == "0"
    _warned = True
    level = logging.WARNING if is_loud else logging.INFO
    logger.log(level, "no CUDA kernels for %s: %s; layers run on the torch path", arch, reason)
    return reason


def _launcher(arch: str) -> launch.Launcher:
    from fmoe.kernels import cache
    from fmoe.kernels.cuda import build, nvrtc

    path = build.library(arch)
    failed = cache.identity(path)
    try:
        return launch.DeviceLauncher(build.read(path))
    except nvrtc.Unusable:
        raise
    except BuildError as error:
        logger.info("%s: recompiling", error)
        path = build.library(arch, instead_of=failed)
    return launch.DeviceLauncher(build.read(path))
