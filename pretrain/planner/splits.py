"""``fmoe plan RECIPE``: search for a split, check it by the dry run, and show it as JSON values and as text."""

import contextlib
import os
import sys
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import Any

from fmoe.errors import UserError
from pretrain import dryrun
from pretrain.config import Recipe
from pretrain.config.load import write_recipe
from pretrain.formats import aligned, count_text, size_text
from pretrain.models.config import DTYPES
from pretrain.planner import alternatives, loads
from pretrain.planner.cluster import Cluster
from pretrain.planner.page import write_page
from pretrain.planner.predict import Prediction
from pretrain.planner.search import Candidate, Search

_SHOWN = 10
_COLUMNS = {
    "tensor": "TP",
    "context": "CP",
    "pipeline": "PP",
    "balance_stages": "unequal",
    "virtual_pipeline": "VPP",
    "expert": "EP",
    "expert_tensor": "ETP",
    "data": "DP",
    "micro_batch": "batch",
    "chunks": "chunks",
    "shard": "shard",
    "recompute": "recompute",
    "exchange": "exchange",
}


def plan(recipe: Recipe, cluster: Cluster, num_ranks: int, options: Namespace) -> dict[str, Any]:
    """Plan the split of a recipe, write the files that the options name, and return the values of `as_json`.

    Args:
        options: those of the command (`pretrain.planner.cli`).

    Raises:
        UserError: no split fits, or the recorded loads are not those of the recipe's experts.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # all tensors are fake ones of the CPU
    num_experts = recipe.model.routed_experts if recipe.model.layers_with_experts else 1
    shares_SLE = loads.skewed(num_experts, options.skew)
    if options.load is not None:
        shares_SLE = loads.recorded(options.load, num_experts)
    search = Search(recipe, cluster, loads.of_slowest(shares_SLE), num_ranks)
    found = search.run(options.seconds, lambda line: sys.stderr.write(f"fmoe plan: {line}\n"))
    best, summary = _confirmed(found, cluster)
    chosen = best.prediction.recipe
    routing = {}
    if recipe.model.layers_with_experts:
        routing = loads.imbalance(shares_SLE, chosen.parallel.expert, recipe.model.moe.capacity_factor)
        routing |= _exchanges(shares_SLE, chosen, cluster)
    tokens = options.tokens or recipe.train.steps * recipe.train.global_batch * recipe.tokens_per_sequence
    others = _other_methods(best.prediction, cluster)
    values = {
        "recipe": options.recipe,
        **as_json(search, found[found.index(best) :], tokens, routing),
        "summary": summary,
        "other_methods": {name: asdict(price) for name, price in others.items()},
    }
    if options.out is not None:
        expected = {"seconds": best.prediction.seconds, "memory": best.prediction.bytes, **best.prediction.phases}
        plan = {name: float(f"{max(value, 0.0):.4g}") for name, value in expected.items()}
        write_recipe(replace(chosen, tracking=replace(chosen.tracking, plan=plan)), options.out)
    if options.html is not None:
        write_page({**values, "columns": _COLUMNS}, options.html)
    return values


def _confirmed(found: Sequence[Candidate], cluster: Cluster) -> tuple[Any, str]:
    """Return the first candidate that fits by the dry run's bytes too, and the dry run's summary."""
    for candidate in found:
        prediction = candidate.prediction
        assert prediction is not None
        recipe = prediction.recipe
        node = cluster.links[0].size if cluster.links else 1
        size = recipe.parallel.world_size
        planned = dryrun.make_plan(recipe, size // node if size % node == 0 else 1)
        held = planned.largest.holding.total
        in_step = sum(prediction.memory[name] for name in ("activations", "transient", "margin"))
        if held + in_step <= cluster.device.memory:
            return candidate, dryrun.summary(planned)
    raise UserError(
        f"cluster {cluster.name}: of the {len(found)} splits that fit by prediction, none fits by the dry run into "
        f"device.memory={cluster.device.memory:.3g}"
    )


def _exchanges(shares_SLE: Any, recipe: Recipe, cluster: Cluster) -> dict[str, float]:
    """Return the milliseconds of one exchange of rows by each way to do it (`loads.exchange_seconds`)."""
    model = recipe.model
    parallel = recipe.parallel
    if parallel.expert == 1:
        return {}
    itemsize = DTYPES[recipe.train.precision].itemsize
    tokens = recipe.train.micro_batch * model.sequence_length / (parallel.tensor * parallel.context)
    matrices = 3 if model.gated else 2
    seconds = loads.exchange_seconds(
        cluster,
        shares_SLE,
        parallel.expert,
        tokens * model.chosen_experts * model.hidden_size * itemsize,
        matrices * model.hidden_size * model.expert_width * itemsize,
    )
    return {f"{name} ms": 1e3 * value for name, value in seconds.items()}


def _other_methods(prediction: Prediction, cluster: Cluster) -> dict[str, alternatives.Price]:
    """Return the prices of other methods (`pretrain.planner.alternatives`) for a split, by name."""
    recipe = prediction.recipe
    parallel = recipe.parallel
    prices = {}
    ranks = parallel.dense_data
    if ranks > 1:
        shape = (max(1, prediction.dense // recipe.model.hidden_size), recipe.model.hidden_size)
        for algorithm in ("ring", "hierarchical", "grid"):
            with contextlib.suppress(UserError):  # a grid or nodes need numbers of ranks that divide
                price = alternatives.all_reduce(cluster, algorithm, ranks, 4 * prediction.dense)
                prices[f"all-reduce of gradients, {algorithm}"] = price
        for method in ("powersgd", "dgc", "onebit", "local_sgd", "diloco"):
            prices[f"gradients by {method}"] = alternatives.gradient_compression(cluster, method, shape, ranks)
        compute = [prediction.seconds - prediction.terms["reduction"]] * (ranks - 1)
        for mode in ("synchronous", "stale", "asynchronous"):
            price = alternatives.parameter_server(cluster, mode, 4 * prediction.dense, compute, 1, 3)
            prices[f"a step with one parameter server, {mode}"] = price
    rows = recipe.train.micro_batch * recipe.model.sequence_length
    for scheme in ("1d", "2d", "3d") if parallel.tensor > 1 else ():
        with contextlib.suppress(UserError):  # of ranks that are no square or cube
            sizes = (rows, recipe.model.hidden_size, recipe.model.ffn_hidden_size, parallel.tensor)
            price = alternatives.tensor_parallel(cluster, scheme, *sizes, recipe.train.precision)
            prices[f"a linear layer, tensor parallel in {scheme}"] = price
    return prices


def as_json(search: Search, found: Sequence[Candidate], tokens: float, routing: dict[str, Any]) -> dict[str, Any]:
    """Return the plan as JSON values.

    Args:
        found: the candidates that fit, the fastest first.
        tokens: training tokens, for time and cost.
        routing: figures of `pretrain.planner.loads.imbalance` for the best split.
    """
    cluster = search.cluster
    return {
        "cluster": {"name": cluster.name, "source": cluster.source, "memory": cluster.device.memory},
        "ranks": search.num_ranks,
        "tokens": tokens,
        "routing": routing,
        "plans": [_values(candidate, cluster, tokens) for candidate in found[:_SHOWN]],
        "neighbors": [
            {"change": change, "why": _why(found[0], other, cluster)} for change, other in search.neighbors_of(found[0])
        ],
        "tried": [
            {"split": one.split, "seconds": one.prediction.seconds, "bytes": one.prediction.bytes, "fits": one.fits}
            for one in search.tried.values()
            if one.prediction is not None
        ],
    }


def _values(candidate: Candidate, cluster: Cluster, tokens: float) -> dict[str, Any]:
    prediction = candidate.prediction
    assert prediction is not None
    days = tokens / prediction.tokens_per_second / 86400
    price = cluster.price
    ranks = prediction.recipe.parallel.world_size
    return {
        "split": candidate.split | {"data": prediction.recipe.parallel.data},
        "seconds": prediction.seconds,
        "tokens_per_second": prediction.tokens_per_second,
        "mfu": prediction.mfu(cluster),
        "bytes": prediction.bytes,
        "memory": prediction.memory,
        "terms": prediction.terms,
        "limit": max(prediction.terms, key=lambda term: prediction.terms[term]),
        "days": days,
        "cost": None if price is None else days * 24 * ranks * price.per_rank_hour,
        "currency": None if price is None else price.currency,
    }


def _why(best: Candidate, other: Candidate, cluster: Cluster) -> str:
    """Return why a neighbor of the best split is not better."""
    if other.prediction is None or best.prediction is None:
        return other.refusal
    if not other.fits:
        return f"needs {size_text(round(other.prediction.bytes))} of {size_text(round(cluster.device.memory))}"
    slower = other.prediction.seconds / best.prediction.seconds - 1
    terms = best.prediction.terms
    more = {term: value - terms.get(term, 0.0) for term, value in other.prediction.terms.items()}
    term = max(more, key=lambda name: more[name])
    return f"{slower:+.1%} time, {term} {more[term]:+.3g} s"


def as_text(values: dict[str, Any]) -> str:
    """Format the result of `as_json`, without the candidates that are not among the best."""
    plans = values["plans"]
    has_price = plans[0]["cost"] is not None
    header = [*_COLUMNS.values(), "step", "tokens/s", "MFU", "memory", "limit", "days"]
    rows = [[*header, "cost"] if has_price else header]
    for plan in plans:
        row = [
            *(_cell(plan["split"][key]) for key in _COLUMNS),
            f"{plan['seconds']:.3g} s",
            count_text(plan["tokens_per_second"]),
            f"{plan['mfu']:.1%}",
            size_text(round(plan["bytes"])),
            plan["limit"],
            f"{plan['days']:.3g}",
        ]
        rows.append([*row, f"{plan['cost']:,.0f} {plan['currency']}"] if has_price else row)
    best = plans[0]
    others = values["other_methods"]
    routing = ", ".join(f"{name} {value:.3g}" for name, value in values["routing"].items())
    lines = [
        values["summary"],
        f"best splits over {values['ranks']:,} ranks of {values['cluster']['name']}, for "
        f"{count_text(values['tokens'])} tokens ({len(values['tried'])} predicted):",
        *(f"  {line}" for line in aligned(rows)),
        "",
        "seconds of the best: " + _terms(best["terms"], "{:.3g}".format),
        "memory of its largest rank: " + _terms(best["memory"], lambda value: size_text(round(value))),
        f"loads and one exchange of rows (docs/planner.md): {routing}",
        "",
        "other methods for its ranks, most of them not built:",
        *(f"  {line}" for line in aligned([("method", "seconds", "sent", "memory"), *map(_price, others.items())])),
        "",
        "its neighbors:",
        *(
            f"  {line}"
            for line in aligned([["change", "result"], *([n["change"], n["why"]] for n in values["neighbors"])])
        ),
    ]
    return "\n".join(lines) + "\n"


def _cell(value: Any) -> str:
    if isinstance(value, bool):
        return "yes" if value else "no"
    return str(1 if value is None else value)


def _price(item: tuple[str, dict[str, float]]) -> tuple[str, ...]:
    name, price = item
    return (name, f"{price['seconds']:.3g}", size_text(round(price["sent"])), size_text(round(price["memory"])))


def _terms(values: dict[str, float], formatted: Any) -> str:
    ordered = sorted(values.items(), key=lambda item: -item[1])
    return ", ".join(f"{name} {formatted(value)}" for name, value in ordered if value > 0)
