"""The C++ compiler of this machine, and its flags."""

import ctypes
import os
import platform
import re
import shlex
import shutil
import subprocess
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import torch

from fmoe.errors import BuildError, UserError

CANDIDATES = ("c++", "g++", "clang++")
SANITIZERS = ("address", "undefined")

_ALWAYS = (
    "-std=c++20",
    "-fPIC",
    "-fvisibility=hidden",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-pipe",
)
_OPTIMIZED = ("-O3", "-DNDEBUG")
_SANITIZED = ("-O1", "-g", "-fno-omit-frame-pointer")
# Instruction sets in ascending order, in which their objects are linked (`isas`).
_X86_64 = {
    "default": (),
    "avx2": ("-mavx2", "-mfma"),
    "avx512": ("-mavx512f", "-mavx512bw", "-mavx512dq", "-mavx512vl", "-mfma", "-mprefer-vector-width=512"),
}


@dataclass(frozen=True)
class Compiler:
    """A C++ compiler.

    Attributes:
        command: words of its command, beginning with the path of the program.
        version: first line of its ``--version``.
        is_gnu: whether it is g++, not clang.
    """

    command: tuple[str, ...]
    version: str
    is_gnu: bool

    @property
    def name(self) -> str:
        """Name in messages, such as ``g++ 12.2.0``."""
        numbers = re.findall(r"\d+(?:\.\d+)+", self.version)
        return " ".join([Path(self.command[-1]).name, *numbers[-1:]])


def find() -> Compiler:
    """Return the C++ compiler of the environment variable CXX or, without it, the first suitable one of `CANDIDATES`.

    A compiler is suitable if the code that it compiles can use torch's OpenMP library.

    Raises:
        BuildError: no compiler is found, or none is suitable.
    """
    named = os.environ.get("CXX", "").strip()
    if named:
        words = shlex.split(named)
        program = shutil.which(words[0])
        if program is None:
            raise BuildError(f"no C++ compiler: there is no program {words[0]!r} (CXX={named!r})")
        commands = [(program, *words[1:])]
    else:
        commands = [(program,) for program in map(shutil.which, CANDIDATES) if program is not None]
    unsuitable = []
    for command in commands:
        compiler = _ask(command)
        if _suits(compiler):
            return compiler
        unsuitable.append(compiler)
    if not unsuitable:
        raise BuildError(f"no C++ compiler: none of {', '.join(CANDIDATES)} is on PATH; install one, or set CXX")
    raise BuildError(
        f"{unsuitable[0].name} does not fit the OpenMP library that torch has loaded: install g++, or set CXX to it"
    )


def environment(folder: Path | None = None) -> dict[str, str]:
    """Return the environment variables for a compiler.

    They set English messages and the folder for temporary files. They omit LD_PRELOAD: a preloaded sanitizer is for the
    program under test, not for the compiler.
    """
    variables = {**os.environ, "LC_ALL": "C"}
    variables.pop("LD_PRELOAD", None)
    if folder is not None:
        variables["TMPDIR"] = str(folder)
    return variables


def isas() -> dict[str, tuple[str, ...]]:
    """Return the instruction sets of this architecture in ascending order, with their compiler flags.

    Objects must be linked in this order. Several objects may contain the same function, such as one of the standard
    library. The linker keeps the first copy, which must run on every processor.
    """
    return dict(_X86_64) if platform.machine() in ("x86_64", "AMD64") else {"default": ()}


def current_isa() -> str:
    """Return the instruction set that the native backend uses, one of `isas`.

    FMOE_NATIVE_ISA sets it. The default is the highest that torch detects, which ATEN_CPU_CAPABILITY can lower.

    Raises:
        UserError: FMOE_NATIVE_ISA is invalid (`isa_limit`).
    """
    limit = isa_limit()
    return _processor_isa() if limit is None else limit.removesuffix("_bf16")


def isa_limit() -> str | None:
    """Return the value of FMOE_NATIVE_ISA, which limits the instruction set; None if it is not set.

    Valid values are the names of `isas`; with any of them, the backend does not use the processor's bf16 GEMMs. On
    x86-64, "avx512_bf16" is valid too: AVX-512 with bf16 GEMMs.

    Raises:
        UserError: FMOE_NATIVE_ISA is an unknown instruction set, or one above what torch detects.
    """
    named = os.environ.get("FMOE_NATIVE_ISA", "")  # src/processor.h reads it too
    if not named:
        return None
    levels = [*isas(), "avx512_bf16"] if len(isas()) > 1 else [*isas()]
    if named not in levels:
        raise UserError(f"FMOE_NATIVE_ISA={named!r} is not one of {', '.join(levels)}")
    has_bf16 = torch.cpu._is_avx512_bf16_supported() or torch.cpu._is_amx_tile_supported()
    top = "avx512_bf16" if _processor_isa() == "avx512" and has_bf16 else _processor_isa()
    if levels.index(named) > levels.index(top):
        raise UserError(f"FMOE_NATIVE_ISA={named!r} exceeds {top!r}, the highest instruction set that torch detects")
    return named


