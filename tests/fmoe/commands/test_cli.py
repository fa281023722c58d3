"""The console command, and what importing the library brings in."""

import os
import signal
import subprocess
import sys
import tomllib
from contextlib import suppress
from importlib.metadata import PackageNotFoundError
from pathlib import Path

import pytest

import fmoe
from fmoe import MissingPackageError, UserError, packaging
from fmoe.cli import SUMMARIES, commands, main, run
from fmoe.errors import require


def test_help_lists_the_commands(capsys):
    assert main(["--help"]) == 0
    out = capsys.readouterr().out
    assert {"checkpoint", "data", "info", "train"} <= commands().keys()
    listed = [line.split() for line in out.splitlines() if line.startswith("  ")]
    assert [words[0] for words in listed] == list(commands()), "one line each"
    assert all(words[1:] == SUMMARIES[words[0]].split() for words in listed)
    assert [name for name in SUMMARIES if name in commands()] == list(commands())
    assert main([]) == 2


def test_every_command_has_its_line():
    project = tomllib.loads((Path(__file__).parents[3] / "pyproject.toml").read_text())
    assert set(project["project"]["entry-points"]["fmoe.commands"]) <= set(SUMMARIES)


def test_unknown_command_names_the_nearest(capsys):
    assert main(["trian"]) == 2
    error = capsys.readouterr().err
    assert "did you mean 'train'?" in error and error.count("\n") == 1


def test_info_tells_versions(capsys):
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert "torch" in out and "megatron" in out
    assert not [line for line in out.splitlines() if line.rstrip().endswith(":")]
    with pytest.raises(SystemExit):
        main(["info", "--help"])
    assert capsys.readouterr().out.startswith("usage: fmoe info")


def raiser(error):
    def command():
        raise error

    return command


@pytest.mark.parametrize(
    ("error", "code", "says"),
    [
        (UserError("a=1\nis  wrong"), 2, "prog: error: a=1 is wrong\n"),
        (PermissionError(13, "Permission denied", "/a\nb/run"), 2, "prog: error: /a b/run: Permission denied\n"),
        (OSError(36, "File name too long", b"x"), 2, "prog: error: x: File name too long\n"),
        (OSError(28, "No space left on device", "x"), 2, "prog: error: x: No space left on device\n"),
        (OSError(28, "No space left on device"), 2, "prog: error: a file cannot be written: No space left on device\n"),
        (KeyboardInterrupt(), 130, "prog: interrupted\n"),
        (ModuleNotFoundError("no", name="sentencepiece.x"), 2, "pip install 'fmoe[pretrain]'\n"),
        (ModuleNotFoundError("no", name="megatron.core"), 2, "pip install 'fmoe[pretrain]'\n"),
        (ModuleNotFoundError("no", name="trackio"), 2, "pip install 'fmoe[trackio]'\n"),
    ],
)
def test_errors_of_users_are_one_line(error, code, says, capsys):
    assert run("prog", raiser(error)) == code
    out = capsys.readouterr().err
    assert out.endswith(says) and out.count("\n") == 1


def test_an_error_shows_no_escape_sequence(capsys):
    assert run("prog", raiser(UserError("tensor \x1b[2Jw\x9b1m\u202e\udcff is missing"))) == 2
    out = capsys.readouterr().err
    assert out == "prog: error: tensor \\x1b[2Jw\\x9b1m\\u202e\\udcff is missing\n"


def loud():
    for number in range(100_000):
        print(number)


def helped():
    print("usage")
    raise SystemExit(0)


@pytest.mark.parametrize("command", [loud, lambda: print("one line"), helped])
def test_a_reader_that_ends_first_ends_the_command_quietly(command):
    (read, write), (error_read, error_write) = os.pipe(), os.pipe()
    os.close(read)  # before the fork: from the first byte on nobody reads
    pid = os.fork()
    if pid == 0:
        os.dup2(write, 1)
        os.dup2(error_write, 2)
        sys.stdout, sys.stderr = os.fdopen(1, "w"), os.fdopen(2, "w")
        code = 99
        with suppress(BaseException):
            code = run("prog", command)
            sys.stdout.flush()  # as Python does when it ends
            sys.stderr.flush()
        os._exit(code)
    for file in (write, error_write):
        os.close(file)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 128 + signal.SIGPIPE
    assert os.read(error_read, 1000) == b""
    os.close(error_read)


def test_another_broken_pipe_is_not_the_readers():
    with pytest.raises(BrokenPipeError):
        run("prog", raiser(BrokenPipeError("of a socket")))


@pytest.mark.parametrize("words", [["--\x1b[2Jx"], ["a", "b\x1b[2Jx"]])
def test_a_wrong_argument_shows_no_escape_sequence(words, capsys):
    with pytest.raises(SystemExit) as end:
        main(["info", *words])
    assert end.value.code == 2
    assert "\x1b" not in capsys.readouterr().err


@pytest.mark.parametrize(
    "error",
    [
        ValueError("ours"),
        ModuleNotFoundError("no", name="fmoe.nowhere"),
        FileNotFoundError(2, "No such file or directory", "ours"),
        PermissionError(1, "Operation not permitted"),  # of no path
    ],
)
def test_our_own_errors_keep_their_traceback(error):
    with pytest.raises(type(error)):
        run("prog", raiser(error))


