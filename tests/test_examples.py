"""Every example runs, and what it trains learns."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

EXAMPLES = sorted((Path(__file__).parent.parent / "examples").glob("*.py"))


# Libraries of extras that examples need, which take seconds to import.
LIBRARIES = {
    "accelerate_loop": ("accelerate",),
    "hf_bert": ("transformers",),
    "hf_trainer": ("transformers", "accelerate"),
    "lightning_module": ("lightning",),
    "parallel_trainer": ("transformers", "accelerate"),
}


@pytest.mark.parametrize(
    "example",
    [pytest.param(path, id=path.stem, marks=[pytest.mark.slow] * (path.stem in LIBRARIES)) for path in EXAMPLES],
)
def test_an_example(example, forks):
    if example.stem not in LIBRARIES:
        (end,) = forks.command(str(example))
        return check(end.code, end.out, end.err)
    for library in LIBRARIES[example.stem]:
        pytest.importorskip(library, reason=f"{library} is not installed")
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([sys.executable, example], capture_output=True, text=True, timeout=240, env=environment)
    check(done.returncode, done.stdout, done.stderr)


def check(code, out, err):
    assert code == 0, err
    numbers = [float(line.split()[-1]) for line in out.splitlines() if re.match(r"step\s+\d+", line)]
    assert len(numbers) >= 2 and numbers[-1] < numbers[0], out
