"""Runs that nobody trained: folders as the trainer writes them, and rows by the thousand."""

import json
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

CONFIG = """\
[run]
folder = "runs/made-up"

[model]
kind = "{kind}"
num_layers = {layers}

[moe]
num_experts = {experts}
gate = "{gate}"

[train]
steps = {steps}
seed = {seed}
"""


def rows(
    steps: int, layers: int = 2, experts: int = 4, *, seed: int = 0, first: int = 1, validate: int = 10
) -> Iterator[dict[str, Any]]:
    """Rows of a run as `JsonlTracker` writes them, the one of step 0 among them if ``first`` is 1."""
    generator = np.random.default_rng(seed)
    favour = generator.normal(0, 0.5, (layers, experts))
    drift = generator.normal(0, 0.5, (layers, experts))
    # The noise of a load repeats: a tenth of the time, and nothing of the size, is that of fresh noise.
    noises = [generator.normal(0, 0.25, (layers, experts)) for _ in range(97)]
    if first == 1:
        yield {"step": 0, "corpus/unigram_entropy": 5.89, "val/loss": 7.6}
    for step in range(first, steps + 1):
        share = step / steps
        level = 2.5 + 0.07 * seed + 5 * math.exp(-6 * share)
        loss = level + float(generator.normal(0, 0.06))
        row: dict[str, Any] = {
            "step": step,
            "loss": loss,
            "lr": 1e-3 * min(1, step / (0.05 * steps + 1)) * (1 - 0.9 * share),
            "grad_norm": float(np.exp(generator.normal(-0.5, 0.3))),
            "tokens": 4096 * step,
            "flops": 6e9 * 4096 * step,
            "tokens_per_second": 2e5 * float(generator.normal(1, 0.04)),
            "step_seconds": 0.02 * float(generator.normal(1, 0.04)),
            "mfu": 0.41 * float(generator.normal(1, 0.04)),
            "memory_mb": 18000.0 + min(step, 40) * 5,
            "guard/skipped": 0,
        }
        if layers:
            noise = noises[int(generator.integers(len(noises)))]
            load = np.exp(favour * (1 - share) + drift * share + noise)
            load /= load.sum(1, keepdims=True)
            for layer, shares in enumerate(load.tolist(), start=1):
                first, second = noise[layer - 1, :2].tolist()
                numbers = {
                    "entropy": math.log(experts) - 0.3 * share * layer / layers + 0.02 * first,
                    "drop_rate": 0.1 * math.exp(-5 * share) * layer / layers,
                    "balance_loss": 1.02 + 0.1 * second**2,
                    "z_loss": 4 + second,
                    "load_cv": float(load[layer - 1].std() * experts),
                    "dead_experts": 0,
                    "exchange_bytes": 2.5e6 * (1 + 0.1 * first),
                }
                row[f"moe/layer_{layer}/load"] = shares
                for name, number in numbers.items():
                    row[f"moe/layer_{layer}/{name}"] = number
                    row[f"moe/{name}"] = row.get(f"moe/{name}", 0) + number / layers
        if validate and step % validate == 0:
            row["val/loss"] = level + 0.05 + float(generator.normal(0, 0.01))
        yield row


def write_run(
    folder: Path,
    steps: int = 60,
    layers: int = 2,
    experts: int = 4,
    *,
    seed: int = 0,
    kind: str = "gpt",
    gate: str = "switch",
    change=lambda row: row,
    events: list[dict[str, Any]] | None = None,
    config: bool = True,
) -> Path:
    """A run's folder; ``change(row)`` may make another row of each."""
    folder.mkdir(parents=True)
    lines = [json.dumps(change(row)) + "\n" for row in rows(steps, layers, experts, seed=seed)]
    (folder / "metrics.jsonl").write_text("".join(lines))
    if config:
        text = CONFIG.format(kind=kind, layers=layers, experts=experts, gate=gate, steps=steps, seed=seed)
        (folder / "config.toml").write_text(text)
    told = {"world_size": 2, "params": 10_429_824, "active_params": 2_172_288, "versions": {"torch": "2.13.0"}}
    (folder / "run.json").write_text(json.dumps(told))
    if events is not None:
        (folder / "events.jsonl").write_text("".join(json.dumps(event) + "\n" for event in events))
    return folder


def replayed(steps: int, layers: int, experts: int) -> Iterator[dict[str, Any]]:
    """Rows of a long run for a fraction of their making: each is one of a few hundred of about that time, at a step of
    its own."""
    kept = [row for row in rows(300, layers, experts, validate=0) if row["step"]]
    generator = np.random.default_rng(0)
    for step in range(1, steps + 1):
        place = step / steps * len(kept) + generator.normal(0, 15)
        row = kept[min(len(kept) - 1, max(0, int(place)))]
        loss = row["loss"] + float(generator.normal(0, 0.05))
        yield (
            row | {"step": step, "loss": loss, "tokens": 4096 * step} | ({"val/loss": loss} if step % 100 == 0 else {})
        )


def event(step: int, kind: str, text: str = "") -> dict[str, Any]:
    """One, at a time that follows from its step."""
    return {"step": step, "time": 1_790_000_000.0 + step, "kind": kind, "text": text or f"{kind} of step {step}"}
