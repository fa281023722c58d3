"""The best size for a budget of FLOPs by each law, and its recipe keys."""

import json
from itertools import product
from typing import Any

from fmoe.errors import UserError
from pretrain.formats import aligned, count_text
from pretrain.planner.laws import LAWS, OWN_STUDY, Law, Size

HEAD = 64  # width of a head; the width per layer, too, as arXiv 2402.07871 and 2502.05172 assume


def optimum(law: Law, flops: float, max_params: float) -> Size | None:
    """Return the size with the lowest predicted loss; None if no size is within the bounds.

    Tries all numbers of layers from 2 to 999. The width is 64 times this number, or one head of 64 more or less.

    Args:
        flops: upper bound on training FLOPs. The model trains with all of them, unless the law fixes the tokens.
        max_params: upper bound on the total number of parameters.
    """
    depths = range(2, 1000, law.every)
    choices = product(law.expansions, law.granularities, depths, (-1, 0, 1))
    sizes = [Size(law, flops, e, g, layers, HEAD * (layers + more)) for e, g, layers, more in choices]
    within = [size for size in sizes if law.fixed_tokens * size.flops_per_token <= flops and size.total <= max_params]
    return min(within, key=lambda size: size.loss, default=None)


def plan(flops: float, name: str, max_params: float) -> dict[str, Any]:
    """Return the laws with their figures, and the recipe keys of one law, as JSON values.

    Args:
        flops, max_params: as for `optimum`.
        name: law of the recipe keys.

    Raises:
        UserError: this law has no size within the bounds.
    """
    found = {key: optimum(law, flops, max_params) for key, law in LAWS.items()}
    chosen = found[name]
    if chosen is None:
        raise UserError(f"--law={name} has no size with {flops:.3g} FLOPs and at most {max_params:.3g} parameters")
    laws = {key: law._asdict() | result(found[key]) for key, law in LAWS.items()} | {"fmoe": OWN_STUDY}
    return {"flops": flops, "laws": laws, "law": name, "recipe": recipe_keys(chosen)}


def result(size: Size | None) -> dict[str, Any]:
    """Return the figures of a size by name, with the loss in nats per token, and the names of those out of range."""
    if size is None:
        return {"figures": {}, "extrapolation": []}
    figures = {
        "total_parameters": size.total,
        "active_parameters": size.active,
        "tokens": size.tokens,
        "experts": size.expansion * size.granularity,
        "experts_per_token": size.granularity,
        "granularity": size.granularity,
        "expert_width": size.law.hidden * size.width // size.granularity,
        "loss": size.loss,
    }
    outside = [name for name, (low, high) in size.law.fitted.items() if not low <= figures[name] <= high]
    return {"figures": figures, "extrapolation": outside and [*outside, "loss"]}


def recipe_keys(size: Size) -> dict[str, dict[str, Any]]:
    """Return the recipe keys of a size, by section."""
    law = size.law
    keys = {
        "model": {
            "num_layers": size.layers,
            "hidden_size": size.width,
            "ffn_hidden_size": law.hidden * size.width,
        },
        "attention": {"num_heads": size.width // HEAD},
        "moe": {"num_experts": size.expansion if size.expansion > 1 else 0, "granularity": size.granularity},
        "train": {"steps": round(size.tokens / law.batch_tokens)},
    }
    return {section: keys[section] | law.recipe[section] for section in keys}


def text(planned: dict[str, Any]) -> str:
    """Return the result of `plan` for people. It ends with the recipe keys as TOML."""
    lines = [f"{planned['flops']:.3g} FLOPs"]
    for name, entry in planned["laws"].items():
        rows = [("", "", "fitted on", "")]
        for key, value in entry["figures"].items():
            bounds = " to ".join(map(_shown, entry["fitted"].get(key, ())))
            label = "extrapolation" if key in entry["extrapolation"] else ""
            rows.append((key.replace("_", " "), _shown(value), bounds, label))
        table = aligned(rows) if entry["figures"] else ["no size is within the budget and --max-params"]
        lines += ["", f"{name}: {entry['source']}", entry["equation"], json.dumps(entry["coefficients"]), *table]
    lines += ["", f"# size by the law {planned['law']}"]
    for section, keys in planned["recipe"].items():
        lines += [f"[{section}]", *(f"{key} = {json.dumps(value)}" for key, value in keys.items())]
    return "\n".join(lines)


def _shown(value: float) -> str:
    return f"{value:,.4g}" if value < 10_000 else count_text(value)
