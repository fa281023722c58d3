"""The one console command: ``fmoe NAME ARGS...``.

Commands are entry points of the group ``fmoe.commands``, functions ``main(argv) -> int | None``. Any installed package
can add one; this module imports none of them before it is asked for.
"""

import argparse
import difflib
import errno
import io
import os
import re
import select
import signal
import sys
from collections.abc import Iterable, Sequence
from importlib.metadata import EntryPoint, PackageNotFoundError, entry_points, requires
from typing import Any, NoReturn

from fmoe.errors import EXIT_USAGE, UserError, known_names, printable

USAGE = "usage: fmoe COMMAND [ARGS...]      (fmoe COMMAND --help tells more)"


# What `fmoe --help` says of each, in the order in which they are met. Text alone: no command is imported for it.
SUMMARIES = {
    "data": "text to a tokenizer and to token files",
    "train": "pretrain the model of a recipe",
    "generate": "let a trained model go on with a text",
    "evaluate": "loss, perplexity, bits a byte of trained models on any text",
    "compare": "final losses of runs, and how soon one reaches another's",
    "report": "a dashboard of runs in one HTML file",
    "checkpoint": "list, verify and show checkpoints",
    "export": "a checkpoint to a Hugging Face folder",
    "import": "a Hugging Face folder, or Megatron's weights, to a checkpoint",
    "build": "compile the native backend ahead of time",
    "selftest": "check the layer on these machines, alone or under torchrun",
    "info": "what is installed, and what would run",
}


def commands() -> dict[str, EntryPoint]:
    """The installed commands by name: ours in the order of `SUMMARIES`, then other packages' by name."""
    order = {name: place for place, name in enumerate(SUMMARIES)}
    found = sorted(entry_points(group="fmoe.commands"), key=lambda e: (order.get(e.name, len(order)), e.name))
    return {entry.name: entry for entry in found}


def extras() -> dict[str, list[str]]:
    """Distributions that each extra of the installed fmoe adds, by the extra's name; other extras of fmoe left out."""
    found: dict[str, list[str]] = {}
    try:
        requirements = requires("fmoe") or []
    except PackageNotFoundError:  # imported from a folder
        return found
    for requirement in requirements:
        name, extra = re.match(r"[\w.-]+", requirement), re.search(r"""extra == ["']([\w-]+)""", requirement)
        if name and extra and name[0] != "fmoe":
            found.setdefault(extra[1], []).append(name[0])
    return found


def usage() -> str:
    """What ``fmoe --help`` prints."""
    known = commands()
    width = max(map(len, known), default=0)
    return "\n".join([USAGE, "", *(f"  {name:{width}}  {SUMMARIES.get(name, '')}".rstrip() for name in known)])


def main(argv: list[str] | None = None) -> int:
    """Runs one command; returns its exit code: 0, 2 for a wrong input (one line on stderr), or what it says itself."""
    if argv is None:
        argv = sys.argv[1:]
        if isinstance(sys.stdout, io.TextIOWrapper):
            sys.stdout.reconfigure(errors="backslashreplace")  # as stderr: names of files may be no UTF-8
        os.environ["PYTHONSAFEPATH"] = "1"  # processes that this one starts import nothing from the working folder
    known = commands()
    if not argv or argv[0] in ("-h", "--help"):
        return run("fmoe", lambda: print(usage())) or (0 if argv else EXIT_USAGE)
    name, *rest = argv
    if name not in known:
        print(f"fmoe: error: unknown command {name!r}; {known_names(name, known)}", file=sys.stderr)
        return EXIT_USAGE
    return run(f"fmoe {name}", lambda: known[name].load()(rest))


class Parser(argparse.ArgumentParser):
    """Ends with one line and exit code 2 for wrong arguments; an unknown option names the nearest."""

    def error(self, message: str) -> NoReturn:
        self.exit(EXIT_USAGE, f"{self.prog}: error: {printable(' '.join(message.split()))}\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        # Before argparse does: it would first miss what the option with the typing error was to be.
        words = sys.argv[1:] if args is None else list(args)
        for word in words[: words.index("--")] if "--" in words else words:
            if not word.startswith("--"):
                if self._subparsers is not None:
                    break  # a subcommand and its options
                continue
            option = word.partition("=")[0]
            if not any(known == option or (self.allow_abbrev and known.startswith(option)) for known in self._options):
                self.error(unknown_option(option, self._options, self.prog))
        return super().parse_known_args(words, namespace)

    @property
    def _options(self) -> list[str]:
        return [name for name in self._option_string_actions if name.startswith("--")]


def unknown_option(option: str, known: Iterable[str], program: str, near: Sequence[str] = ()) -> str:
    """Return the message for an option that is not in ``known``; ``near`` are the nearest, if the caller has them."""
    near = near or difflib.get_close_matches(option, list(known), n=3, cutoff=0.7)
    hint = f"did you mean {' or '.join(near)}?" if near else f"{program} --help lists all"
    return f"unknown option {option}; {hint}"


def run(program: str, command) -> int:
    """Calls ``command()`` and turns a `UserError` into its line on stderr and exit code 2, an interrupt into 130.

    A path that the system refuses, too long or not permitted, is a wrong input as well.

    A reader of the output that ends first, as ``| head`` does, ends the command quietly with 141, as SIGPIPE would.
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
            raise  # another pipe
        drop_output()
        return 128 + signal.SIGPIPE
    except UserError as error:
        return _refuse(program, str(error))
    except OSError as error:
        if error.errno not in _REFUSED_PATHS or error.filename is None:
            raise
        return _refuse(program, f"{os.fsdecode(error.filename)}: {error.strerror}")
    except ModuleNotFoundError as error:
        package = (error.name or "").split(".")[0]
        # A distribution of extensions has its package's name first: megatron-core.
        extra = next((e for e, names in extras().items() if package in (n.split("-")[0] for n in names)), None)
        if extra is None:
            raise
        return _refuse(program, f"the package {package} is not installed: pip install 'fmoe[{extra}]'")
    except KeyboardInterrupt:
        print(f"{program}: interrupted", file=sys.stderr)
        return 130


_REFUSED_PATHS = (errno.EACCES, errno.EPERM, errno.EROFS, errno.ENAMETOOLONG, errno.ELOOP)


def _refuse(program: str, message: str) -> int:
    print(f"{program}: error: {printable(' '.join(message.split()))}", file=sys.stderr)
    return EXIT_USAGE


def drop_output() -> None:
    """Send standard output, with its buffer, to the null device from here on: it has no reader."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _flush() -> None:
    if sys.stdout is not None:  # it is closed
        sys.stdout.flush()


def _has_lost_reader() -> bool:
    """Return whether standard output is a pipe without a reader."""
    try:
        poll = select.poll()
        poll.register(sys.stdout.fileno(), 0)
    except (OSError, ValueError):  # no file behind it
        return False
    return bool(poll.poll(0))


if __name__ == "__main__":
    sys.exit(main())