def test_require_names_the_extra():
    with pytest.raises(MissingPackageError, match=r"pip install 'fmoe\[pretrain\]'"):
        require("no_such_package_at_all", "pretrain", "this test")
    assert require("json", "pretrain", "this test").loads("1") == 1


def test_import_needs_torch_alone():
    """In a process where every optional package is out of reach. It builds no kernels either."""
    blocked = [
        "megatron",
        "datasets",
        "wandb",
        "sentencepiece",
        "safetensors",
        "rich",
        "psutil",
        "tensorboard",
        "apex",
        "triton",
    ]
    code = f"""
import sys
for name in {blocked!r}:
    sys.modules[name] = None
import torch, fmoe
assert "torch._dynamo" not in sys.modules, "as slow to import as torch"
assert not {{"fmoe.kernels.native.build", "fmoe.kernels.cache", "fmoe.kernels.native.compiler"}} & {{*sys.modules}}
assert {{*fmoe.__all__}} <= {{*dir(fmoe)}}
for name in fmoe.__all__:
    getattr(fmoe, name)
layer = fmoe.FMoE(d_model=8, num_experts=4, gate="switch")
layer(torch.randn(3, 8)).sum().backward()
assert not any(name.split(".")[0] in ("pretrain", "megatron_patch") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


WITHOUT_A_MODEL = [
    *(["--help"], ["no_such_command"]),
    *([command, "--help"] for command in ("train", "data", "compare", "report", "generate", "evaluate")),
]


def test_commands_without_a_model_do_not_import_torch():
    code = f"""
import sys
from fmoe.cli import main
for argv in {WITHOUT_A_MODEL!r}:
    try:
        main(argv)
    except SystemExit as error:
        assert not error.code
    assert not {{"torch", "megatron", "transformers"}} & set(sys.modules), argv
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.slow
@pytest.mark.parametrize(
    "code",
    [
        "import fmoe.gates; fmoe.gates.NaiveGate; assert not hasattr(fmoe.gates, 'NoGate')",
        "import fmoe; assert fmoe.layers.FMoE is fmoe.FMoE; fmoe.optim, fmoe.parallel",
        "import fmoe; assert not hasattr(fmoe, 'nothing')",
        "import fmoe.megatron.layers, fmoe.fastmoe; assert fmoe.megatron.layers is fmoe.fastmoe.megatron",
        "from fmoe.gates.naive_gate import NaiveGate",
        "import fmoe.gates; assert fmoe.gates.naive_gate.NaiveGate is fmoe.gates.NaiveGate",
        "import importlib.util as u; assert u.find_spec('fmoe.layers') and not u.find_spec('fmoe.nothing')",
        "from fmoe import _FASTMOE_PATHS; from fmoe.fastmoe import _PATHS\n"
        "assert {f'fmoe.{path}' for path in _PATHS} == _FASTMOE_PATHS",
        "import fmoe.gates, fmoe.metrics; assert callable(fmoe.metrics) and fmoe.metrics.counting",
        "import fmoe\ntry:\n import fmoe.nothing\nexcept ModuleNotFoundError as e: assert e.name == 'fmoe.nothing'",
    ],
    ids=lambda code: code[:40],
)
def test_names_of_the_package_and_of_fastmoe_as_the_first_import(code):
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("argv", "says"),
    [
        (["compare", "--jsno", "runs/a"], "fmoe compare: error: unknown option --jsno; did you mean --json?"),
        (["data", "prepare", "--tokeniser", "x"], "unknown option --tokeniser; did you mean --tokenizer?"),
        (["report", "x", "--zzzzzzz"], "unknown option --zzzzzzz; fmoe report --help lists all"),
        (["selftest", "--devcie=cpu"], "unknown option --devcie"),
        (["generate", "--prommpt", "x"], "unknown option --prommpt; did you mean --prompt?"),
        (["checkpoint", "ls"], "the following arguments are required"),
    ],
)
def test_wrong_options_are_one_line_that_names_the_nearest(capsys, argv, says):
    with pytest.raises(SystemExit, match="2"):
        main(argv)
    error = capsys.readouterr().err
    assert says in error and error.count("\n") == 1 and len(error) < 200


def test_a_checkout_has_its_commands_without_an_installation(capsys, monkeypatch):
    """And names the extra that a missing package belongs to."""

    def requires(name):
        raise PackageNotFoundError(name)

    monkeypatch.setattr(packaging, "entry_points", lambda group: [])
    monkeypatch.setattr(packaging, "requires", requires)
    assert list(commands()) == list(SUMMARIES) and packaging.extras()["pretrain"][0] == "megatron-core"
    assert main(["info"]) == 0
    out = capsys.readouterr().out
    assert f"fmoe {fmoe.__version__}, " in out and "\nconverters: megatron\n" in out
    monkeypatch.setattr(packaging, "_project", dict)  # a wheel without metadata
    assert not commands() and not packaging.extras()
