"""``fmoe build``: compiles the native CPU backend ahead; with ``--arch`` the CUDA kernels (`fmoe.cuda.cli`)."""

import shlex
import sys
import time
from collections.abc import Sequence

from fmoe import native
from fmoe.cli import Parser
from fmoe.cuda import cli as cuda_cli
from fmoe.errors import BuildError, UserError
from fmoe.native import build, cache, compiler


def main(argv: Sequence[str]) -> int:
    """Builds, loads, and says what was done.

    Returns:
        Exit code: 0, or 1 when there is no library that loads.

    Raises:
        UserError: a sanitizer that there is not, an architecture that NVRTC does not know.
    """
    parser = Parser(prog="fmoe build", description=__doc__)
    parser.add_argument("--force", action="store_true", help="compile, whatever is in the cache")
    parser.add_argument("--clean", action="store_true", help="remove what is in the cache, and end")
    parser.add_argument("--sanitize", default="", metavar="address,undefined", help="a build for tests, with checks")
    parser.add_argument(
        "--arch", nargs="+", metavar="sm_90", help="the CUDA kernels for these architectures instead, without a GPU too"
    )
    parser.add_argument("--verbose", action="store_true", help="print the commands, or registers and spills of kernels")
    arguments = parser.parse_args(argv)
    sanitize = compiler.sanitizers(arguments.sanitize)
    try:
        if arguments.clean:
            print(f"{cache.clean()} entries removed from {', '.join(map(str, cache.folders()))}")
            return 0
        if arguments.arch:
            if sanitize:
                raise UserError(f"--sanitize {arguments.sanitize} is for the native CPU backend, not for --arch")
            return cuda_cli.build_ahead(arguments.arch, arguments.force, arguments.verbose)
        code = _build(sanitize, arguments.force, arguments.verbose)
        if not sanitize:
            cuda_cli.build_here(arguments.force, arguments.verbose)
        return code
    except (BuildError, OSError) as error:
        print(f"fmoe build: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 1


def _build(sanitize: tuple[str, ...], force: bool, verbose: bool) -> int:
    before = build.cached(sanitize=sanitize)
    begin = time.monotonic()
    path = build.library(sanitize=sanitize, force=force, echo=print if verbose else None)
    seconds = time.monotonic() - begin
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    if before == path and not force:
        print(f"there already: {path} ({size})")
    else:
        print(f"built in {seconds:.1f} s with {compiler.find().name}: {path} ({size})")
    if sanitize:
        print("to run with it:", *_variables(sanitize), "python ...")
        return 0
    if native.is_off():
        print("not used while FMOE_NATIVE=0 is set")
        return 0
    begin = time.monotonic()
    if not native.load():
        raise BuildError(native.why())
    print(f"loaded in {1e3 * (time.monotonic() - begin):.0f} ms; this processor runs {compiler.current_isa()}")
    return 0


def _variables(sanitize: tuple[str, ...]) -> list[str]:
    """What a process needs to run the sanitized build."""
    words = [f"FMOE_SANITIZE={','.join(sanitize)}"]
    if "address" in sanitize:
        cxx = shlex.join(compiler.find().command)
        words += [
            "ASAN_OPTIONS=detect_leaks=0",
            f'LD_PRELOAD="$({cxx} -print-file-name=libasan.so) $({cxx} -print-file-name=libstdc++.so.6)"',
        ]
    return words
