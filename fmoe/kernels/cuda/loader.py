"""The CUDA backend: kernels that NVRTC compiles for the GPU at hand, when the first layer is made (docs/cuda.md).

Importing this compiles and loads nothing, and needs neither cuda.core nor a GPU. `load` does.
"""

import logging
import os
import threading
from dataclasses import dataclass

import torch

from fmoe.errors import BuildError, UserError
from fmoe.kernels.cuda.launch import Launcher

logger = logging.getLogger("fmoe")


@dataclass(frozen=True)
class _Outcome:
    launcher: Launcher | None = None
    reason: str | None = None


_lock = threading.Lock()
_outcomes: dict[str, _Outcome] = {}  # by architecture; "cpu" is for tests, which run the kernels there
_of_device: dict[torch.device, str] = {}
_warned = False


def load(device: torch.device | int | str | None = None) -> bool:
    """Compiles the kernels for a GPU if this machine has not, and loads them; later calls return what the first did.

    If that cannot be, a line on the logger ``fmoe`` says why, once, and `why` tells it. Environment variables:
    FMOE_CUDA=0 turns the backend off; FMOE_CACHE is the folder of what was compiled.

    Args:
        device: a CUDA device; None for the current one.

    Returns:
        Whether there are kernels for it.

    Raises:
        UserError: FMOE_CUDA has a value that it cannot have.
    """
    arch = _arch(device)
    if arch not in _outcomes:
        with _lock:
            if arch not in _outcomes:
                _outcomes[arch] = _load(arch)
                if _outcomes[arch].launcher is not None and (wrong := _try_out(device)) is not None:
                    _outcomes[arch] = _give_up(arch, wrong)
    return _outcomes[arch].launcher is not None


def launcher(device: torch.device) -> Launcher | None:
    """What starts kernels on a device; None where `load` was not called for it, or did not succeed."""
    arch = _of_device.get(device)
    if arch is None:
        if device.type == "cuda" and not _outcomes:
            return None
        arch = _of_device[device] = _arch(device)
    outcome = _outcomes.get(arch)
    return None if outcome is None else outcome.launcher


def is_loaded(device: torch.device) -> bool:
    """Whether `launcher` has one. A constant for torch.compile."""
    return bool(_outcomes) and launcher(device) is not None


# What torch.compiler.assume_constant_result sets, whose call imports torch._dynamo: as long again as torch itself.
is_loaded._dynamo_marked_constant = True


def why(device: torch.device | int | str | None = None) -> str | None:
    """Why `load` returned False; None if it returned True or was not called."""
    outcome = _outcomes.get(_arch(device))
    return None if outcome is None else outcome.reason


def is_off() -> bool:
    """Whether FMOE_CUDA=0 turns the backend off.

    Raises:
        UserError: FMOE_CUDA is neither 0 nor 1.
    """
    value = os.environ.get("FMOE_CUDA", "")
    if value not in ("", "0", "1"):
        raise UserError(f"FMOE_CUDA={value!r} is neither 0 (off) nor 1")
    return value == "0"


def describe() -> str:
    """What runs, or would: the line of ``fmoe info``. Compiles nothing."""
    from fmoe.kernels.cuda import build, nvrtc

    if is_off():
        return "off (FMOE_CUDA=0): torch path"
    here = architectures()
    built = [arch for arch in dict.fromkeys((*here, *AHEAD)) if build.cached(arch) is not None]
    parts = [f"built for {', '.join(built)}" if built else "nothing built"]
    try:
        parts.append(nvrtc.find().name)
    except BuildError as error:
        parts.append(str(error))
    if not here:
        return ", ".join([*parts, "no GPU here"])
    missing = [arch for arch in here if arch not in built]
    for arch in missing:
        failed = build.last_failure(arch)
        if failed is not None:
            parts.append(f"{arch} was not built, {failed}: torch path; the next start tries again")
        else:
            parts.append(f"{arch} is built when the first layer is made, or by fmoe build --arch {arch}")
    return ", ".join(parts)


def architectures() -> list[str]:
    """Of the GPUs of this machine."""
    if not torch.cuda.is_available():
        return []
    return sorted({_arch(number) for number in range(torch.cuda.device_count())})


AHEAD = ("sm_80", "sm_90", "sm_100")  # what `describe` looks for beside the GPUs that are here


def _arch(device: torch.device | int | str | None) -> str:
    if device is not None and torch.device(device).type == "cpu":
        return "cpu"
    if not torch.cuda.is_available():
        return "none"
    major, minor = torch.cuda.get_device_capability(device)
    return f"sm_{major}{minor}"


def _try_out(device: torch.device | int | str | None) -> str | None:
    """Why the kernels that were loaded are not to be used on a device; None where they compute what they should."""
    from fmoe.kernels.cuda import selfcheck

    try:
        with torch.enable_grad(), torch.autocast("cuda", enabled=False):
            wrong = selfcheck.failure(torch.device("cuda" if device is None else device))
    except Exception as error:  # of the driver, of cuda.core, of torch: layers can do without
        wrong = f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"
    return None if wrong is None else f"they fail a trial on this device ({wrong})"


def _give_up(arch: str, why: str) -> _Outcome:
    """Of the processes of a machine one says it aloud, once."""
    global _warned
    is_loud = not _warned and os.environ.get("LOCAL_RANK", "0") == "0"
    _warned = True
    level = logging.WARNING if is_loud else logging.INFO
    logger.log(level, "no CUDA kernels for %s: %s; layers run on the torch path", arch, why)
    return _Outcome(reason=why)


def _load(arch: str) -> _Outcome:
    if is_off():
        return _Outcome(reason="FMOE_CUDA=0 turns it off")
    if arch in ("cpu", "none"):
        return _Outcome(reason="there is no CUDA device")
    try:
        return _Outcome(_loaded(arch))
    except (BuildError, UserError) as error:
        return _give_up(arch, str(error))


def _loaded(arch: str) -> Launcher:
    from fmoe.kernels import cache
    from fmoe.kernels.cuda import build
    from fmoe.kernels.cuda.launch import DeviceLauncher

    path = build.library(arch)
    failed = cache.identity(path)
    try:
        return DeviceLauncher(build.read(path))
    except BuildError as error:
        logger.info("%s: compiling it again", error)
        path = build.library(arch, instead_of=failed)
    return DeviceLauncher(build.read(path))
