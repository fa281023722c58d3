"""C++ that compiles in milliseconds, compilers that count, and where they put what they make. Not a test itself."""

import os
from pathlib import Path

from fmoe.kernels.native import build
from fmoe.kernels.native.build import Sources

ANSWER = '#define SEEN __attribute__((visibility("default")))\nextern "C" SEEN int answer() { return 42; }\n'


def sources(folder: Path, code: str = ANSWER, **options) -> Sources:
    """A library of one file, without torch's headers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "answer.cpp").write_text(code)
    return Sources(folder, **({"once": ("answer.cpp",)} | options), libraries=())


def compiler(path: Path, before: str = "", version: str = "") -> Path:
    """A program that writes its compile commands to PATH.log, runs ``before`` and then g++."""
    path.write_text(f"""#!/bin/sh
case "$*" in
*--version*) {f"echo '{version}'; echo 'Free Software Foundation'; exit 0" if version else ":"} ;;
*" -c "*) echo "$*" >> {path}.log
{before}
esac
exec g++ "$@"
""")
    path.chmod(0o755)
    return path


def num_compiles(program: Path) -> int:
    log = Path(f"{program}.log")
    return len(log.read_text().splitlines()) if log.exists() else 0


def build_in(cache: str, program: str, folder: str) -> str:
    """For another process: the path of the library there."""
    os.environ |= {"FMOE_CACHE": cache, "CXX": program}
    return str(build.library(Sources(Path(folder), once=("answer.cpp",), libraries=())))
