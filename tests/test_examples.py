"""Every example runs, and what it trains learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.stem)
def test_an_example(example):
    if example.stem.startswith("hf_"):
        pytest.importorskip("transformers")
    root = example.parent.parent
    environment = {**os.environ, "PYTHONPATH": str(root), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(example)], capture_output=True, text=True, timeout=240, env=environment, cwd=root
    )
    assert done.returncode == 0, done.stderr
    numbers = [float(line.split()[-1]) for line in done.stdout.splitlines() if re.match(r"step\s+\d+", line)]
    assert len(numbers) >= 2 and numbers[-1] < numbers[0], done.stdout
