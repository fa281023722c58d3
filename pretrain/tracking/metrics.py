"""Declarations of all metrics: name, unit, documentation, and how a layer's report gives the value.

Data flow:

1. `fmoe.metrics.LayerMetrics` adds up the counters of a layer over micro batches.
2. `pretrain.engine.routing.RoutingReports` adds them up over ranks and turns them into a report per layer.
3. `routing_metrics` reduces each report by the declarations: ``moe/layer_N/NAME``, and the mean ``moe/NAME``.
4. The trainer and the callbacks add the metrics of the whole model, under their declared names.
5. `pretrain.tracking` records these names; its console prints the metrics that declare a console format.
6. `pretrain.report.payload` sends the declarations with the data, and the page draws its charts from them.
7. `pretrain.inference.report` reduces the reports of an evaluation by the same declarations.
8. ``python -m pretrain.tracking.metrics`` writes the table in docs/tracking.md, from a checkout.
"""

import re
import sys
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from fmoe.errors import UserError

if TYPE_CHECKING:  # imports torch, which `fmoe report` and `fmoe compare` do not need
    from fmoe.metrics import LayerReport

PAGE = Path(__file__).parents[2] / "docs" / "tracking.md"


@dataclass(frozen=True)
class Metric:
    """Declaration of one metric.

    Attributes:
        name: key in ``metrics.jsonl`` and in every dashboard. For a layer metric, the part after ``moe/layer_N/``.
        unit: unit; empty for a plain number. The report's number format follows from it.
        doc: definition, for the table in docs/tracking.md and the report.
        reduce: returns a layer's value from its `fmoe.metrics.LayerReport`, which is summed over ranks already. A
            number is logged for each layer and as the mean over the layers, a list only for each layer. None for
            metrics of the whole model.
        title: label in the report and in ``fmoe evaluate``; by default the name with spaces.
        when: steps at which the metric is logged.
        console: format on the console line, such as ``"lr {:.1e}"``; empty for none.
        section: section of the report. Layer metrics are always in "Routing". The section "Numbers" also shows metrics
            in ``loss``, ``optimizer`` and ``speed``, and layer metrics that are numbers. It shows the last finite
            value. For metrics in ``speed`` without ``is_exact``, it shows the mean over the steps instead.
        is_log: True if the chart starts with a logarithmic axis.
        is_exact: True for a setting, a sum or a maximum, which the report neither smooths nor averages.
        is_evaluated: True if ``fmoe evaluate`` reports the layer metric.
    """

    name: str
    unit: str
    doc: str
    reduce: Callable[["LayerReport"], float | list[float]] | None = None
    _: KW_ONLY
    title: str = ""
    when: str = "every step"
    console: str = ""
    section: Literal["loss", "optimizer", "speed", "events", "more"] = "more"
    is_log: bool = False
    is_exact: bool = False
    is_evaluated: bool = True

    @property
    def key(self) -> str:
        """Key of the value for the whole model. For a layer metric, the key of the mean over the layers."""
        return f"moe/{self.name}" if self.reduce else self.name

    @property
    def label(self) -> str:
        """The title or, if that is empty, the name with spaces."""
        return self.title or self.name.replace("_", " ")


# Phases of a step (`fmoe.runtime.phases`), and the sum of those in which a rank does not wait for others.
PHASES = {
    "work": "mean over ranks of a step's time without exchange, reduction and collectives, which are waits",
    "forward": "part of `time/work_ms` in the forward pass, without experts",
    "experts": "part of `time/work_ms` in the experts' forward pass",
    "backward": "part of `time/work_ms` in the backward pass, which includes recomputation",
    "optimizer": "part of `time/work_ms` in gradient norm, clipping and update",
    "other": "the rest of `time/work_ms`, such as waits for data, and callbacks",
    "exchange": "mean over ranks of the time in which a rank waits for counts and rows of tokens, or for "
    "their gradients",
    "reduction": "mean over ranks of the time from the end of the backward pass until the gradients are reduced",
    "collectives": "mean over ranks of the time in which a rank waits for other collectives, such as those of tensor "
    "and pipeline parallelism",
}

