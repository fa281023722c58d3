"""Whole runs in fp16: what they say of overflows, and what they learn."""

import pytest
from runs import steps, train

from pretrain.start.codes import EXIT_DIVERGED


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
    said = "step 3 is skipped: an overflow at loss scale 1024, now 512"
    assert ends[0].err.count(said) == 1 and "is skipped" not in ends[1].err
    assert "loss_scale 512  skipped 1" in ends[0].out
    again = tmp_path / "again"
    train(forks, recipe, "--run.folder", again, "--resume", tmp_path / "a" / "checkpoints" / "step-00000003", size=2)
    assert {step: row for step, row in rows.items() if step > 3} == steps(again)
    options = ["--run.folder", tmp_path / "b", "--optimizer.min_loss_scale", "512"]
    ends = forks.command("pretrain", recipe, *options, size=2, before=Overflows(0))
    assert [end.code for end in ends] == [EXIT_DIVERGED] * 2
    assert "at loss scale 512, the lowest (optimizer.min_loss_scale=512)" in ends[0].err


WIDER = {"hidden_size": 64, "attention.num_heads": 4, "ffn_hidden_size": 64}
SEEDS = (1, 2, 3)  # their mean: two roundings are several percent apart by themselves


@pytest.mark.slow
def test_text_is_learned_as_in_fp32(forks, recipe_file, tmp_path):
    count = 200
    batch = 32
    lr = 5e-3
    ends = {"fp32": [], "bf16": [], "fp16": []}
    for precision, losses in ends.items():
        for seed in SEEDS:
            recipe = recipe_file(
                model=WIDER,
                train={"steps": count, "precision": precision, "seed": seed, "global_batch": batch}
                | {"micro_batch": batch, "validation_every": count, "validation_sequences": 8 * batch},
                optimizer={"lr": lr, "min_lr": lr / 10, "warmup_steps": 5},
            )
            folder = tmp_path / f"{precision}-{seed}"
            train(forks, recipe, "--run.folder", folder)
            rows = steps(folder)
            losses.append(rows[count]["val/loss"])
            assert losses[-1] < rows[0]["val/loss"] - 2.0
            assert precision != "fp16" or rows[count]["skipped_steps"] <= 5
    print(ends)  # with -s, also where all is well
    means = {precision: sum(losses) / len(losses) for precision, losses in ends.items()}
    assert means == pytest.approx(dict.fromkeys(means, means["fp32"]), rel=0.02), ends
