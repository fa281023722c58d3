"""The commands as a user starts them: real processes, `fmoe train`, `python -m pretrain`, torchrun."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from fmoe.kernels import cache
from pretrain.config import load_recipe
from pretrain.tracking import read_metrics

BIN = Path(sys.executable).parent
TIMEOUT = 240


@pytest.fixture
def start(tmp_path):
    """``start(*command)`` runs a command to its end in an empty folder, without GPUs, keys or the user's settings."""
    home = tmp_path / "home"
    home.mkdir()
    kept = {k: v for k, v in os.environ.items() if not k.startswith(("WANDB_", "OMP_", "RANK", "LOCAL_", "WORLD_"))}
    environment = kept | {"HOME": str(home), "WANDB_MODE": "offline", "WANDB_ERROR_REPORTING": "false"}
    environment["FMOE_CACHE"] = str(cache.writable())  # what the session has built: nothing is compiled again
    environment["CUDA_VISIBLE_DEVICES"] = ""  # one recipe, two processes: on a machine with one GPU too
    environment["CUDA_HOME"] = str(home)  # a toolkit without a GPU is nothing to warn about

    def run(*command):
        return subprocess.run(
            [str(part) for part in command],
            cwd=home,
            env=environment,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT,
        )

    return run


def test_fmoe_train_from_the_recipe_to_the_results(start, recipe_file, tmp_path):
    folder = tmp_path / "run"
    recipe = recipe_file(
        run={"folder": str(folder)},
        parallel={"expert": 2},
        train={"steps": 6, "validation_every": 4},
        checkpoint={"every": 2, "keep": 2},
        tracking={"console_every": 2},
    )
    end = start(BIN / "fmoe", "train", recipe, "--optimizer.lr", "2e-2")
    assert end.returncode == 0, end.stderr
    assert end.stderr == ""
    lines = end.stdout.splitlines()
    assert any("parameters" in line and "active" in line for line in lines)
    assert any("rank 1 holds experts 2-3" in line for line in lines)
    assert [line.split()[1] for line in lines if line.startswith("step ")] == ["0/6", "2/6", "4/6", "6/6"]
    assert "finished at step 6" in end.stdout and str(folder / "metrics.jsonl") in end.stdout

    rows = read_metrics(folder / "metrics.jsonl")
    assert [row["step"] for row in rows] == list(range(7))
    assert {key for key in rows[0]} == {"step", "corpus/unigram_entropy", "val/loss"}
    assert 3 < rows[0]["corpus/unigram_entropy"] < 5.95  # log 384
    assert [row["step"] for row in rows if "val/loss" in row] == [0, 4, 6]
    for row in rows[1:]:
        one = {"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "step_seconds", "mfu", "memory_mb"}
        means = {"drop_rate", "entropy", "balance_loss", "z_loss", "load_cv", "dead_experts"}
        layers = {f"moe/layer_{n}/{name}" for n in (1, 2) for name in means | {"load"}}
        assert one | {f"moe/{name}" for name in means} | layers <= row.keys()
        assert row["tokens"] == row["step"] * 4 * 16
        assert 0 < row["mfu"] <= 1
        for n in (1, 2):
            assert len(row[f"moe/layer_{n}/load"]) == 4
            assert sum(row[f"moe/layer_{n}/load"]) == pytest.approx(1)
    assert rows[2]["lr"] == pytest.approx(2e-2)
    assert rows[6]["val/loss"] < rows[0]["val/loss"]

    told = json.loads((folder / "run.json").read_text())
    assert told["experts_of_rank"] == [[0, 1], [2, 3]]
    assert told["world_size"] == 2
    resolved = load_recipe(str(folder / "config.toml"))
    assert resolved == load_recipe(str(recipe), ["--optimizer.lr", "2e-2"])
    assert resolved != load_recipe(str(recipe))
    assert told["params"] == resolved.num_params()
    assert sorted(path.name for path in (folder / "checkpoints").iterdir()) == ["step-00000004", "step-00000006"]


@pytest.mark.slow
def test_under_torchrun_one_process_says_what_is_wrong(start, recipe_file, tmp_path):
    recipe = recipe_file(
        run={"folder": str(tmp_path / "run")},
        parallel={"data": 4},
        train={"global_batch": 8, "validation_sequences": 8},
    )
    torchrun = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    end = start(*torchrun, "--nproc-per-node", "2", "-m", "pretrain", recipe)
    assert end.returncode != 0
    said = [line for line in end.stderr.splitlines() if "error: " in line]
    assert said == [line for line in said if line.startswith("pretrain: error: world size 2 is not 4, the product ")]
    assert len(said) == 1, end.stderr
    assert "UserError" not in end.stderr, "a traceback of ours"
    assert not (tmp_path / "run").exists()
