"""Build of the native CPU backend: from C++ sources to a shared library in the cache (`fmoe.kernels.cache`).

It needs only a C++ compiler and torch's headers.
"""

import hashlib
import json
import logging
import os
import platform
import re
import shlex
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path

import torch

from fmoe.errors import BuildError
from fmoe.files import sha256
from fmoe.kernels import cache
from fmoe.kernels.native import compiler
from fmoe.kernels.native.compiler import Compiler

logger = logging.getLogger("fmoe")


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

    def make(folder: Path, is_locked: bool) -> Path:
        if isinstance(cxx, BuildError):
            raise cxx
        return _build(recipe, cxx, folder, is_locked, echo)

    cannot = cxx if isinstance(cxx, BuildError) else None
    return cache.get(recipe.key, make, cannot=cannot, force=force, instead_of=instead_of)


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
        found: Compiler | BuildError = compiler.find()
    except BuildError as error:
        found = error
    parts = [
        [(path.name, sha256(path)) for path in sorted(sources.folder.iterdir()) if path.is_file()],
        [sources.once, sources.by_isa, sources.libraries],
        [compiler.isas(), compiler.compile_flags(sanitize), compiler.link_flags(sanitize)],
        [torch.__version__, torch.version.git_version, platform.machine(), os.confstr("CS_GNU_LIBC_VERSION")],
    ]
    return _Recipe(sources, tuple(sanitize), _digest(parts)[:16], found)


def _digest(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _build(recipe: _Recipe, cxx: Compiler, folder: Path, is_locked: bool, echo: Callable[[str], None] | None) -> Path:
    begin = time.monotonic()
    logger.warning("compiling the native CPU backend with %s, once per machine; fmoe build precompiles it", cxx.name)
    place = cache.workplace(folder, recipe.key, is_locked)
    try:
        objects, commands = _commands(recipe, cxx, place)
        result = place / "library.so"
        link = [*cxx.command, *compiler.link_flags(recipe.sanitize), *map(str, objects)]
        link += [*compiler.library_flags(recipe.sources.libraries), "-o", str(result)]
        try:
            _run_all(commands, place, echo)
            _run_all([link], place, echo)
        except _CompilerError as error:
            failure = cache.failure(folder, recipe.key)
            line = f"{cxx.name} failed: {error.first}"
            cache.publish_failure(folder, recipe.key, f"{line}\n{error.command}\n{error.output}")
            raise BuildError(f"{line} (full output: {failure})") from error
        entry = cache.publish(result, folder, recipe.key)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    logger.info("compiled the native CPU backend in %.1f s: %s", time.monotonic() - begin, entry)
    return entry


def _commands(recipe: _Recipe, cxx: Compiler, place: Path) -> tuple[list[Path], list[list[str]]]:
    """Return the objects in link order, and the commands that compile them."""
    sources = recipe.sources
    jobs: list[tuple[str, str, tuple[str, ...]]] = [(name, "", ()) for name in sources.once]
    jobs += [(name, isa, flags) for isa, flags in compiler.isas().items() for name in sources.by_isa]
    objects, commands = [], []
    for name, isa, flags in jobs:
        target = place / f"{Path(name).stem}{'-' + isa if isa else ''}.o"
        command = [*cxx.command, *compiler.compile_flags(recipe.sanitize), *flags]
        if isa:
            command.append(f"-DFMOE_ISA={isa}")
        command += compiler.include_flags() if sources.libraries else []
        commands.append([*command, "-c", str(sources.folder / name), "-o", str(target)])
        objects.append(target)
    return objects, commands


class _CompilerError(Exception):
    """Failure of a compiler's command; ``first`` is the line of its output with the reason."""

    def __init__(self, command: Sequence[str], code: int, output: str):
        self.command, self.output = shlex.join(command), output
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\berror\b|undefined reference|cannot find", line, re.I)]
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.first = [*errors, *lines[-1:], ended][0]
        super().__init__(self.first)


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
        if process.returncode:
            raise _CompilerError(command, process.returncode, output)

    with ThreadPoolExecutor(len(os.sched_getaffinity(0))) as pool:
        futures = []
        for command in commands:
            if echo is not None:
                echo(shlex.join(command))
            futures.append(pool.submit(run, command))
        try:
            for future in as_completed(futures):
                future.result()
        except BaseException:
            pool.shutdown(wait=False, cancel_futures=True)
            for process in processes:
                if process.poll() is None:
                    os.killpg(process.pid, signal.SIGKILL)
            raise
