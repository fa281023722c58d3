"""The locks of .ci/lock: every Python that pyproject.toml names has one, and its versions can be installed there."""

import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
LOCKS = sorted((ROOT / ".ci" / "lock").glob("3.*.txt"), key=lambda path: path.name)
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]


def test_every_python_of_the_classifiers_has_a_lock():
    versions = {name.rpartition(" ")[2] for name in PROJECT["classifiers"] if re.search(r":: 3\.\d+$", name)}
    assert {path.stem for path in LOCKS} == versions


@pytest.mark.slow  # asks the package index; .ci/run runs it
@pytest.mark.parametrize("lock", LOCKS, ids=lambda path: path.stem)
def test_a_lock_fits_the_extras_and_its_python(lock):
    """A version that needs another Python, another version or is withdrawn has no solution."""
    (torch,) = re.findall(r"^TORCH \?= torch\$\(if \$\(NEWEST\),,(==\S+)\)$", (ROOT / "Makefile").read_text(), re.M)
    options = ("--quiet", "--python-version", lock.stem, "--python-platform", "linux", "--constraint", lock)
    extras = ("--extra", "dev", "--extra", "cuda", "pyproject.toml", "-")
    done = subprocess.run(
        [sys.executable, "-m", "uv", "pip", "compile", *options, *extras],
        cwd=ROOT,
        input=f"torch{torch}\n",
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    resolved = set(re.findall(r"^(\S+==\S+)$", done.stdout, re.M))
    assert set(re.findall(r"^(\S+==\S+)$", lock.read_text(), re.M)) <= resolved, "the lock has packages nothing needs"
