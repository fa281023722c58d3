"""``fmoe build``: compile the native CPU backend, and the CUDA kernels for this machine's GPUs, if there are any."""

import shlex
import sys
import time
from collections.abc import Sequence

from fmoe.cli import Parser
from fmoe.errors import BuildError, UserError, one_line
from fmoe.kernels import cache, compilation
from fmoe.kernels.native import build, compiler
from fmoe.kernels.native import loader as native


def main(argv: Sequence[str]) -> int:
    """Compile the backends, load the native library, and print a report.

    Returns:
        Exit code: 1 if the native library fails to compile or load, or a build with ``--arch`` fails; else 0.

    Raises:
        UserError: a sanitizer is unknown, ``--sanitize`` is given together with ``--arch``, or NVRTC does not support
            an architecture.
    """
    parser = Parser(prog="fmoe build", description=__doc__)
    parser.add_argument("--force", action="store_true", help="compile even if the cache has an entry")
    parser.add_argument("--clean", action="store_true", help="remove all compiled libraries from the cache, and exit")
    parser.add_argument("--sanitize", default="", metavar="address,undefined", help="build with sanitizers, for tests")
    only_cuda = "compile only the CUDA kernels, for these architectures; needs no GPU"
    parser.add_argument("--arch", nargs="+", metavar="sm_90", help=only_cuda)
    parser.add_argument("--verbose", action="store_true", help="print compiler commands, and registers of CUDA kernels")
    arguments = parser.parse_args(argv)
    sanitize = compiler.sanitizers(arguments.sanitize)
    echo = print if arguments.verbose else None
    try:
        if arguments.clean:
            print(f"{cache.clean()} entries removed from {', '.join(map(str, cache.folders()))}")
            return 0
        if arguments.arch:
            if sanitize:
                raise UserError(f"--sanitize {arguments.sanitize} is not supported with --arch: omit one of the two")
            for line in compilation.compile_cuda(arguments.arch, force=arguments.force, echo=echo):
                print(line)
            return 0
        code = _build_native(sanitize, arguments.force, arguments.verbose)
        if not sanitize:
            for line in compilation.compile_cuda_here(force=arguments.force, echo=echo):
                print(line)
        return code
    except (BuildError, OSError) as error:
        print(f"fmoe build: error: {one_line(error)}", file=sys.stderr)
        return 1


def _build_native(sanitize: tuple[str, ...], force: bool, verbose: bool) -> int:
    before = build.cached(sanitize=sanitize)
    begin = time.monotonic()
    path = build.library(sanitize=sanitize, force=force, echo=print if verbose else None)
    seconds = time.monotonic() - begin
    size = f"{path.stat().st_size / 1e6:.1f} MB"
    if before == path and not force:
        print(f"already built: {path} ({size})")
    else:
        print(f"built in {seconds:.1f} s with {compiler.find().name}: {path} ({size})")
    if sanitize:
        print("run with:", *_variables(sanitize), "python ...")
        return 0
    if native.is_off():
        print("the native backend is not used while FMOE_NATIVE=0 is set")
        return 0
    begin = time.monotonic()
    if not native.load():
        raise BuildError(native.why())
    print(f"loaded in {1e3 * (time.monotonic() - begin):.0f} ms; this processor runs {compiler.current_isa()}")
    return 0


def _variables(sanitize: tuple[str, ...]) -> list[str]:
    """Return ``NAME=value`` words that set the environment of a process which runs the sanitized build."""
    words = [f"FMOE_SANITIZE={','.join(sanitize)}"]
    if "address" in sanitize:
        cxx = shlex.join(compiler.find().command)
        words += [
            "ASAN_OPTIONS=detect_leaks=0",
            f'LD_PRELOAD="$({cxx} -print-file-name=libasan.so) $({cxx} -print-file-name=libstdc++.so.6)"',
        ]
    return words