# In the order of docs/tracking.md, the console line and the report.
DECLARED: list[Metric] = [
    Metric("loss", "nats per token", "training loss, without balance loss and z-loss", title="training loss",
           console="loss {:.4f}", section="loss"),
    Metric("val/loss", "nats per token", "validation loss", title="validation loss",
           when="before the first step, every `train.validation_every` steps, at the end", console="val loss {:.4f}",
           section="loss"),
    Metric("mtp_loss", "nats per token",
           "mean loss over the further tokens that multi-token prediction predicts, before the factor `model.mtp_loss`",
           title="multi-token prediction loss", when="every step, with `model.mtp_layers`", section="loss"),
    Metric("corpus/unigram_entropy", "nats per token", "loss of a model that uses only token frequencies",
           title="unigram entropy", when="step 0", section="loss", is_exact=True),
    Metric("epochs", "epochs",
           "passes over the training corpora so far: sequences trained on, divided by sequences per epoch",
           console="epochs {:.3g}", is_exact=True),
    Metric("lr", "", "learning rate of the step", title="learning rate", console="lr {:.1e}", section="optimizer",
           is_exact=True),
    Metric("grad_norm", "", "norm of the whole gradient before clipping, every expert counted once",
           title="gradient norm", console="grad_norm {:.2f}", section="optimizer", is_log=True),
    Metric("tokens", "tokens", "tokens trained on so far, over all ranks", section="loss", is_exact=True),
    Metric("flops", "FLOPs",
           "FLOPs of all steps so far, forward and backward, over all ranks: `tokens` times `flops_per_token` of "
           "`run.json`",
           title="FLOPs", section="loss", is_exact=True),
    Metric("tokens_per_second", "tokens/s", "tokens of the step on all ranks, divided by its seconds",
           title="throughput", console="tok/s {:,.0f}", section="speed"),
    Metric("mfu", "fraction",
           "FLOP/s of the model with its active parameters, divided by the peak of all devices; a CPU's is measured",
           title="model FLOPs utilization", console="mfu {:.0%}", section="speed"),
    Metric("step_seconds", "s", "wall-clock time of the step", title="seconds per step", section="speed"),
    Metric("data_wait_seconds", "s", "part of `step_seconds` in which rank 0 waited for its batches",
           title="wait for data", section="speed"),
    Metric("memory_mb", "MiB", "peak memory of rank 0 so far: allocated on the GPU, or resident on the host",
           title="memory", section="speed", is_exact=True),
    Metric("memory_mb/largest", "MiB", "largest `memory_mb` of all ranks, with several ranks",
           title="memory of the rank that has the most", section="speed", is_exact=True),
    Metric("memory_mb/largest_rank", "a rank", "first rank with this memory"),
    *(
        Metric(f"time/{phase}_ms", "ms", what, title=f"time: {phase}", when="every `tracking.phases_every` steps",
               section="speed")
        for phase, what in PHASES.items()
    ),
    Metric("plan/step_ratio", "", "seconds of the step, divided by those of `tracking.plan`", title="step over plan",
           when="every step, with `tracking.plan`", section="speed"),
    Metric("plan/memory_ratio", "", "largest `memory_mb` of all ranks, divided by the bytes of `tracking.plan`",
           title="memory over plan", when="on GPUs, with `tracking.plan`", section="speed", is_exact=True),
    Metric("load", "fraction, a list", "share of each expert in the kept assignments; sums to 1",
           lambda layer: layer.load),
    Metric("entropy", "nats per token", "entropy of the router's probabilities", lambda layer: layer.entropy,
           title="router entropy"),
    Metric("load_cv", "", "coefficient of variation of the load; 0 is balanced", lambda layer: layer.load_cv,
           title="load imbalance", console="load_cv {:.2f}"),
    Metric("drop_rate", "fraction", "assignments dropped for capacity, divided by all assignments",
           lambda layer: layer.drop_rate, console="dropped {:.1%}"),
    Metric("dead_experts", "experts", "experts without a token in the step", lambda layer: layer.dead_experts),
    Metric("balance_loss", "", "load-balancing loss before its coefficient",
           lambda layer: layer.losses.get("balance", 0.0), is_evaluated=False),
    Metric("z_loss", "", "router z-loss before its coefficient", lambda layer: layer.losses.get("z", 0.0),
           title="router z-loss", is_evaluated=False),
    Metric("exchange_bytes", "bytes",
           "bytes that a rank sends in the layer's exchange, in forward, backward and recomputation; mean over data "
           "parallel ranks",
           lambda layer: getattr(layer, "exchange_bytes", 0.0), title="exchange", is_evaluated=False),
    Metric("guard/skipped", "0 or 1", "1 if a guard skipped the step", section="events"),
    Metric("guard/collapsed_layers", "layers", "layers whose router has collapsed",
           when="end of each `guard.collapse_window`", section="events"),
    Metric("loss_scale", "factor", "factor on the loss before the backward pass", when="fp16",
           console="loss_scale {:g}", section="optimizer", is_log=True, is_exact=True),
    Metric("skipped_steps", "steps", "steps skipped so far for an overflow", title="steps skipped for an overflow",
           when="fp16", console="skipped {:d}", section="optimizer", is_exact=True),
    *(
        Metric(
            f"trust/{group}_{name}",
            "",
            f"{text} trust ratio over {what}",
            title=f"trust ratio of {group}, {text}",
            when="LAMB and LARS, every `tracking.trust_every` steps",
            section="optimizer" if name == "median" else "more",
            is_log=True,
        )
        for group, what in (("dense", "the dense matrices"), ("experts", "the matrices of single experts"))
        for name, text in (("min", "lowest"), ("median", "median"), ("max", "highest"))
    ),
]  # fmt: skip
_SHIPPED = len(DECLARED)


