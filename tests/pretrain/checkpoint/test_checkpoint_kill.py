"""kill -9 in the middle of a save: what was complete stays so, and what was not does not count."""

import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.by_default(0)
@pytest.mark.parametrize("moments, at_least", [("calls", 10), ("50", 15)])
def test_kill_in_mid_save_leaves_the_older_checkpoint(tmp_path, moments, at_least):
    """``at_least``: so many deaths were in the middle of a save, so that the test means something."""
    script = Path(__file__).with_name("kill_saves.py")
    command = [sys.executable, str(script), str(tmp_path), moments]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240)
    assert done.returncode == 0, done.stderr
    assert int(done.stdout) >= at_least
