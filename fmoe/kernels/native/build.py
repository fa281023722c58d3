"""Build of the native CPU backend: from C++ sources to a shared library in the cache (`fmoe.kernels.cache`).

It needs only a C++ compiler and torch's headers.
"""

import functools
import hashlib
import json
import os
import platform
import re
import shlex
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from fmoe.errors import BuildError, CompilerError
from fmoe.files import sha256
from fmoe.kernels import cache
from fmoe.kernels.native import compiler
from fmoe.kernels.native.compiler import Compiler


@dataclass(frozen=True)
class Sources:
    """Source files of a library.

    Attributes:
        folder: folder of the files. A change of any file in it, headers included, leads to a new build.
        once: files that are compiled once.
        by_isa: files that are compiled for each instruction set of `compiler.isas`. The macro FMOE_ISA is the
            name of the instruction set.
        libraries: libraries of torch to link.
    """

    folder: Path
    once: tuple[str, ...] = ()
    by_isa: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ("torch_cpu", "c10")


SHIPPED = Sources(Path(__file__).parent / "src", once=("moe.cpp",), by_isa=("kernels.cpp", "gemm.cpp"))


@dataclass(frozen=True)
class _Recipe:
    sources: Sources
    sanitize: tuple[str, ...]
    base: str
    compiler: Compiler | BuildError

    @property
    def key(self) -> str:
        """The cache key. Without a compiler, it is the prefix that the keys of all compilers share."""
        if isinstance(self.compiler, BuildError):
            return f"{self.base}-"
        return f"{self.base}-{_digest([self.compiler.command, self.compiler.version])[:8]}"


def library(
    sources: Sources | None = None,
    *,
    sanitize: Sequence[str] = (),
    force: bool = False,
    instead_of: tuple[int, int] | None = None,
    echo: Callable[[str], None] | None = None,
) -> Path:
    """Return the path of a shared library for this machine, from the cache or newly compiled.

    Args:
        sources: sources to compile; None for `SHIPPED`.
        sanitize: sanitizers to compile in, such as ``("address", "undefined")``. Each set has its own cache entry.
        force: compile even if the cache has an entry.
        instead_of: `cache.identity` of a library that did not load. That one is not returned again.
        echo: called with each command before it runs.

    Raises:
        BuildError: the system is not Linux; there is no compiler when a build is needed; compilation fails; or no
            cache folder is usable. The message has one line.
    """
    recipe = _recipe(sources, sanitize)
    cxx = recipe.compiler
    return cache.get(
        recipe.key,
        cxx if isinstance(cxx, BuildError) else functools.partial(_build, recipe, cxx, echo),
        what="the native CPU backend",
        compiler="" if isinstance(cxx, BuildError) else cxx.name,
        force=force,
        instead_of=instead_of,
    )


def cached(sources: Sources | None = None, *, sanitize: Sequence[str] = ()) -> Path | None:
    """Return the path of the library if it is in the cache, else None.

    Raises:
        BuildError: the system is not Linux.
    """
    return cache.find(_recipe(sources, sanitize).key)


def last_failure(sources: Sources | None = None) -> str | None:
    """Return the error of the last build of ``sources`` without sanitizers; None if it did not fail.

    Raises:
        BuildError: the system is not Linux.
    """
    return cache.last_failure(_recipe(sources, ()).key)


def _recipe(sources: Sources | None, sanitize: Sequence[str]) -> _Recipe:
    sources = sources or SHIPPED
    if sys.platform != "linux":
        raise BuildError(f"the native backend supports Linux only, not {platform.system()}")
    try:
        cxx: Compiler | BuildError = compiler.find()
    except BuildError as error:
        cxx = error
    parts = [
        [(path.name, sha256(path)) for path in sorted(sources.folder.iterdir()) if path.is_file()],
        [sources.once, sources.by_isa, sources.libraries],
        [compiler.isas(), compiler.compile_flags(sanitize), compiler.link_flags(sanitize)],
        [torch.__version__, torch.version.git_version, platform.machine(), os.confstr("CS_GNU_LIBC_VERSION")],
    ]
    return _Recipe(sources, tuple(sanitize), _digest(parts)[:16], cxx)


def _digest(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _build(recipe: _Recipe, cxx: Compiler, echo: Callable[[str], None] | None, place: Path) -> Path:
    """Compile and link the sources in the folder ``place``; return the path of the library."""
    sources = recipe.sources
    jobs: list[tuple[str, str, tuple[str, ...]]] = [(name, Path(name).stem, ()) for name in sources.once]
    for isa, flags in compiler.isas().items():
        jobs += [(name, f"{Path(name).stem}-{isa}", (*flags, f"-DFMOE_ISA={isa}")) for name in sources.by_isa]
    shared_flags = compiler.compile_flags(recipe.sanitize)
    if sources.libraries:
        shared_flags += compiler.include_flags()
    objects = []
    commands = []
    for name, target, flags in jobs:
        objects.append(f"{place / target}.o")
        commands.append([*cxx.command, *shared_flags, *flags, "-c", str(sources.folder / name), "-o", objects[-1]])
    library = place / "library.so"
    link = [*cxx.command, *compiler.link_flags(recipe.sanitize), *objects]
    link += [*compiler.library_flags(sources.libraries), "-o", str(library)]
    _run_all(commands, place, echo)
    _run_all([link], place, echo)
    return library


def _check(command: Sequence[str], code: int, output: str) -> None:
    """Raise CompilerError if a command has failed."""
    if not code:
        return
    lines = [line.strip() for line in output.splitlines() if line.strip()]
    errors = [line for line in lines if re.search(r"\berror\b|undefined reference|cannot find", line, re.I)]
    ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
    raise CompilerError([*errors, *lines[-1:], ended][0], f"{shlex.join(command)}\n{output}")


def _run_all(commands: Sequence[Sequence[str]], place: Path, echo: Callable[[str], None] | None) -> None:
    """Run the commands, at most one per core at a time. If one fails, kill the others and raise its error."""
    processes: list[subprocess.Popen] = []
    variables = compiler.environment(place)

    def run(command: Sequence[str]) -> None:
        # A separate process group, so that the programs which a compiler calls are killed with it.
        process = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env=variables,
            text=True,
            errors="replace",
            process_group=0,
        )
        processes.append(process)
        output, _ = process.communicate()
        _check(command, process.returncode, output)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        if echo is not None:
            for command in commands:
                echo(shlex.join(command))
        futures = [pool.submit(run, command) for command in commands]
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            raise