def _processor_isa() -> str:
    name = torch.backends.cpu.get_cpu_capability().lower()
    return name if name in isas() else "default"


def sanitizers(text: str) -> tuple[str, ...]:
    """Split a list such as ``"address,undefined"`` into a sorted tuple without duplicates.

    Raises:
        UserError: a name is not one of `SANITIZERS`.
    """
    names = tuple(sorted({name.strip() for name in text.split(",")} - {""}))
    for name in names:
        if name not in SANITIZERS:
            raise UserError(f"sanitizer {name!r} is unknown: --sanitize and FMOE_SANITIZE take {', '.join(SANITIZERS)}")
    return names


def compile_flags(sanitize: Sequence[str] = ()) -> list[str]:
    """Return the compiler flags for every source file, without include paths."""
    flags = [*_ALWAYS, f"-D_GLIBCXX_USE_CXX11_ABI={int(torch.compiled_with_cxx11_abi())}"]
    if _openmp():
        flags.append("-fopenmp")
    if sanitize:
        flags += [*_SANITIZED, *_sanitize_flags(sanitize)]
    else:
        flags += _OPTIMIZED
    return flags


def link_flags(sanitize: Sequence[str] = ()) -> list[str]:
    """Return the linker flags."""
    # Without -fopenmp, calls resolve to the OpenMP library that torch has loaded. If torch ships it under another name,
    # -fopenmp would also load the compiler's library, with a second set of threads.
    return ["-shared", "-fvisibility=hidden", *_sanitize_flags(sanitize)]


def include_flags() -> list[str]:
    """Return the include flags of torch's headers."""
    include = Path(torch.__path__[0]) / "include"
    return ["-isystem", str(include), "-isystem", str(include / "torch" / "csrc" / "api" / "include")]


def library_flags(names: Sequence[str]) -> list[str]:
    """Return the flags that link the named libraries of torch."""
    # Without rpath, because torch has already loaded them.
    return ["-L", str(_torch_libraries()), *(f"-l{name}" for name in names)] if names else []


def _ask(command: tuple[str, ...]) -> Compiler:
    try:
        done = subprocess.run(
            [*command, "--version"], capture_output=True, text=True, errors="replace", env=environment(), timeout=60
        )
    except (OSError, subprocess.TimeoutExpired) as error:
        raise BuildError(f"no C++ compiler: {shlex.join(command)} --version: {error}") from error
    if done.returncode or not done.stdout.strip():
        asked = f"{shlex.join(command)} --version"
        raise BuildError(f"no C++ compiler: {asked} prints no version (exit code {done.returncode})")
    return Compiler(command, done.stdout.strip().splitlines()[0], "Free Software Foundation" in done.stdout)


def _sanitize_flags(sanitize: Sequence[str]) -> list[str]:
    if not sanitize:
        return []
    # The vptr check needs type information that libtorch does not export.
    return [f"-fsanitize={','.join(sanitize)}", "-fno-sanitize-recover=all", "-fno-sanitize=vptr"]


def _suits(compiler: Compiler) -> bool:
    """Return whether code that the compiler compiles can use torch's OpenMP library."""
    # g++ calls GNU's entry points, which LLVM's and Intel's libraries have too. clang calls LLVM's, which GNU's lacks.
    return not _openmp() or ("GOMP_parallel" if compiler.is_gnu else "__kmpc_fork_call") in _openmp()


@cache
def _openmp() -> frozenset[str]:
    """Return the OpenMP entry points of g++ and clang that torch's library has; empty for a torch without OpenMP."""
    if not torch.backends.openmp.is_available():
        return frozenset()
    loaded = ctypes.CDLL(str(_torch_libraries() / "libtorch_cpu.so"))  # `hasattr` also searches its dependencies
    return frozenset(name for name in ("GOMP_parallel", "__kmpc_fork_call") if hasattr(loaded, name))


def _torch_libraries() -> Path:
    return Path(torch.__path__[0]) / "lib"