def register_metric(metric: Metric) -> None:
    """Declare a metric of a callback or, with ``reduce``, of each layer with experts.

    Raises:
        UserError: one of fmoe's metrics has this name, or a registered metric of this name has another ``unit`` or
            ``doc``.
    """
    for index, declared in enumerate(DECLARED):
        if declared.name == metric.name:
            if index < _SHIPPED or (declared.unit, declared.doc) != (metric.unit, metric.doc):
                raise UserError(f"metric={metric.name!r} is declared already ({declared.doc}): choose another name")
            DECLARED[index] = metric
            return
    DECLARED.append(metric)


def routing_metrics(reports: Mapping[int, "LayerReport"]) -> dict[str, float | list[float]]:
    """Return the layer metrics of a step by logged name: the value of each layer and, for metrics that are numbers, the
    mean over the layers."""
    values: dict[str, Any] = {}
    for number, report in reports.items():
        for metric in DECLARED:
            if metric.reduce:
                value = values[f"moe/layer_{number}/{metric.name}"] = metric.reduce(report)
                if not isinstance(value, list):
                    values[metric.key] = values.get(metric.key, 0.0) + value / len(reports)
    return values


def table() -> str:
    """Return all declared metrics as the table of docs/tracking.md."""
    lines = ["| name | unit | what | when |", "|---|---|---|---|"]
    for metric in DECLARED:
        names = f"`{metric.key}`, `moe/layer_N/{metric.name}`" if metric.reduce else f"`{metric.name}`"
        if "a list" in metric.unit:
            names = f"`moe/layer_N/{metric.name}`"
        lines.append(f"| {names} | {metric.unit} | {metric.doc} | {metric.when} |".replace("|  |", "| |"))
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    page = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(re.sub(r"^\| name \|.*?\n(?=\n)", lambda _: table(), page, count=1, flags=re.M | re.S), "utf-8")
    sys.stdout.write(f"{PAGE}\n")
