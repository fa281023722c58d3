"""The console command, and what importing the library brings in."""

import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

from fmoe import MissingPackageError, UserError
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
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text())
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
        (KeyboardInterrupt(), 130, "prog: interrupted\n"),
        (ModuleNotFoundError("no", name="sentencepiece.x"), 2, "pip install 'fmoe[pretrain]'\n"),
    ],
)
def test_errors_of_users_are_one_line(error, code, says, capsys):
    assert run("prog", raiser(error)) == code
    out = capsys.readouterr().err
    assert out.endswith(says) and out.count("\n") == 1


@pytest.mark.parametrize("error", [ValueError("ours"), ModuleNotFoundError("no", name="fmoe.nowhere")])
def test_our_own_errors_keep_their_traceback(error):
    with pytest.raises(type(error)):
        run("prog", raiser(error))


def test_require_names_the_extra():
    with pytest.raises(MissingPackageError, match=r"pip install 'fmoe\[pretrain\]'"):
        require("no_such_package_at_all", "pretrain", "this test")
    assert require("json", "pretrain", "this test").loads("1") == 1


def test_import_needs_torch_alone():
    """In a process where every optional package is out of reach."""
    blocked = [
        "megatron",
        "datasets",
        "wandb",
        "sentencepiece",
        "safetensors",
        "tyro",
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
layer = fmoe.FMoE(d_model=8, num_experts=4, gate="switch")
layer(torch.randn(3, 8)).sum().backward()
assert not any(name.split(".")[0] in ("pretrain", "megatron_patch") for name in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
