"""Digest of the kernels, their callers and their tests, by which the default suite leaves this folder out.

``python tests/cuda/unchanged.py`` runs all tests of this folder and, if they pass, records the digest. It needs what
the tests would otherwise be skipped for: a compiler, Triton, cuda.core. While the digest is the recorded one, the tests
here are slow ones, which ``make conformance`` runs; after any change they run by default.
"""

import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
RECORD = Path(__file__).with_name("passed.sha256")
SOURCES = ("cuda", "fmoe/experts", "fmoe/gates", "fmoe/kernels", "fmoe/optim", "fmoe/routing.py", "tests/cuda")
SUFFIXES = (".cu", ".cuh", ".h", ".py")


def digest(root: Path = ROOT) -> str:
    """SHA-256 of all sources, by name and content."""
    found = hashlib.sha256()
    for source in SOURCES:
        folder = root / source
        files = [folder] if folder.is_file() else sorted(path for path in folder.rglob("*") if path.suffix in SUFFIXES)
        for path in files:
            found.update(f"{path.relative_to(root)}\0{path.stat().st_size}\0".encode())
            found.update(path.read_bytes())
    return found.hexdigest()


def is_recorded() -> bool:
    """Return whether the tests have passed with these sources."""
    return RECORD.is_file() and RECORD.read_text().strip() == digest()


if __name__ == "__main__":
    import cuda.core  # noqa: F401
    import triton  # noqa: F401

    if shutil.which(os.environ.get("CXX", "g++")) is None:
        sys.exit("no g++: set CXX")
    status = pytest.main([str(Path(__file__).parent), "-m", "slow or not slow", *sys.argv[1:]])
    if status == 0:
        RECORD.write_text(f"{digest()}\n")
    sys.exit(status)
