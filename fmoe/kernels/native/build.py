"""From the C++ sources to a shared library for this machine: out of the cache, or compiled now.

Nothing but a C++ compiler and torch's own headers is needed. If many processes ask at once, one compiles, and the
others take its result or its error.
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
from fmoe.kernels import cache
from fmoe.kernels.native import compiler
from fmoe.kernels.native.compiler import Compiler

logger = logging.getLogger("fmoe")


@dataclass(frozen=True)
class Sources:
    """Source files of a library.

    Attributes:
        folder: all its files count, so that headers do.
        once: files that are compiled once.
        by_isa: files that are compiled for each instruction set of `compiler.isas`, with its name as the
            macro FMOE_ISA.
        libraries: of torch's, which are linked.
    """

    folder: Path
    once: tuple[str, ...] = ()
    by_isa: tuple[str, ...] = ()
    libraries: tuple[str, ...] = ("torch_cpu", "c10")


SHIPPED = Sources(Path(__file__).parent / "src", once=("moe.cpp",), by_isa=("kernels.cpp", "gemm.cpp"))


@dataclass(frozen=True)
class _Recipe:
    """A requested library: the key of its inputs, and the compiler or the reason why it is missing."""

    sources: Sources
    sanitize: tuple[str, ...]
    base: str
    compiler: Compiler | BuildError

    @property
    def key(self) -> str:
        """Without a compiler what any compiler made will do: images are built where there is one, and run where not."""
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
    """The path of a shared library for this machine, from the cache or compiled now.

    Args:
        sources: what to compile; None for `SHIPPED`.
        sanitize: sanitizers of gcc, e.g. ``("address", "undefined")``: an entry of its own, slow and with checks.
        force: compile even if the cache has an entry.
        instead_of: `cache.identity` of a library that did not load, and must not be returned again.
        echo: is called with each command before it is run.

    Raises:
        BuildError: one line: no compiler, a compile error, no cache folder that can be written, another system than
            Linux.
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
    """The result of `library` if it needs no compiler, else None.

    Raises:
        BuildError: another system than Linux.
    """
    return cache.find(_recipe(sources, sanitize).key)


def last_failure(sources: Sources | None = None) -> str | None:
    """The line that the last build ended with, if it failed and nothing it was made of has changed since."""
    return cache.last_failure(_recipe(sources, ()).key)


def _recipe(sources: Sources | None, sanitize: Sequence[str]) -> _Recipe:
    sources = sources or SHIPPED
    if sys.platform != "linux":
        raise BuildError(f"the native backend is for Linux, this is {platform.system()}")
    try:
        found: Compiler | BuildError = compiler.find()
    except BuildError as error:
        found = error
    parts = [
        [(path.name, cache.sha256(path)) for path in sorted(sources.folder.iterdir()) if path.is_file()],
        [sources.once, sources.by_isa, sources.libraries],
        [compiler.isas(), compiler.compile_flags(sanitize), compiler.link_flags(sanitize)],
        [torch.__version__, torch.version.git_version, platform.machine(), os.confstr("CS_GNU_LIBC_VERSION")],
    ]
    return _Recipe(sources, tuple(sanitize), _digest(parts)[:16], found)


def _digest(parts: list) -> str:
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()


def _build(recipe: _Recipe, cxx: Compiler, folder: Path, is_locked: bool, echo: Callable[[str], None] | None) -> Path:
    """Compiles, links and publishes, under the lock of the key."""
    begin = time.monotonic()
    logger.warning("compiling the native CPU backend with %s, once on this machine; fmoe build does it ahead", cxx.name)
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
            raise BuildError(f"{line} (all of it: {failure})") from error
        entry = cache.publish(result, folder, recipe.key)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    logger.info("compiled the native CPU backend in %.1f s: %s", time.monotonic() - begin, entry)
    return entry


def _commands(recipe: _Recipe, cxx: Compiler, place: Path) -> tuple[list[Path], list[list[str]]]:
    """(objects in the order of the link, commands that make them)."""
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
    """A command failed. ``first``: the line with the reason."""

    def __init__(self, command: Sequence[str], code: int, output: str):
        self.command, self.output = shlex.join(command), output
        lines = [line.strip() for line in output.splitlines() if line.strip()]
        errors = [line for line in lines if re.search(r"\berror\b|undefined reference|cannot find", line, re.I)]
        ended = f"signal {signal.Signals(-code).name}" if code < 0 else f"exit code {code}"
        self.first = [*errors, *lines[-1:], ended][0]
        super().__init__(self.first)


def _run_all(commands: Sequence[Sequence[str]], place: Path, echo: Callable[[str], None] | None) -> None:
    """Runs commands, as many at once as there are cores; the first that fails ends them all."""
    processes: list[subprocess.Popen] = []
    variables = compiler.environment(place)

    def run(command: Sequence[str]) -> None:
        # In a process group of its own, so that the programs that a compiler calls end with it.
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
