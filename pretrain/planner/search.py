"""Search for the split of a recipe over the ranks of a cluster that takes the least time and fits into memory."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from typing import Any

from fmoe.errors import UserError
from pretrain.config import Recipe
from pretrain.planner.cluster import Cluster
from pretrain.planner.predict import Prediction, Predictor
from pretrain.planner.trace import Loads

Split = dict[str, Any]  # values of recipe keys

_SHARDS = ("none", "optimizer", "gradients", "parameters")
_RECOMPUTE = ("none", "selective", "full")


@dataclass(frozen=True)
class Candidate:
    """A split that was tried.

    Attributes:
        split: values of the keys that the search varies.
        prediction: None if the recipe's check refuses the split.
        refusal: the check's message; empty if there is a prediction.
        fits: whether the memory suffices.
    """

    split: Split
    prediction: Prediction | None
    refusal: str = ""
    fits: bool = False

    @property
    def rank(self) -> tuple[bool, float]:
        """Sort key: splits that fit by time, then others by memory."""
        if self.prediction is None:
            return (True, float("inf"))
        return (not self.fits, self.prediction.seconds if self.fits else self.prediction.bytes)


@dataclass
class Search:
    """Candidates of a recipe on a cluster.

    Args:
        recipe: its model, batch and other keys stay as they are; its split is the first candidate if it has
            ``num_ranks`` ranks.
        loads: rows of each expert.
        num_ranks: number of ranks to use.
    """

    recipe: Recipe
    cluster: Cluster
    loads: Loads
    num_ranks: int
    tried: dict[str, Candidate] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._predictor = Predictor(self.cluster, self.loads)

    def run(self, seconds: float, report: Callable[[str], object]) -> list[Candidate]:
        """Try splits for at most ``seconds``, and return all that fit, the fastest first.

        From the best split whose neighbors are not tried, the search goes on to them: one key takes the next larger
        or smaller value. It ends when the neighbors of the three best ones are tried.

        Args:
            report: called with a line of progress after each expansion.

        Raises:
            UserError: no split fits; the message has the least memory that a split needs.
        """
        end = time.monotonic() + seconds
        for split in self._first():
            self._try(split)
        expanded: set[str] = set()
        while time.monotonic() < end:
            best = self._best(3)
            waiting = [one for one in best if one.prediction is not None and repr(one.split) not in expanded]
            if not waiting:
                break
            expanded.add(repr(waiting[0].split))
            for split in self.neighbors(waiting[0].split):
                if time.monotonic() < end:
                    self._try(split)
            first = min(self.tried.values(), key=lambda candidate: candidate.rank)
            if first.prediction is not None:
                report(f"{len(self.tried)} splits tried, best {first.prediction.seconds:.4g} s a step")
        found = sorted(self.tried.values(), key=lambda candidate: candidate.rank)
        fitting = [candidate for candidate in found if candidate.fits]
        if not fitting:
            self._refuse(found[0])
        return fitting

    def _best(self, count: int) -> list[Candidate]:
        """Return the best candidates that differ not only in the number of model chunks."""
        best: dict[str, Candidate] = {}
        for candidate in sorted(self.tried.values(), key=lambda candidate: candidate.rank):
            best.setdefault(repr(candidate.split | {"virtual_pipeline": None}), candidate)
        return list(best.values())[:count]

    def _refuse(self, least: Candidate) -> None:
        if least.prediction is None:
            raise UserError(f"no split of the recipe over {self.num_ranks} ranks is possible: {least.refusal}")
        needed = least.prediction.bytes
        raise UserError(
            f"cluster {self.cluster.name} cannot hold the model: of {len(self.tried)} splits over {self.num_ranks} "
            f"ranks, the smallest needs {needed:.3g} bytes on a rank, more than device.memory="
            f"{self.cluster.device.memory:.3g}"
        )

    def neighbors(self, split: Split) -> Iterator[Split]:
        """Yield the splits that differ from ``split`` in one key, by one step of its values."""
        for key, values in self._values().items():
            place = values.index(split[key]) if split[key] in values else -1  # next to the first value
            for other in (place - 1, place + 1):
                if 0 <= other < len(values):
                    yield split | {key: values[other]}

    def neighbors_of(self, candidate: Candidate) -> list[tuple[str, Candidate]]:
        """Return the tried neighbors of a candidate, with the key that differs and its values."""
        near = []
        for split in self.neighbors(candidate.split):
            key = next(key for key in split if split[key] != candidate.split[key])
            tried = self.tried.get(repr(split))
            if tried is not None:
                near.append((f"{key}={candidate.split[key]} -> {split[key]}", tried))
        return near

    def _values(self) -> dict[str, list[Any]]:
        model = self.recipe.model
        node = self.cluster.links[0].size if self.cluster.links else 1
        heads = model.attention.num_query_groups or model.attention.num_heads
        layers = len(model.stack_numbers)
        experts = model.routed_experts if model.layers_with_experts else 1
        length = model.sequence_length
        batch = self.recipe.train.global_batch
        return {
            "tensor": _divisors(heads, node),
            "context": _divisors(length, node) if model.kind == "gpt" else [1],
            "pipeline": _divisors(self.num_ranks, layers),
            "balance_stages": [False, True],
            "virtual_pipeline": [None, *_divisors(layers, layers)[1:]],
            "expert": _divisors(experts, self.num_ranks),
            "expert_tensor": _divisors(heads, node),
            "shard": list(_SHARDS),
            "recompute": list(_RECOMPUTE),
            "micro_batch": _divisors(batch, batch),
            "exchange": ["all_to_all", "hierarchical"],
            "chunks": [1, 2, 4] if self.cluster.device.asynchronous else [1],  # which overlap with the device's work
        }

    def _first(self) -> Iterator[Split]:
        parallel = self.recipe.parallel
        values = self._values()
        own = {key: getattr(parallel, key) for key in values if key != "micro_batch"}
        own["micro_batch"] = self.recipe.train.micro_batch
        yield own
        node = self.cluster.links[0].size if self.cluster.links else 1
        within = max(size for size in values["expert"] if size <= node)
        plain = own | {"context": 1, "virtual_pipeline": None, "expert_tensor": 1, "micro_batch": 1, "tensor": 1}
        plain |= {"balance_stages": False, "chunks": 1}
        for expert in dict.fromkeys((within, values["expert"][-1])):
            for pipeline in dict.fromkeys((1, *values["pipeline"][1:4:2], values["pipeline"][-1])):
                for recompute in ("none", "full"):
                    changed = {"expert": expert, "pipeline": pipeline, "shard": "optimizer", "recompute": recompute}
                    yield plain | changed

    def _try(self, split: Split) -> None:
        key = repr(split)
        if key in self.tried:
            return
        try:
            recipe = self.recipe_of(split)
            recipe.check()
            if split["balance_stages"] and len(set(recipe.stage_layers)) == 1:
                raise UserError("parallel.balance_stages=true gives equal stages")
            prediction = self._predictor.predict(recipe)
        except UserError as error:
            self.tried[key] = Candidate(split, None, str(error))
            return
        self.tried[key] = Candidate(split, prediction, fits=prediction.bytes <= self.cluster.device.memory)

    def recipe_of(self, split: Split) -> Recipe:
        """Return the recipe with a split.

        Raises:
            UserError: the sizes do not divide the number of ranks.
        """
        values = dict(split)
        micro_batch = values.pop("micro_batch")
        stages = values["pipeline"] * (values["virtual_pipeline"] or 1)
        values["balance_stages"] |= len(self.recipe.model.stack_numbers) % stages > 0
        is_sharded = values["shard"] in ("gradients", "parameters")
        parallel = replace(
            self.recipe.parallel,
            **values,
            data=1,
            stage_layers=(),
            shard_size=None,
            overlap_gradients=self.recipe.parallel.overlap_gradients and not is_sharded,
            overlap_parameters=self.recipe.parallel.overlap_parameters and values["shard"] == "optimizer",
        )
        if parallel.exchange == "hierarchical" and self.cluster.links:
            parallel = replace(parallel, node_size=min(self.cluster.links[0].size, parallel.expert))
        if self.num_ranks % parallel.world_size:
            raise UserError(f"{parallel.world_size_name} does not divide {self.num_ranks} ranks")
        parallel = replace(parallel, data=self.num_ranks // parallel.world_size)
        return replace(self.recipe, parallel=parallel, train=replace(self.recipe.train, micro_batch=micro_batch))


def _divisors(number: int, most: int) -> list[int]:
    """Return the divisors of a number up to ``most``, in ascending order."""
    return [size for size in range(1, min(number, most) + 1) if number % size == 0]
