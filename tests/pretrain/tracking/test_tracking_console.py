import io
import re

from rich.console import Console

from pretrain.tracking.console import ConsoleTracker

METRICS = {
    "loss": 5.12345,
    "lr": 2.9e-4,
    "grad_norm": 1.234,
    "tokens_per_second": 12345.4,
    "mfu": 0.312,
    "memory_mb": 100.0,
    "moe/load_cv": 0.118,
    "moe/drop_rate": 0.0123,
    "moe/layer_0/load": [0.5, 0.5],
}


def plain(**settings):
    out = io.StringIO()
    return ConsoleTracker(console=Console(file=out, width=40), **({"total_steps": 300, "every": 20} | settings)), out


def test_line_of_a_step():
    tracker, out = plain()
    tracker.log(20, METRICS)
    assert out.getvalue() == (
        "step  20/300  loss 5.1235  lr 2.9e-04  grad_norm 1.23  tok/s 12,345  mfu 31%  load_cv 0.12  dropped 1.2%\n"
    )


def test_prints_first_every_last_and_validation():
    tracker, out = plain(total_steps=50)
    for step in range(1, 51):
        tracker.log(step, {"loss": 1.0})
        if step == 30:
            tracker.log(step, {"val/loss": 2.0})
    tracker.close()
    assert out.getvalue().splitlines() == [
        "step  1/50  loss 1.0000",
        "step 20/50  loss 1.0000",
        "step 30/50  val loss 2.0000",
        "step 40/50  loss 1.0000",
        "step 50/50  loss 1.0000",
    ]


def test_absent_and_other_metrics_make_no_line():
    tracker, out = plain()
    tracker.log(0, {"corpus/unigram_entropy": 4.5, "loss": None})
    assert out.getvalue() == ""


def test_terminal_has_a_progress_line_under_the_others():
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=120, color_system=None)
    tracker = ConsoleTracker(total_steps=300, every=20, console=console)
    tracker.log(1, METRICS)
    tracker.log(2, {"val/loss": 4.0})
    tracker.close()
    lines = re.split(r"\n|\r|\x1b\[2K|\x1b\[\?25l", out.getvalue())
    assert any(line.startswith("step   1/300  loss 5.1235  lr 2.9e-04  grad_norm") for line in lines)
    assert "step   2/300  val loss 4.0000" in lines
    progress = [line for line in lines if "eta" in line]
    assert progress[-1].startswith("step   2/300  loss 5.1235  val loss 4.0000  lr 2.9e-04  tok/s 12,345  mfu 31%")
    assert out.getvalue().endswith("\x1b[1A\x1b[2K"), "the progress line stays after closing"
