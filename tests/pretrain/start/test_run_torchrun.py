"""The real torchrun restarts the workers after a death, and ``--resume auto`` does the rest."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
from runs import steps, train

# Dies on rank 1 at steps 3 and 7 in the first two lives.
WORKER = """
import os, signal, sys
from pretrain.trainer import Trainer

make_step, life = Trainer._step, int(os.environ["TORCHELASTIC_RESTART_COUNT"])

def step(trainer, *args):
    if os.environ["RANK"] == "1" and life < 2 and trainer.step == (3, 7)[life]:
        os.kill(os.getpid(), signal.SIGKILL)
    return make_step(trainer, *args)

Trainer._step = step
from pretrain.__main__ import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
"""


@pytest.mark.slow  # three lives import torch and megatron-core anew
def test_max_restarts(forks, recipe_file, tmp_path):
    recipe = recipe_file(checkpoint={"every": 2}, train={"steps": 10}, parallel={"expert": 2})
    train(forks, recipe, "--run.folder", tmp_path / "whole", size=2)
    worker = tmp_path / "worker.py"
    worker.write_text(WORKER)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", "2", "--max-restarts", "2", worker, recipe, "--run.folder", tmp_path / "run"]
    environment = os.environ | {"OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    environment["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parents[3]), os.environ.get("PYTHONPATH", "")])
    done = subprocess.run([*map(str, command), "--resume", "auto"], env=environment, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "finished at step 10" in done.stdout
    assert steps(tmp_path / "run") == steps(tmp_path / "whole")
