"""`fmoe checkpoint`, through the command's own error handling."""

import pytest
import torch
from pieces import whole

from fmoe.cli import run
from pretrain.checkpoint import TensorPiece, save
from pretrain.checkpoint.cli import main


@pytest.fixture
def run_folder(tmp_path):
    w, shape = torch.randn(6, 4), (6, 4)
    pieces = [
        TensorPiece("layers.0.weight", shape, (0, 0), (3, 4), w[:3]),
        TensorPiece("layers.0.weight", shape, (3, 0), (3, 4), w[3:].reshape(-1)[:5], 0, 5),
        TensorPiece("layers.0.weight", shape, (3, 0), (3, 4), w[3:].reshape(-1)[5:], 5, 12),
        whole("scale", torch.tensor(2.0, dtype=torch.bfloat16)),
    ]
    for step in (10, 20):
        save(tmp_path / "checkpoints", step, pieces, {"tokens": step * 512, "mask": torch.zeros(3)}, {})
    return tmp_path


def command(*argv):
    return run("fmoe checkpoint", lambda: main([str(argument) for argument in argv]))


def test_ls_verify_and_show(run_folder, capsys):
    assert command("ls", run_folder) == 0
    lines = capsys.readouterr().out.splitlines()
    assert [line.split()[0] for line in lines] == ["step-00000010", "step-00000020"]
    assert "2 tensors, 3 files" in lines[0]
    assert command("verify", run_folder) == 0
    assert "step-00000020: intact" in capsys.readouterr().out
    assert command("show", run_folder / "checkpoints" / "step-00000010") == 0
    shown = capsys.readouterr().out
    assert '"tokens": 5120' in shown
    assert "<float32 tensor [3]>" in shown
    rows = [line.split("  ") for line in shown.splitlines()]
    assert ["layers.0.weight", "float32", "[6, 4]", "96 B", "2x1, 2 flat ranges"] in [
        [cell.strip() for cell in row if cell.strip()] for row in rows
    ]


def test_damage_is_one_line_and_a_code(run_folder, capsys):
    shard = run_folder / "checkpoints" / "step-00000020" / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    assert command("ls", run_folder) == 0  # lists, and reads no shard
    capsys.readouterr()
    assert command("verify", run_folder) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    assert shard.name in error
    shard.unlink()
    assert command("ls", run_folder) == 1
    assert "step-00000020  damaged: " in capsys.readouterr().out


@pytest.mark.parametrize("name", ["ls", "verify", "show"])
def test_no_checkpoint_is_one_line(name, tmp_path, capsys):
    assert command(name, tmp_path) == 2
    error = capsys.readouterr().err
    assert error.startswith(f"fmoe checkpoint: error: {tmp_path} ")
    assert error.count("\n") == 1


def test_names_in_files_reach_no_terminal_raw(tmp_path, capsys):
    name = "w\x1b]0;title\x07\x9b2J\r\nforged line \u202e"
    save(tmp_path / "checkpoints", 1, [whole(name, torch.zeros(2))], {"text": "\x1b[2J"}, {})
    assert command("show", tmp_path) == 0 and command("verify", tmp_path) == 0 and command("ls", tmp_path) == 0
    shown = capsys.readouterr().out
    assert all(character.isprintable() or character == "\n" for character in shown)
    assert r"w\x1b]0;title\x07\x9b2J\r\nforged line \u202e" in shown
    path = next((tmp_path / "checkpoints").glob("*/manifest.json"))
    path.write_text(path.read_text().replace("float32", "float33"))
    assert command("verify", tmp_path) == 2 and "\x1b" not in capsys.readouterr().err
