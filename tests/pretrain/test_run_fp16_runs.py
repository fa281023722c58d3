"""Whole runs in fp16: what they say of overflows, and what they learn."""

import pytest
from test_run_training import steps

from pretrain.exit_codes import EXIT_DIVERGED


class Overflows:
    """An overflow in the gradients of rank 1 in some steps, counted from 0."""

    def __init__(self, *steps):
        self.steps = steps

    def __call__(self):
        from pretrain.engine import Engine

        backward = Engine.backward

        def broken(engine, step, samples, **options):
            loss = backward(engine, step, samples, **options)
            if step in self.steps and engine.processes.rank == 1:
                next(iter(engine.gpt.parameters())).main_grad[0] = float("inf")
            return loss

        Engine.backward = broken


def test_a_run_says_what_it_skipped_and_goes_on(forks, recipe_file, tmp_path):
    recipe = recipe_file(
        parallel={"expert": 2},
        train={"steps": 6, "precision": "fp16"},
        optimizer={"lr": 1e-2, "warmup_steps": 2, "initial_loss_scale": 512.0, "loss_scale_window": 2},
        tracking={"wandb": False, "tensorboard": True, "console_every": 1},
        checkpoint={"every": 3},
    )
    ends = forks.command("pretrain", recipe, "--run.folder", tmp_path / "a", size=2, before=Overflows(2))
    assert [end.code for end in ends] == [0, 0], ends[0].err
    rows = steps(tmp_path / "a")
    assert [rows[step]["loss_scale"] for step in range(1, 7)] == [512, 512, 1024, 512, 512, 1024]
    assert [rows[step]["skipped_steps"] for step in range(1, 7)] == [0, 0, 1, 1, 1, 1]
    assert all(rows[step]["guard/skipped"] == 0 for step in range(1, 7))
    assert rows[3]["grad_norm"] is None and rows[3]["grad_norm_nonfinite"] == "inf"
    said = "step 3 is skipped: an overflow at loss scale 1024, which is 512 from here on"
    assert ends[0].err.count(said) == 1 and "is skipped" not in ends[1].err
    assert "loss_scale 512  skipped 1" in ends[0].out
    again = tmp_path / "again"
    (end, _) = forks.command(
        *("pretrain", recipe, "--run.folder", again, "--resume", tmp_path / "a" / "checkpoints" / "step-00000003"),
        size=2,
    )
    assert end.code == 0, end.err
    assert {step: row for step, row in rows.items() if step > 3} == steps(again)
    ends = forks.command(
        *("pretrain", recipe, "--run.folder", tmp_path / "b", "--optimizer.min_loss_scale", "512"),
        size=2,
        before=Overflows(0),
    )
    assert [end.code for end in ends] == [EXIT_DIVERGED] * 2
    assert "at loss scale 512, the lowest (optimizer.min_loss_scale=512)" in ends[0].err


# Steps, sections of the recipe, by how much the validation loss falls at least, in nats, and how near to that of fp32
# it ends: a few steps that fp16 skips at the beginning are much of forty.
TEXTS = {
    "short": (40, {}, 1.0, 0.08),
    "long": (150, {"model": {"hidden_size": 64, "num_heads": 4, "ffn_hidden_size": 64}}, 2.0, 0.03),
}


@pytest.mark.parametrize("text", ["short", pytest.param("long", marks=pytest.mark.conformance)])
def test_text_is_learned_as_in_fp32(forks, recipe_file, tmp_path, text):
    count, sections, falls, near = TEXTS[text]
    ends = {}
    for precision in ("fp32", "bf16", "fp16"):
        recipe = recipe_file(
            **sections,
            train={"steps": count, "precision": precision, "global_batch": 8, "micro_batch": 8}
            | {"validation_every": count, "validation_sequences": 32},
            optimizer={"lr": 1e-2, "min_lr": 1e-3, "warmup_steps": 5},
        )
        (end,) = forks.command("pretrain", recipe, "--run.folder", tmp_path / precision)
        assert end.code == 0, end.err
        rows = steps(tmp_path / precision)
        ends[precision] = rows[count]["val/loss"]
        assert ends[precision] < rows[0]["val/loss"] - falls
    assert rows[count]["skipped_steps"] <= 5
    assert ends == pytest.approx(dict.fromkeys(ends, ends["fp32"]), rel=near)
