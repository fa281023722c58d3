"""``python -m bench plan --cluster FILE``: predictions of ``fmoe plan`` against training steps on this machine.

Each point is a small model with a split over one or two ranks of one thread each. Its step is predicted from the
cluster file of ``fmoe plan calibrate``, under the loads that the measured steps had. Points and their order are fixed;
no prediction uses a measured step.

Repeatability is the difference between the medians of the first and the second half of the measured steps. No
prediction can be expected to be closer.

With ``--search``, one model is planned over two ranks instead, and each split that the search predicted is measured:
how much slower is the chosen one than the fastest?
"""

import itertools
import time
import weakref
from collections.abc import Sequence
from statistics import median
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from bench import options, ranks, report
from fmoe.errors import UserError
from pretrain.config import ModelConfig, MoEConfig, OptimizerConfig, ParallelConfig, Recipe, TrainConfig
from pretrain.config.model import AttentionConfig
from pretrain.planner import loads
from pretrain.planner.cluster import load_cluster
from pretrain.planner.search import Search
from pretrain.planner.timer import Timer, idle_seconds

_PATIENCE = 10.0  # seconds of steps that are dropped as long as other programs slow the machine

MODELS = {
    "64x4": {"hidden_size": 64, "num_layers": 4, "sequence_length": 128},
    "128x4": {"hidden_size": 128, "num_layers": 4, "sequence_length": 128},
    "256x2": {"hidden_size": 256, "num_layers": 2, "sequence_length": 256},
    "320x2": {"hidden_size": 320, "num_layers": 2, "sequence_length": 128},
}
SPLITS: dict[str, dict[str, Any]] = {
    "one": {},
    "EP2": {"expert": 2},
    "TP2": {"tensor": 2},
    "CP2": {"context": 2},
    "PP2": {"pipeline": 2},
    "DP2": {"data": 2},
    "DP2 ZeRO-1": {"data": 2, "shard": "optimizer"},
    "DP2 ZeRO-3": {"data": 2, "shard": "parameters"},
}
VARIANTS: dict[str, dict[str, Any]] = {
    "8 experts": {},
    "32 experts, skewed": {"experts": 32, "zipf": 1.2},
    "recomputed": {"recompute": "full", "micro_batch": 4},
    "bf16": {"precision": "bf16"},
}


class ZipfTokens:
    """Samples of random tokens for a recipe, int64 [sequence_length + 1], with frequencies by Zipf's law."""

    def __init__(self, recipe: Recipe, exponent: float):
        weights = np.arange(1, recipe.model.vocab_size + 1, dtype=np.float64) ** -exponent
        self._shares = weights / weights.sum()
        self._length = recipe.model.sequence_length + 1

    def __getitem__(self, n: int) -> np.ndarray:
        return np.random.default_rng(n).choice(len(self._shares), self._length, p=self._shares)


