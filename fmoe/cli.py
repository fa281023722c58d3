"""The console command ``fmoe NAME ARGS...``.

Each command is an entry point of the group ``fmoe.commands``: a function ``main(argv) -> int | None``. Any installed
package can add one; this module imports only the command that runs.
"""

import argparse
import difflib
import errno
import io
import os
import select
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint
from typing import Any, NoReturn

from fmoe.errors import EXIT_USAGE, UserError, known_names, printable
from fmoe.files import is_full
from fmoe.packaging import entries, extras

USAGE = "usage: fmoe COMMAND [ARGS...]      (fmoe COMMAND --help for details)"


# Summaries and order of `fmoe --help`. They are here so that `--help` imports no command.
SUMMARIES = {
    "data": "train a tokenizer on text, and turn text into token files",
    "plan": "split of a recipe over a cluster, or size of a model for a budget",
    "train": "pretrain the model of a recipe",
    "generate": "continue a text with a trained model",
    "evaluate": "loss, perplexity and bits per byte of trained models on any text",
    "compare": "final losses of runs, and how soon one run reaches another's loss",
    "report": "a dashboard of runs in one HTML file",
    "checkpoint": "list, verify, show, export and import checkpoints",
    "export": "convert a checkpoint to a Hugging Face folder",
    "import": "convert a Hugging Face folder to a checkpoint",
    "build": "compile the native backend ahead of time",
    "selftest": "check the layer on these machines, alone or under torchrun",
    "info": "installed packages, devices and backends",
}


def commands() -> dict[str, EntryPoint]:
    """Return the commands by name. Those of fmoe come first, in the order of `SUMMARIES`."""
    order = {name: index for index, name in enumerate(SUMMARIES)}
    points = sorted(entries("fmoe.commands"), key=lambda point: (order.get(point.name, len(order)), point.name))
    return {point.name: point for point in points}


def usage() -> str:
    """Return the text of ``fmoe --help``."""
    names = commands()
    width = max(map(len, names), default=0)
    return "\n".join([USAGE, "", *(f"  {name:{width}}  {SUMMARIES.get(name, '')}".rstrip() for name in names)])


def main(argv: list[str] | None = None) -> int:
    """Run one command and return its exit code; invalid input gives 2 and one line on stderr."""
    if argv is None:
        argv = sys.argv[1:]
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as on stderr: file names may be invalid UTF-8
        os.environ["PYTHONSAFEPATH"] = "1"  # child processes import nothing from the working directory
    known = commands()
    if not argv or argv[0] in ("-h", "--help"):
        return run("fmoe", lambda: print(usage())) or (0 if argv else EXIT_USAGE)
    name, *rest = argv
    if name not in known:
        print(f"fmoe: error: unknown command {name!r}; {known_names(name, known)}", file=sys.stderr)
        return EXIT_USAGE
    return run(f"fmoe {name}", lambda: known[name].load()(rest))


class Parser(argparse.ArgumentParser):
    """Argument parser that answers invalid arguments with one line on stderr and exit code 2.

    For an unknown option, the line suggests similar names.
    """

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {printable(' '.join(message.split()))}\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        # Checked before argparse parses: for a misspelled required option it would report that the option is missing.
        words = sys.argv[1:] if args is None else list(args)
        for word in words[: words.index("--")] if "--" in words else words:
            if not word.startswith("--"):
                if self._subparsers is not None:
                    break  # a subcommand, which parses its own options
                continue
            option = word.partition("=")[0]
            if not any(known == option or (self.allow_abbrev and known.startswith(option)) for known in self._options):
                self.error(unknown_option(option, self._options, self.prog))
        return super().parse_known_args(words, namespace)

    @property
    def _options(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]


def unknown_option(option: str, known: Iterable[str], program: str, near: Sequence[str] = ()) -> str:
    """Return the message for an option that is not in ``known``.

    Args:
        near: names that the message suggests; by default, those in ``known`` that resemble ``option``.
    """
    near = near or difflib.get_close_matches(option, list(known), n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{program} --help lists all"
    return f"unknown option {option}; {hint}"


def run(program: str, command) -> int:
    """Call ``command()`` and return its exit code.

    These exceptions become exit codes:

    * 2, with one line on stderr: a `UserError`, an error that `refusal` describes, or a missing package that an extra
      of fmoe installs.
    * 130: an interrupt.
    * 141, without a message: the reader of the output has ended, as in ``| head``.
    """
    try:
        try:
            code = command() or 0
        except SystemExit:  # after --help
            _flush()
            raise
        _flush()
        return code
    except BrokenPipeError:
        if not _has_lost_reader():
            raise  # a pipe other than standard output
        drop_output()
        return 128 + signal.SIGPIPE
    except UserError as error:
        return _refuse(program, str(error))
    except OSError as error:
        if (message := refusal(error)) is None:
            raise
        return _refuse(program, message)
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        # The distribution of a package may add a suffix to its name: megatron-core contains megatron.
        extra = next((e for e, names in extras().items() if package in (n.split("-")[0] for n in names)), None)
        if extra is None:
            raise
        return _refuse(program, f"the package {package} is not installed: pip install 'fmoe[{extra}]'")
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130


def refusal(error: OSError) -> str | None:
    """Return a message if the disk is full, or the system refuses a path: no permission, a name too long, ...

    Return None for any other error.
    """
    if error.filename is not None and (is_full(error) or error.errno in _REFUSED_PATHS):
        return f"{os.fsdecode(error.filename)}: {error.strerror}"
    return f"a file cannot be written: {error.strerror}" if is_full(error) else None


_REFUSED_PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)


def _refuse(program: str, message: str) -> int:
    print(f"{program}: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return EXIT_USAGE


def drop_output() -> None:
    """Redirect standard output to the null device. Flushing its buffer then cannot fail for lack of a reader."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    if sys.stdout is not None:  # None if the process started without one
        sys.stdout.flush()


def _has_lost_reader() -> bool:
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # standard output is not a file
        return False
    return bool(poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
