"""The script for the first hour on a GPU, rehearsed without one."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.__main__ import BENCHMARKS
from bench.__main__ import main as bench
from bench.layer.problem import SHAPES, Problem

SCRIPT = Path(gpu.__file__).with_name("gpu_hour.sh")
STEPS = ["probe", "smoke", "tests", "perf", "train", "sanitize"]


def test_probe(capsys):
    assert bench(["gpu", "probe", "--rehearse"]) == 0
    out = capsys.readouterr().out
    assert f"torch {torch.__version__}" in out and "apex is not installed" in out
    assert re.search(r"bf16 GEMM of 256: \S+ TFLOP/s\ncopy of 1048576 bytes: \S+ TB/s\n$", out)


def test_smoke(capsys):
    assert bench(["gpu", "smoke", "--rehearse"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:-1]} == {"ok", "skipped"} and lines[-1] == "0 checks failed"
    assert sum(line.startswith("ok") for line in lines) >= 8 and "sigmoid: forward and backward" in "".join(lines)


def test_a_check_that_fails_does_not_stop_the_others(capsys, monkeypatch):
    def broken(device):
        raise RuntimeError("an illegal memory access\nand more")

    monkeypatch.setattr(gpu, "_router", broken)
    monkeypatch.setattr(gpu, "_batch", lambda device: gpu._near(torch.ones(2), torch.tensor([1.0, 1.1]), 1e-3))
    assert bench(["gpu", "smoke", "--rehearse"]) == 1
    out = capsys.readouterr().out
    assert "FAILED   the router multiplies 16 bits into float32: RuntimeError: an illegal memory access and more" in out
    assert "FAILED   batches are copied in one transfer: AssertionError: relative error" in out
    assert "ok       switch: forward and backward" in out and out.endswith("2 checks failed\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert bench(["gpu", "smoke"]) == 2
    assert "--rehearse" in capsys.readouterr().err


def rehearse(tmp_path, *steps, python=sys.executable):
    environment = os.environ | {"OUT": str(tmp_path / "out"), "SITE": str(tmp_path / "site"), "PYTHON": str(python)}
    environment["OMP_NUM_THREADS"] = "1"
    command = ["bash", str(SCRIPT), "--rehearse", *steps]
    return subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, cwd=tmp_path)


def test_the_script_names_its_commands(tmp_path):
    """Each within ten minutes, of benchmarks, shapes and folders that exist. The stand-in for Python fails once."""
    python = tmp_path / "python"
    python.write_text('#!/bin/sh\ncase "$*" in *smoke*) exit 3;; esac\n')
    python.chmod(0o755)
    done = rehearse(tmp_path, python=python)
    assert done.returncode == 1 and done.stderr == ""
    assert re.findall(r"^=== (\w+)$", done.stdout, re.MULTILINE) == STEPS
    assert done.stdout.count("== ended with 3") == 1
    commands = re.findall(r"^\+ \(at most (\d+) s\) \S+ (.*)$", done.stdout, re.MULTILINE)
    assert len(commands) >= len(STEPS) and all(int(seconds) < 600 for seconds, _ in commands)
    for _, command in commands:
        for name in re.findall(r"-m bench (\w+)", command):
            assert name in BENCHMARKS
        for shapes in re.findall(r"--shapes (\S+)", command):
            assert set(shapes.split(",")) <= SHAPES.keys()
        for path in re.findall(r"(?:tests|pretrain)/\S+", command):
            assert (SCRIPT.parent.parent / path).exists(), path
    assert {f"{step}.log" for step in STEPS} == {path.name for path in (tmp_path / "out").glob("*.log")}


def test_an_unknown_step(tmp_path):
    done = rehearse(tmp_path, "perf2")
    assert done.returncode == 2 and "STEP=perf2 is unknown" in done.stdout


@pytest.mark.slow
def test_the_rehearsal(tmp_path):
    done = rehearse(tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 checks failed" in done.stdout and "tests/gpu/test_gpu_layer.py" in done.stdout


def test_weights_of_a_problem_do_not_depend_on_its_other_weights():
    problem, other = (Problem(SHAPES["tiny"], torch.float32, seed=seed) for seed in (0, 1))
    assert problem.w_in_EPD.shape == (4, 48, 32) and problem.router_ED.shape == (4, 32)
    assert abs(float(problem.w_in_EPD.std()) * 32**0.5 - 1) < 0.05
    assert not torch.equal(problem.w_in_EPD, other.w_in_EPD)
    assert not torch.equal(problem.w_in_EPD[0], problem.w_in_EPD[1])
