"""Compilation of CUDA C++ to machine code of one architecture, by NVRTC through cuda.core. It needs no GPU.

cuda.core and NVRTC are optional packages, which are imported only to compile. The kernels include no CUDA headers.
"""

import importlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fmoe.errors import BuildError, CompilerError


class Unusable(BuildError):
    """cuda.core is missing, or has another interface than expected. The message names the remedy."""

    def __init__(self, error: Exception):
        super().__init__(f"cuda.core is not usable ({_first_line(error)}): pip install '{extra()}'")


@dataclass(frozen=True)
class Nvrtc:
    """An installed NVRTC compiler.

    Attributes:
        version: e.g. ``"13.0"``.
        architectures: supported architectures, e.g. ``("sm_80", "sm_90")``.
    """

    version: str
    architectures: tuple[str, ...]

    @property
    def name(self) -> str:
        """Name in messages, such as ``NVRTC 13.0``."""
        return f"NVRTC {self.version}"


@dataclass(frozen=True)
class Code:
    """A compiled file.

    Attributes:
        cubin: machine code.
        symbols: symbol of each requested kernel, by name expression.
        log: output of the compiler: warnings and, on request, registers, spills and shared memory.
    """

    cubin: bytes
    symbols: dict[str, str]
    log: str


def find() -> Nvrtc:
    """Return the compiler of this Python environment, or of this machine's CUDA toolkit.

    Raises:
        BuildError: cuda.core or NVRTC is missing or broken; the message has the command that installs it.
    """
    try:
        importlib.import_module("cuda.core")
        from cuda.bindings import nvrtc
    except Exception as error:  # a damaged installation may raise any class
        raise Unusable(error) from error
    try:
        error_of_version, *version = nvrtc.nvrtcVersion()
        error_of_archs, archs = nvrtc.nvrtcGetSupportedArchs()
    except Exception as error:  # cuda.pathfinder has its own class for a missing library
        raise BuildError(f"NVRTC is not found ({_first_line(error)}): pip install {_package('nvrtc')}") from error
    if error_of_version or error_of_archs:
        reason = error_of_version or error_of_archs
        raise BuildError(f"NVRTC does not work ({reason}): pip install --force-reinstall {_package('nvrtc')}")
    return Nvrtc(".".join(map(str, version)), tuple(f"sm_{number}" for number in archs))


def compile_file(path: Path, kernels: Sequence[str], arch: str, *, verbose: bool = False) -> Code:
    """Compile the CUDA C++ file ``path``.

    Args:
        kernels: name expressions of the kernels to keep, e.g. ``"gather<float>"``.
        arch: one of `Nvrtc.architectures`.
        verbose: list registers, spills and shared memory in `Code.log`.

    Raises:
        CompilerError: compilation fails.
    """
    log = io.StringIO()
    try:
        from cuda.core import Program, ProgramOptions

        options = ProgramOptions(
            name=path.name,
            arch=arch,
            std="c++17",
            include_path=str(path.parent),
            ptxas_options=["-v"] if verbose else None,
        )
        program = Program(path.read_text(encoding="utf-8"), "c++", options)
        try:
            code = program.compile("cubin", name_expressions=tuple(kernels), logs=log)
            symbols = {
                name: symbol.decode() if isinstance(symbol, bytes) else symbol
                for name, symbol in code.symbol_mapping.items()
            }
            return Code(bytes(code.code), symbols, log.getvalue())
        finally:
            program.close()
    except Exception as error:
        text = f"{error}\n{log.getvalue()}".strip()
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\): (catastrophic )?error\b", line)]
        errors.sort(key=lambda line: line.startswith("__nv_name_map"))  # consequences of earlier errors go last
        raise CompilerError([*errors, *lines, type(error).__name__][0], text) from error


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _major() -> int:
    """Return the major version of CUDA that this torch is built for; without CUDA, the newest supported one."""
    return int((torch.version.cuda or "13").split(".")[0])


def extra() -> str:
    """Return the pip extra that installs cuda.core and NVRTC for this torch, such as ``fmoe[cuda]``."""
    return "fmoe[cuda12]" if _major() == 12 else "fmoe[cuda]"


def _package(part: str) -> str:
    return f"nvidia-cuda-{part}{'-cu12' if _major() == 12 else ''}"
