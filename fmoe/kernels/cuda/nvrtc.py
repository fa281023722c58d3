"""NVRTC by cuda.core: from CUDA C++ to machine code of one architecture, on machines without a GPU too.

cuda.core and NVRTC are optional packages, imported when something is compiled. Nothing else is needed: the
kernels include no headers of CUDA.
"""

import importlib
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from fmoe.errors import BuildError


@dataclass(frozen=True)
class Nvrtc:
    """The compiler that was found.

    Attributes:
        version: e.g. ``"13.0"``.
        architectures: that it compiles for, e.g. ``("sm_80", "sm_90")``.
    """

    version: str
    architectures: tuple[str, ...]

    @property
    def name(self) -> str:
        """For messages."""
        return f"NVRTC {self.version}"


@dataclass(frozen=True)
class Code:
    """A compiled file.

    Attributes:
        cubin: machine code.
        symbols: the name in it of each kernel that was asked for.
        log: output of the compiler: warnings, and registers and spills on request.
    """

    cubin: bytes
    symbols: dict[str, str]
    log: str


def find() -> Nvrtc:
    """The compiler of this Python environment, or of this machine's CUDA toolkit.

    Raises:
        BuildError: cuda.core or NVRTC is missing; the line names the package that brings it.
    """
    try:
        importlib.import_module("cuda.core")
        from cuda.bindings import nvrtc
    except ImportError as error:
        raise BuildError(f"cuda.core is not installed ({_first_line(error)}): pip install '{_extra()}'") from error
    try:
        (code, *version), (other, known) = nvrtc.nvrtcVersion(), nvrtc.nvrtcGetSupportedArchs()
    except Exception as error:  # cuda.pathfinder's own, of the library that it does not find
        raise BuildError(f"NVRTC is not found ({_first_line(error)}): pip install {_package('nvrtc')}") from error
    if code or other:
        raise BuildError(f"NVRTC does not work ({code or other}): pip install --force-reinstall {_package('nvrtc')}")
    return Nvrtc(".".join(map(str, version)), tuple(f"sm_{number}" for number in known))


def compile_file(path: Path, kernels: Sequence[str], arch: str, *, verbose: bool = False) -> Code:
    """Compiles one file, of which ``kernels`` are kept: name expressions, e.g. ``"gather<float>"``.

    Args:
        arch: one of `Nvrtc.architectures`.
        verbose: have `Code.log` list registers, spills and shared memory.

    Raises:
        BuildError: the first error of the compiler, and below it the whole output.
    """
    from cuda.core import Program, ProgramOptions

    chosen = ProgramOptions(
        name=path.name,
        arch=arch,
        std="c++17",
        include_path=str(path.parent),
        ptxas_options=["-v"] if verbose else None,
    )
    log = io.StringIO()
    try:
        program = Program(path.read_text(encoding="utf-8"), "c++", chosen)
        try:
            made = program.compile("cubin", name_expressions=tuple(kernels), logs=log)
            symbols = {name: _text(symbol) for name, symbol in made.symbol_mapping.items()}
            return Code(bytes(made.code), symbols, log.getvalue())
        finally:
            program.close()
    except Exception as error:
        text = f"{error}\n{log.getvalue()}".strip()
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\): (catastrophic )?error\b", line)]
        errors.sort(key=lambda line: line.startswith("__nv_name_map"))  # what follows from an error of a file
        raise BuildError(f"{[*errors, *lines, type(error).__name__][0]}\n{text}") from error


def _text(symbol: bytes | str) -> str:
    return symbol.decode() if isinstance(symbol, bytes) else symbol


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]


def _major() -> int:
    """Major version of the CUDA that this torch is built for; without CUDA the newest that we support."""
    return int((torch.version.cuda or "13").split(".")[0])


def _extra() -> str:
    return "fmoe[cuda12]" if _major() == 12 else "fmoe[cuda]"


def _package(part: str) -> str:
    return f"nvidia-cuda-{part}{'-cu12' if _major() == 12 else ''}"
