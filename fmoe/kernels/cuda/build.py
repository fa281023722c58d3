"""Build of the CUDA backend: from CUDA sources to machine code of one architecture in the cache.

A cache entry (`fmoe.kernels.cache`) is a zip file. For each source file, it has a cubin and the symbols of its kernels.
It contains no code of torch, so it fits every version of torch.
"""

import functools
import hashlib
import json
import os
import zipfile
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path

from fmoe.errors import BuildError, UserError
from fmoe.files import sha256
from fmoe.kernels import cache
from fmoe.kernels.cuda import nvrtc as compiler
from fmoe.kernels.cuda.instances import KERNELS
from fmoe.kernels.cuda.nvrtc import Nvrtc

_SUFFIX = ".zip"
_INDEX = "kernels.json"


@dataclass(frozen=True)
class Sources:
    """Files to compile.

    Attributes:
        folder: folder of the files. A change of any file in it, headers included, leads to a new build.
        kernels: for each file to compile, by its name, the NVRTC name expressions of its kernels.
    """

    folder: Path
    kernels: Mapping[str, tuple[str, ...]] = field(hash=False)


SHIPPED = Sources(Path(__file__).parent / "src", KERNELS)


def library(
    arch: str,
    sources: Sources | None = None,
    *,
    force: bool = False,
    instead_of: tuple[int, int] | None = None,
    echo: Callable[[str], None] | None = None,
) -> Path:
    """Return the path of the compiled kernels for an architecture, from the cache or newly compiled.

    Args:
        arch: architecture, such as ``"sm_90"``.
        sources: sources to compile; None for `SHIPPED`.
        force: compile even if the cache has an entry.
        instead_of: `cache.identity` of an entry that did not load. That one is not returned again.
        echo: called with the compiler's output for each file: registers, spills, shared memory.

    Raises:
        UserError: NVRTC does not support the architecture.
        BuildError: cuda.core or NVRTC is missing when a build is needed; compilation fails; or no cache folder is
            usable. The message has one line.
    """
    sources = sources or SHIPPED
    nvrtc = _find()
    if isinstance(nvrtc, Nvrtc):
        check_arch(arch, nvrtc)
    return cache.get(
        _key(sources, arch, nvrtc),
        nvrtc if isinstance(nvrtc, BuildError) else functools.partial(_build, sources, arch, echo),
        what=f"the CUDA kernels for {arch}",
        compiler="" if isinstance(nvrtc, BuildError) else nvrtc.name,
        suffix=_SUFFIX,
        force=force,
        instead_of=instead_of,
    )


def check_arch(arch: str, nvrtc: Nvrtc) -> None:
    """Raise UserError if the compiler does not support the architecture."""
    if arch not in nvrtc.architectures:
        valid = ", ".join(nvrtc.architectures)
        raise UserError(f"arch={arch!r} is not supported by {nvrtc.name}; valid names: {valid}")


def cached(arch: str, sources: Sources | None = None) -> Path | None:
    """Return the path of the compiled kernels if they are in the cache, else None."""
    return cache.find(_key(sources or SHIPPED, arch, _find()), _SUFFIX)


def last_failure(arch: str, sources: Sources | None = None) -> str | None:
    """Return the error of the last build of these sources for the architecture if it failed, else None."""
    return cache.last_failure(_key(sources or SHIPPED, arch, _find()))


def read(path: Path) -> list[tuple[bytes, dict[str, str]]]:
    """Return (cubin, symbols by NVRTC name expression) of each source file in the cache entry ``path``.

    Raises:
        BuildError: the entry is invalid.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            index = json.loads(archive.read(_INDEX))
            return [(archive.read(f"{name}.cubin"), symbols) for name, symbols in index.items()]
    except (OSError, KeyError, ValueError, zipfile.BadZipFile) as error:
        raise BuildError(f"{path} does not load: {error}") from error


def _find() -> Nvrtc | BuildError:
    try:
        return compiler.find()
    except BuildError as error:
        return error


def _key(sources: Sources, arch: str, nvrtc: Nvrtc | BuildError) -> str:
    """Return the cache key; without a compiler, the prefix that the keys of all NVRTC versions share."""
    digest = hashlib.sha256()
    for path in sorted(sources.folder.iterdir()):
        if path.is_file():
            digest.update(f"{path.name}\0{sha256(path)}\0".encode())
    digest.update(json.dumps(sorted((name, list(kernels)) for name, kernels in sources.kernels.items())).encode())
    version = "" if isinstance(nvrtc, BuildError) else nvrtc.version.replace(".", "_")
    return f"cuda-{arch}-{digest.hexdigest()[:16]}-{version}"


def _build(sources: Sources, arch: str, echo: Callable[[str], None] | None, place: Path) -> Path:
    """Compile the sources, in parallel; write the result into the folder ``place``, and return its path."""

    def compile_file(name: str) -> compiler.Code:
        return compiler.compile_file(sources.folder / name, sources.kernels[name], arch, verbose=echo is not None)

    with ThreadPoolExecutor(max(1, len(os.sched_getaffinity(0)))) as pool:
        codes = dict(zip(sources.kernels, pool.map(compile_file, sources.kernels), strict=True))
    entries: dict[str, str | bytes] = {_INDEX: json.dumps({name: code.symbols for name, code in codes.items()})}
    for name, code in codes.items():
        if echo is not None:
            echo(f"{name} for {arch}: {len(code.cubin)} bytes\n{code.log.strip()}")
        entries[f"{name}.cubin"] = code.cubin
    library = place / f"library{_SUFFIX}"
    with zipfile.ZipFile(library, "w") as archive:
        for name, data in entries.items():
            archive.writestr(zipfile.ZipInfo(name), data)  # without a date, for reproducible bytes
    return library
