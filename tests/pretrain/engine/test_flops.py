"""The peak that MFU is a share of is that of the arithmetic which is done."""

import pytest
import torch
from forks import only

from pretrain.tracking import read_metrics


def measured(is_needed):
    """Return the product by which each precision is measured: (dtype, width)."""
    from megatron_patch import bf16_linear
    from pretrain.engine import flops

    seen = {}
    bf16_linear.is_needed = lambda: is_needed
    for precision in ("fp32", "bf16", "fp16"):
        flops._measure = lambda _, dtype, size, precision=precision: seen.setdefault(precision, (dtype, size)) and 7
        assert flops.peak_flops(torch.device("cpu"), precision) == 7
    return seen


@pytest.mark.parametrize("is_needed", [True, False])
def test_bf16_is_measured_in_what_it_is_multiplied_in(forks, is_needed):
    seen = only(forks.run(1, measured, is_needed))
    bf16 = torch.float32 if is_needed else torch.bfloat16
    assert seen == {"fp32": (torch.float32, 1024), "bf16": (bf16, 1024), "fp16": (torch.float16, 256)}


def test_no_step_is_faster_than_the_peak(forks, recipe_file, tmp_path):
    """Even if the machine was busy while the peak was measured."""
    (tmp_path / "low_peak.py").write_text("from pretrain import trainer\ntrainer.peak_flops = lambda *_: 1.0\n")
    folder = tmp_path / "run"
    (end,) = forks.command("pretrain", recipe_file(), "--run.folder", folder, "--run.imports", tmp_path / "low_peak.py")
    assert end.code == 0, end.err
    shares = [row["mfu"] for row in read_metrics(folder / "metrics.jsonl") if "mfu" in row]
    assert len(shares) == 4 and shares[0] == 1 and all(0 < share <= 1 for share in shares)
