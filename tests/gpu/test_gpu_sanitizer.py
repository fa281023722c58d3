"""compute-sanitizer over a forward and a backward pass, where the machine has it."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PROGRAM = """
import torch, fmoe
for options in ({}, {"gate": "switch", "top_k": 1, "gate_options": {"capacity_factor": 0.5}}, {"expert": "swiglu"}):
    layer = fmoe.FMoE(d_model=72, num_experts=9, d_hidden=40, gate=options.pop("gate", "sigmoid"), seed=0,
                      backend="cuda", **options).to("cuda", torch.bfloat16)
    x = torch.randn(2500, 72, device="cuda", dtype=torch.bfloat16, requires_grad=True)
    layer(x).float().square().mean().backward()
    torch.cuda.synchronize()
"""


@pytest.mark.skipif(shutil.which("compute-sanitizer") is None, reason="no compute-sanitizer")
@pytest.mark.parametrize("tool", ["memcheck", "racecheck", "synccheck"])
def test_sanitizer(tool):
    # Our kernels alone: their mangled names have the namespace.
    command = ["compute-sanitizer", "--tool", tool, "--error-exitcode", "9", "--kernel-name", "kns=fmoe"]
    command += [sys.executable, "-c", PROGRAM]
    path = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])  # packages may lie in a folder of it
    variables = {**os.environ, "PYTORCH_NO_CUDA_MEMORY_CACHING": "1", "PYTHONPATH": path}
    done = subprocess.run(command, capture_output=True, text=True, timeout=590, env=variables)
    assert done.returncode == 0, done.stdout[-4000:] + done.stderr[-2000:]
