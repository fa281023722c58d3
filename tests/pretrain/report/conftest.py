"""The longest run."""

import pytest
from made_up import replayed

from pretrain.report.runs import RunFolder


@pytest.fixture(scope="session")
def big_run(tmp_path_factory) -> RunFolder:
    """10,000 steps, 24 layers, 128 experts; no file, which would be of 700 MB."""
    run = RunFolder(tmp_path_factory.mktemp("runs"))
    for row in replayed(10_000, 24, 128):
        run.record.add(row)
    run.name = "big"
    return run