class Allocated(TorchDispatchMode):
    """Counts the bytes of tensors that operations in its context return, as long as they are alive.

    Attributes:
        peak: the largest number of bytes at the same time.
    """

    def __init__(self) -> None:
        super().__init__()
        self.peak = 0
        self._alive: dict[int, int] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        known = {id(t.untyped_storage()) for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        result = func(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and id(tensor.untyped_storage()) not in known:
                self._add(tensor.untyped_storage())
        return result

    def _add(self, storage: torch.UntypedStorage) -> None:
        if id(storage) not in self._alive:
            self._alive[id(storage)] = storage.nbytes()
            weakref.finalize(storage, self._alive.pop, id(storage)).atexit = False
            self.peak = max(self.peak, sum(self._alive.values()))


def main(argv: Sequence[str]) -> None:
    parser = options.parser("plan", __doc__, rounds=12, warmup=3, has_seed=False)
    parser.add_argument(
        "--cluster", required=True, nargs="+", help="files of fmoe plan calibrate on this machine: --ranks 1, --ranks 2"
    )
    parser.add_argument("--points", nargs="+", type=int, help="numbers of the points to measure, from 0 (default: all)")
    parser.add_argument("--search", action="store_true", help="measure all splits of a search instead")
    arguments = parser.parse_args(argv)
    options.at_least(arguments, rounds=4, warmup=1)
    every = points()
    chosen = arguments.points or range(len(every))
    if max(chosen) >= len(every):
        raise UserError(f"--points={max(chosen)} must be below {len(every)}")
    clusters = {load_cluster(name).num_ranks: name for name in arguments.cluster}
    idle = ranks.run(1, idle_seconds, 20.0)
    if arguments.search:
        found = ranks.run(1, search, clusters[2])
        tried = []
        for split, seconds in found:
            recipe = _searched("h100-2").recipe_of(split)
            measured = ranks.run(2, measure, recipe, 0.0, arguments.rounds, arguments.warmup, idle)
            tried.append([split, seconds, measured["seconds"]])
        text = search_table(tried)
        print(text)
        report.write_rows({"splits": tried}, text, arguments.out, "plan_search")
        return
    rows = []
    for number in chosen:
        name, recipe, exponent = every[number]
        size = recipe.parallel.world_size
        if size not in clusters:
            raise UserError(f"--cluster has no file of {size} ranks, which the point {name!r} needs")
        measured = ranks.run(size, measure, recipe, exponent, arguments.rounds, arguments.warmup, idle)
        predicted = ranks.run(1, predict, recipe, clusters[size], measured["shares"])
        rows.append({"point": name, "measured": measured, "predicted": predicted})
        print(line(rows[-1]), flush=True)
        report.write_rows({"points": rows}, table(rows), arguments.out, "plan")  # what is measured is kept


def points() -> list[tuple[str, Recipe, float]]:
    """Return the name, the recipe and the exponent of the tokens' frequencies of each point."""
    found = []
    combinations = itertools.product(MODELS.items(), SPLITS.items(), VARIANTS.items())
    for number, ((model_name, model), (split_name, split), (name, variant)) in enumerate(combinations):
        if (number + number // len(VARIANTS)) % 2 and split_name != "one":
            continue  # half of the combinations: with each split, two variants in turn
        found.append((f"{model_name}, {split_name}, {name}", _recipe(model, split, variant), variant.get("zipf", 0.0)))
    return found


def _recipe(model: dict[str, Any], split: dict[str, Any], variant: dict[str, Any]) -> Recipe:
    width = model["hidden_size"]
    moe = MoEConfig(
        num_experts=variant.get("experts", 8), top_k=2, gate="naive", capacity_factor=None, eval_capacity_factor=None
    )
    recipe = Recipe(
        model=ModelConfig(
            **model,
            ffn_hidden_size=4 * width,
            vocab_size=2048,
            attention=AttentionConfig(num_heads=width // 32),
            moe=moe,
        ),
        parallel=ParallelConfig(**split, recompute=variant.get("recompute", "none")),
        optimizer=OptimizerConfig(name="adamw"),
        train=TrainConfig(
            global_batch=16, micro_batch=variant.get("micro_batch", 2), precision=variant.get("precision", "fp32")
        ),
    )
    recipe.check()
    return recipe


def measure(recipe: Recipe, exponent: float, rounds: int, warmup: int, idle: float) -> dict[str, Any]:
    """Return the seconds of steps on the slowest rank, bytes on the rank that needs the most, and experts' shares."""
    processes = ranks.start_parallel(recipe)
    from megatron.core.pipeline_parallel import schedules

    from fmoe.runtime import phases
    from pretrain.engine import Engine
    from pretrain.planner.trace import Saved, Trace

    engine = Engine(recipe, processes)
    drawn = ZipfTokens(recipe, exponent)
    samples: Any = {number: drawn[number] for number in range((warmup + 1) * recipe.train.global_batch)}
    for step in range(warmup):
        engine.train_step(step, samples)
    engine.routing()

    def step_seconds() -> float:
        dist.barrier()
        begin = time.perf_counter()
        engine.train_step(warmup, samples)
        return ranks.slowest(time.perf_counter() - begin)

    timer = Timer(idle, processes.device, repeats=rounds, min_seconds=0.0, patience=_PATIENCE)
    seconds = timer.while_idle(step_seconds)
    shares = [reports.load for reports in engine.routing().values()]
    trace = Trace()
    with Saved(trace, engine):
        engine.backward(0, samples)
    with Allocated() as allocated:
        engine.backward(0, samples)
    spent = []
    for _ in range(4):
        phases.start(processes.device, (schedules, "backward_step"))
        engine.train_step(warmup, samples)
        spent.append(phases.stop())
    return {
        "seconds": seconds,
        "busy": 1 - timer.patience / _PATIENCE,
        "saved": ranks.slowest(float(trace.saved)),
        "peak": ranks.slowest(float(allocated.peak)),
        "phases": {name: median(of_step[name] for of_step in spent) for name in spent[0]},
        "shares": [list(map(float, load)) for load in shares],
    }


def predict(recipe: Recipe, cluster: str, shares: list[list[float]]) -> dict[str, Any]:
    """Return the prediction of a recipe's step under the shares [layers, experts]."""
    dist.destroy_process_group()
    from pretrain.planner.predict import Predictor

    shares_SLE = np.array([shares])
    predicted = Predictor(load_cluster(cluster), loads.of_slowest(shares_SLE)).predict(recipe)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return {
        "seconds": predicted.seconds,
        "terms": predicted.terms,
        "phases": predicted.phases,
        "memory": predicted.memory,
    }


def _searched(cluster: str) -> Search:
    recipe = _recipe(MODELS["128x4"], {}, {})
    return Search(recipe, load_cluster(cluster), loads.of_slowest(loads.uniform(8)), 2)


def search(cluster: str) -> list[tuple[dict[str, Any], float]]:
    """Return the predicted splits of a model over two ranks that fit, and their seconds, the fastest first."""
    dist.destroy_process_group()
    found = _searched(cluster).run(600, lambda line: None)
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    return [(one.split, one.prediction.seconds) for one in found if one.prediction is not None]


def search_table(rows: list[list[Any]]) -> str:
    """Return measured and predicted seconds of the splits, the fastest by measurement first, as Markdown."""
    medians = [median(seconds) for _, _, seconds in rows]
    fastest = min(medians)
    lines = ["| split | predicted, ms | measured, ms | over the fastest |", "|---|---|---|---|"]
    for number in sorted(range(len(rows)), key=lambda row: medians[row]):
        split, predicted, _ = rows[number]
        values = ", ".join(f"{key} {value}" for key, value in split.items() if value not in (1, None))
        chosen = "**chosen:** " if number == 0 else ""
        of_fastest = medians[number] / fastest - 1
        lines.append(f"| {chosen}{values} | {1e3 * predicted:.0f} | {1e3 * medians[number]:.0f} | {of_fastest:+.1%} |")
    return "\n".join(lines) + "\n"


def errors(row: dict[str, Any]) -> dict[str, float]:
    """Return the relative errors of time, saved bytes and peak, and the repeatability of the time."""
    measured = row["measured"]
    seconds = measured["seconds"]
    half = len(seconds) // 2
    memory = row["predicted"]["memory"]
    of_median = median(seconds)
    return {
        "seconds": row["predicted"]["seconds"] / of_median - 1,
        "repeatability": abs(median(seconds[:half]) - median(seconds[half:])) / of_median,
        "saved": memory["activations"] / measured["saved"] - 1,
        "peak": (memory["activations"] + memory["transient"]) / measured["peak"] - 1,
    }


def line(row: dict[str, Any]) -> str:
    found = errors(row)
    milliseconds = 1e3 * median(row["measured"]["seconds"])
    return f"{row['point']}: {milliseconds:.1f} ms, " + ", ".join(f"{k} {v:+.1%}" for k, v in found.items())


def table(rows: list[dict[str, Any]]) -> str:
    """Return the errors of all points as Markdown, and their medians and maxima."""
    lines = [
        "| point | step, ms | predicted, ms | error | repeatability | saved bytes | peak |",
        "|---|---|---|---|---|---|---|",
    ]
    found = [errors(row) for row in rows]
    for row, of_row in zip(rows, found, strict=True):
        lines.append(
            f"| {row['point']} | {1e3 * median(row['measured']['seconds']):.1f} "
            f"| {1e3 * row['predicted']['seconds']:.1f} | {of_row['seconds']:+.1%} | {of_row['repeatability']:.1%} "
            f"| {of_row['saved']:+.2%} | {of_row['peak']:+.1%} |"
        )
    for name, of in (("median", np.median), ("worst", np.max)):
        values = {key: of([abs(entry[key]) for entry in found]) for key in found[0]}
        lines.append(
            f"| {name} of sizes | | | {values['seconds']:.1%} | {values['repeatability']:.1%} | {values['saved']:.2%} "
            f"| {values['peak']:.1%} |"
        )
    return "\n".join(lines) + "\n"
