"""The script for the first hour on a GPU, rehearsed without one."""

import os
import re
import subprocess
import sys
import tarfile
from pathlib import Path

import pytest

from bench import gpu
from bench.__main__ import BENCHMARKS
from bench.__main__ import main as bench
from bench.layer.contenders import layers_on_cuda
from bench.layer.problem import SHAPES

SCRIPT = Path(gpu.__file__).with_name("gpu_hour.sh")


def test_smoke(capsys):
    assert bench(["gpu", "smoke", "--rehearse"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:-1]} == {"ok", "skipped"} and lines[-1] == "0 checks failed"
    assert sum(line.startswith("ok") for line in lines) >= 8 and "sigmoid: forward and backward" in "".join(lines)


def test_the_commands_exist():
    """Benchmarks, shapes, contenders, recipes and folders that the script names."""
    text = SCRIPT.read_text()
    for name in re.findall(r"-m bench (\w+)", text):
        assert name in BENCHMARKS
    for shapes in re.findall(r"--shapes (\S+)", text):
        assert set(shapes.strip(")").split(",")) <= SHAPES.keys()
    for path in re.findall(r"tests/gpu\S*\.py", text):
        assert (SCRIPT.parent.parent / path).exists(), path
    for name in re.findall(r'"((?:fmoe|sorted) [^"]*)"', text.replace(r"\"", "")):
        assert name in layers_on_cuda(), name


@pytest.mark.slow
def test_the_rehearsal(tmp_path):
    environment = os.environ | {"OUT": str(tmp_path / "out"), "SITE": str(tmp_path / "site"), "PYTHON": sys.executable}
    environment |= {"OMP_NUM_THREADS": "1", "CORPUS": str(tmp_path / "absent")}
    command = ["bash", str(SCRIPT), "--rehearse"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 checks failed" in done.stdout and "step 2/2" in done.stdout
    with tarfile.open(tmp_path / "out" / "gpu-tests.tar.gz") as archive:
        assert b"test_gpu_layer.py::test_values" in archive.extractfile("./tests.log").read()
