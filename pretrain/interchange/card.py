"""README.md of an export: a model card of the Hugging Face Hub, from what the run and its checkpoint recorded.

Nothing is estimated: what is not recorded is left out. Of paths, only the last name is written.
"""

import html
import json
import math
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fmoe.errors import UserError, printable, require
from pretrain.checkpoint import Checkpoint
from pretrain.config import Recipe
from pretrain.files import read_object, with_ending
from pretrain.formats import markdown
from pretrain.tracking.folder import CHECKPOINTS, METRICS, read_run_info
from pretrain.tracking.jsonl import read_metrics

CARD = "README.md"
_LOADERS = {"gpt": "AutoModelForCausalLM", "t5": "AutoModelForSeq2SeqLM", "bert": "AutoModelForMaskedLM"}
_TASKS = {"gpt": "text-generation", "bert": "fill-mask"}  # a pretrained t5 fits none of the Hub's
_ROUTING = {"entropy": "router entropy (nats)", "load_cv": "load imbalance", "drop_rate": "dropped assignments"}
_ROUTING_STEPS = 100
_MAX_SOURCES = 5

Row = dict[str, Any]


def check_license(license: str | None) -> None:
    """Raise UserError unless ``license`` has the form of the Hub's identifiers, such as ``apache-2.0``."""
    if license is not None and not re.fullmatch(r"[a-z0-9]+([.+-][a-z0-9]+)*", license):
        raise UserError(
            f"--license {license!r} must be an identifier of the Hugging Face Hub, such as apache-2.0, mit or other"
        )


def model_card(
    checkpoint: Checkpoint,
    recipe: Recipe,
    config: Mapping[str, Any],
    name: str,
    *,
    license: str | None = None,
    has_tokenizer: bool = True,
) -> str:
    """Return the model card of an export.

    Args:
        checkpoint: the exported checkpoint; in the folder of its run, the run's records are used too.
        recipe: the checkpoint's recipe, as exported.
        config: the export's config.json.
        name: title of the card, and the model's name in the example: an id of the Hub or the name of a folder.
        license: identifier of the Hub; None to state no license.

    Raises:
        UserError: ``run.json`` or ``metrics.jsonl`` of the run is damaged.
    """
    run = checkpoint.path.resolve().parent.parent
    is_in_run = checkpoint.path.resolve().parent.name == CHECKPOINTS
    info = read_run_info(run) if is_in_run else {}
    rows = read_metrics(run / METRICS) if is_in_run and (run / METRICS).is_file() else []
    rows = [row for row in rows if row["step"] <= checkpoint.step]
    is_trained = not checkpoint.state.get("weights_only")
    corpora = list(_corpora(checkpoint, recipe, info)) if is_trained else []
    hub = require("huggingface_hub", "pretrain", "the model card")
    datasets = {each["name"] for corpus in corpora for each in corpus["datasets"] if each.get("revision")}
    front = hub.ModelCardData(
        license=license,
        library_name="transformers",
        tags=["mixture-of-experts", "moe", "fmoe"] if recipe.model.layers_with_experts else ["fmoe"],
        pipeline_tag=_TASKS.get(recipe.model.kind),
        datasets=sorted(datasets) or None,
    )
    parts = [f"---\n{front.to_yaml()}\n---", f"# {_text(name)}", _usage(recipe, config, name, has_tokenizer)]
    training = _training(checkpoint, recipe, info) if is_trained else {}
    sections = {
        "Architecture": _table(_architecture(recipe, config)),
        "Training": _table(training) if is_trained else "The weights were imported; their training is not recorded.",
        "Data": _data(corpora),
        "Metrics": _table(_metrics(rows)),
        "Routing": _routing(rows),
        "Versions": _table(info.get("versions") or {}),
    }
    parts += [f"## {title}\n\n{text}" for title, text in sections.items() if text]
    return "\n\n".join(parts) + "\n"


def _usage(recipe: Recipe, config: Mapping[str, Any], name: str, has_tokenizer: bool) -> str:
    loader = _LOADERS[recipe.model.kind]
    needs_code = "auto_map" in config
    trusts = ", trust_remote_code=True" if needs_code else ""
    lines = [
        f"from transformers import {loader}" + (", AutoTokenizer" if has_tokenizer else ""),
        "",
        f"model = {loader}.from_pretrained({json.dumps(name)}{trusts})",
    ]
    if has_tokenizer:
        plain = ", trust_remote_code=False" if needs_code else ""
        lines.append(f"tokenizer = AutoTokenizer.from_pretrained({json.dumps(name)}{plain})")
    code = "\n".join(lines)
    text = f"Written by `fmoe export`. Load the model with `transformers`:\n\n```python\n{code}\n```"
    if needs_code:
        text += (
            "\n\n`trust_remote_code=True` runs `modeling_fmoe.py` of this repository, which needs the package `fmoe`."
        )
    return text


def _architecture(recipe: Recipe, config: Mapping[str, Any]) -> Row:
    model = recipe.model
    moe = model.moe
    rows: Row = {
        "class": config["architectures"][0],
        "parameters": f"{recipe.num_params():,}",
        "active parameters per token": f"{recipe.num_active_params():,}",
        "layers": len(model.layer_numbers),
        "hidden size": model.hidden_size,
        "attention heads": model.attention.num_heads,
        "vocabulary": f"{model.vocab_size:,}",
        "sequence length": f"{model.sequence_length:,}",
    }
    if model.layers_with_experts:
        rows |= {
            "layers with experts": len(model.layers_with_experts),
            "routed experts per layer": model.routed_experts,
            "experts per token": model.chosen_experts,
            "shared experts": moe.num_shared_experts,
            "gate": moe.gate,
            "capacity factor in training": "none" if moe.capacity_factor is None else moe.capacity_factor,
            "capacity factor in evaluation": "none" if moe.eval_capacity_factor is None else moe.eval_capacity_factor,
        }
    return rows


