"""The benchmark of models at fixed memory per stage: what it counts on the meta device, and its arithmetic."""

from types import SimpleNamespace

import pytest
from forks import only

from bench.studies import gpipe
from fmoe.errors import UserError

SIZES = {"hidden_size": 128, "sequence_length": 64, "optimizer": "sgd", "precision": "fp32", "micro_batches": 4}
BUDGET = 150 << 20


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


def fits():
    import torch.distributed as dist

    dist.destroy_process_group()
    recipe = gpipe._recipe(SimpleNamespace(**SIZES))
    return [gpipe._fit(recipe, stages, *mode, BUDGET) for mode in gpipe.MODES for stages in (1, 2)]


@pytest.mark.slow
def test_models_fit_and_grow_with_stages(forks):
    rows = {(row["schedule"], row["recompute"], row["stages"]): row for row in only(forks.run(1, fits))}
    for row in rows.values():
        assert row["layers"] > 0 and row["total"] == row["state"] + row["activations"] <= BUDGET
        layer = 12 * 12 * 128**2 // row["stages"]  # one more layer on each stage would not fit
        assert row["total"] + row["stages"] * layer + 4 * row["kept_per_layer"] > BUDGET
    for schedule in ("1f1b", "gpipe"):
        for recompute in ("none", "full"):
            assert rows[schedule, recompute, 2]["parameters"] > rows[schedule, recompute, 1]["parameters"]
        assert rows[schedule, "full", 2]["parameters"] > rows[schedule, "none", 2]["parameters"]


def test_equal_stages_give_the_law():
    def ideal(stages):
        return [[float(m)] + [(m + stages - 1) / stages] * 3 for m in (1, 4, 16)]

    lines = gpipe.speed_table(ideal(1), ideal(2), [1, 2]).splitlines()[-3:]
    for line, m in zip(lines, (1, 4, 16), strict=True):
        cells = [cell.strip() for cell in line.split("|")[1:-1]]
        law = f"{2 * m / (m + 1):.2f}"
        assert cells == [str(m), "1.00", law, law, law, law]


@pytest.mark.parametrize("options", ["--stages 0", "--budget 0", "--budget inf", "--micro-batches 0", "--rounds 1"])
def test_wrong_values_are_refused(options):
    with pytest.raises(UserError, match=options.replace(" ", "=")):
        gpipe.main(options.split())
