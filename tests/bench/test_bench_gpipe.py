"""The benchmark of models at fixed memory per stage: what it counts on the meta device, and its arithmetic."""

from types import SimpleNamespace

import pytest
from forks import only

from bench.studies import gpipe

SIZES = {"hidden_size": 128, "sequence_length": 64, "optimizer": "sgd", "precision": "fp32", "micro_batches": 4}


def kept():
    """Bytes that autograd keeps, by recomputation: of real forward passes, and of those on the meta device."""
    import torch
    import torch.distributed as dist

    from megatron_patch import cpu
    from pretrain.engine import Engine
    from pretrain.engine.meta import as_rank

    dist.destroy_process_group()  # the fork server's
    cpu.install()
    found = {}
    for recompute in ("none", "full"):
        recipe = gpipe._with(gpipe._recipe(SimpleNamespace(**SIZES)), 2, recompute)
        with as_rank(recipe, 0) as processes:
            (model,) = Engine(recipe, processes).model
            tokens = torch.zeros(1, SIZES["sequence_length"], dtype=torch.int64)
            counter = gpipe.Kept(model)
            with counter:
                model(tokens, tokens, None, labels=tokens)
        found[recompute] = counter.bytes, gpipe.kept_bytes(recipe)
    return found


@pytest.mark.slow
def test_the_meta_device_keeps_what_a_real_forward_pass_keeps(forks):
    found = only(forks.run(1, kept))
    for real, on_meta in found.values():
        assert on_meta == pytest.approx(real, rel=0.01)
    assert found["full"][0] < found["none"][0]


def test_equal_stages_give_the_law():
    def ideal(stages):
        return [[float(m)] + [(m + stages - 1) / stages] * 3 for m in (1, 4, 16)]

    lines = gpipe.speed_table(ideal(1), ideal(2), [1, 2]).splitlines()[-3:]
    for line, m in zip(lines, (1, 4, 16), strict=True):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        law = f"{2 * m / (m + 1):.2f}"
        assert cells == [str(m), "1.00", law, law, law, law]