def _training(checkpoint: Checkpoint, recipe: Recipe, info: Mapping[str, Any]) -> Row:
    sequences = recipe.batches.first(checkpoint.step)
    optimizer = recipe.optimizer
    train = recipe.train
    factor = optimizer.lr_factor(train.global_batch)
    warmup = f"{optimizer.warmup_steps} steps"
    if optimizer.warmup_tokens is not None:
        warmup = f"{optimizer.warmup_tokens:,} tokens"
    rows: Row = {
        "steps": f"{checkpoint.step:,} of {train.steps:,}",
        "sequences": f"{sequences:,}",
        "tokens": f"{sequences * recipe.tokens_per_sequence:,}",
        "global batch": f"{train.global_batch:,} sequences",
        "optimizer": optimizer.name,
        "learning rate": f"{optimizer.lr * factor:g}, {optimizer.schedule}, warmup of {warmup}",
        "weight decay": f"{optimizer.weight_decay:g}",
        "precision": train.precision,
        "ranks": f"{recipe.parallel.world_size} ({recipe.parallel.world_size_name})",
    }
    if optimizer.schedule != "constant":
        rows["learning rate"] += f", at the end {optimizer.min_lr * factor:g}"
    if train.ramp_batch is not None:
        rows["global batch"] += f", from {train.ramp_batch:,} over {train.ramp_samples:,} sequences"
    if train.init_from is not None:
        rows["initial weights"] = Path(train.init_from).name
    if "device" in info:
        rows["device"] = info["device"]
    return rows


def _corpora(checkpoint: Checkpoint, recipe: Recipe, info: Mapping[str, Any]) -> Iterator[Row]:
    """Yield use, name, tokens, documents, datasets and sources of each corpus.

    A description beside the corpus counts only if it has the digest that the run recorded.
    """
    recorded = {
        "training": (recipe.data.train, checkpoint.state.get("data", {}).get("corpora")),
        "validation": (recipe.data.validation, (info.get("data") or {}).get("validation")),
    }
    for use, (prefixes, digests) in recorded.items():
        if digests is None or len(digests) != len(prefixes):  # the run may have been resumed with other ones
            digests = [None] * len(prefixes)
        for prefix, digest in zip(prefixes, digests, strict=True):
            described = read_object(with_ending(Path(prefix), ".json")) or {}
            if digest is None or described.get("sha256", {}).get("bin") != digest:
                described = {}
            datasets = described.get("mixture", {}).get("datasets", [])
            sources = [
                ", ".join(filter(None, (each["name"], each.get("config"), each.get("split")))) for each in datasets
            ]
            yield {
                "use": use,
                "name": Path(prefix).name,
                "documents": described.get("documents"),
                "tokens": described.get("tokens"),
                "datasets": datasets,
                "sources": sources or [Path(source).name for source in described.get("sources", [])],
            }


def _data(corpora: Sequence[Row]) -> str:
    if not corpora:
        return ""
    rows = [["corpus", "use", "documents", "tokens", "sources"]]
    for corpus in corpora:
        sources = ", ".join(corpus["sources"][:_MAX_SOURCES])
        more = len(corpus["sources"]) - _MAX_SOURCES
        counts = ["" if corpus[key] is None else f"{corpus[key]:,}" for key in ("documents", "tokens")]
        if more > 0:
            sources += f" and {more:,} more"
        rows.append([_text(cell) for cell in (corpus["name"], corpus["use"], *counts, sources)])
    return markdown(rows)


def _metrics(rows: Sequence[Row]) -> Row:
    last: Row = {}
    for row in rows:
        last |= {key: value for key, value in row.items() if isinstance(value, int | float)}
    found: Row = {}
    for key, label in (("loss", "training loss"), ("val/loss", "validation loss")):
        if key in last:
            found[f"{label} (nats per token)"] = f"{last[key]:.4f}"
    if last.get("val/loss", math.inf) < 700:
        found["validation perplexity"] = f"{math.exp(last['val/loss']):.4g}"
    found |= {key: f"{value:.4g}" for key, value in sorted(last.items()) if key.startswith("eval/")}
    return found


def _routing(rows: Sequence[Row]) -> str:
    """Return a table of the layers with experts: means over the last steps."""
    steps = [row for row in rows if "moe/entropy" in row][-_ROUTING_STEPS:]
    if not steps:
        return ""
    numbers = sorted(int(match[1]) for key in steps[-1] if (match := re.fullmatch(r"moe/layer_(\d+)/entropy", key)))
    table = [["layer", *_ROUTING.values()]]
    for number in numbers:
        cells = []
        for name in _ROUTING:
            values = [row.get(f"moe/layer_{number}/{name}") for row in steps]
            known = [value for value in values if value is not None]
            cells.append(f"{sum(known) / len(known):.4g}" if known else "")
        table.append([str(number), *cells])
    first = steps[0]["step"]
    note = f"Means over the {len(steps)} steps {first} to {steps[-1]['step']}. "
    note += "The load imbalance is the coefficient of variation of the experts' loads; 0 is balanced."
    return f"{note}\n\n{markdown(table)}"


def _table(rows: Mapping[str, Any]) -> str:
    return markdown([["", ""], *([_text(key), _text(value)] for key, value in rows.items())]) if rows else ""


def _text(value: Any) -> str:
    return html.escape(printable(str(value)), quote=False)
