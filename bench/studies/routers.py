"""``python -m bench routers RUN...``: value of the routers' choices in trained GPTs, and the routers' gradients.

Two measurements at the newest checkpoint of each run, on its validation text:

* Value of the choice: the rise of the validation loss if tokens go to random experts with unchanged combine weights, in
  all layers or in one; and, for comparison, the rise without the experts of one layer.
* Gradients of the router: for each layer, the norm of its gradient from the language model's loss and from each
  auxiliary loss, at the recipe's factors; and the cosine between the gradients of the language model's loss for two
  micro batches, which is near 0 if noise dominates.
"""

import argparse
from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from fmoe import random
from fmoe.errors import UserError
from fmoe.gates import Choice, Scores
from pretrain.config import Recipe
from pretrain.data.samples import Samples
from pretrain.formats import markdown
from pretrain.inference.evaluation import evaluate
from pretrain.models import kind_of
from pretrain.models.batch import collate, loss_function

Change = Callable[[Scores, Choice], Choice]


@dataclass(frozen=True)
class Report:
    """Measurements of one run.

    Attributes:
        name: the run's folder.
        loss: validation loss, nats per token.
        random_loss: validation loss with random experts in all layers.
        layers: per layer number, the columns of the second table.
    """

    name: str
    loss: float
    random_loss: float
    layers: dict[int, dict[str, float]]


def at_random(scores: Scores, choice: Choice) -> Choice:
    """Return the choice with K different experts of each token, drawn uniformly."""
    draws_TE = torch.rand(scores.probs_TE.shape, generator=torch.Generator().manual_seed(1))
    return replace(choice, expert_TK=draws_TE.topk(choice.expert_TK.shape[1], dim=-1).indices)


def without_experts(scores: Scores, choice: Choice) -> Choice:
    """Return the choice with combine weights of 0."""
    return replace(choice, weight_TK=torch.zeros_like(choice.weight_TK))


def measure_run(run: Path, count: int) -> Report:
    """Measure one run on the first ``count`` sequences of its validation text.

    Raises:
        UserError: the run has no complete checkpoint, or its model is not a GPT with experts.
    """
    from pretrain.data.inputs import open_validation
    from pretrain.inference.load import load_model, open_run, process_groups

    trained = open_run(run)
    recipe = trained.recipe
    if recipe.model.kind != "gpt" or not recipe.model.moe.num_experts:
        has = f"model.kind={recipe.model.kind} and moe.num_experts={recipe.model.moe.num_experts}"
        raise UserError(f"{run} has {has}: pass the run of a gpt with experts")
    samples, _ = open_validation(recipe, trained.tokenizer)
    with process_groups(seed=recipe.train.seed) as processes:
        return measure(str(run), load_model(trained, processes, drops=False), recipe, samples, count)


def measure(name: str, model: Any, recipe: Recipe, samples: Samples, count: int) -> Report:
    """Measure a model, given in evaluation mode; leave it in training mode."""
    from megatron_patch import MegatronMoE

    layers = {module.layer_number: module for module in model.modules() if isinstance(module, MegatronMoE)}
    validation = [samples[i] for i in range(count)]
    spreads = {number: _watch(layer) for number, layer in layers.items()}
    own = evaluate(model, recipe, validation)
    _unwatch(layers.values())

    def changed_loss(chosen: Collection[MegatronMoE], change: Change) -> float:
        for layer in chosen:
            _watch(layer, change)
        loss = evaluate(model, recipe, validation).loss
        _unwatch(chosen)
        return loss

    random_loss = changed_loss(layers.values(), at_random)
    rows = {
        number: {
            "entropy": own.layers[number].entropy,
            "load CV": own.layers[number].load_cv,
            "logit spread": sum(spreads[number]) / len(spreads[number]),
            "random experts": changed_loss([layer], at_random) - own.loss,
            "no experts": changed_loss([layer], without_experts) - own.loss,
        }
        for number, layer in layers.items()
    }
    for number, row in _gradients(model.train().requires_grad_(), recipe, samples, layers).items():
        rows[number] |= row
    return Report(name, own.loss, random_loss, rows)


def _watch(layer, change: Change | None = None) -> list[float]:
    """Let ``change`` replace the layer's choices, and return a list that receives the spread of each batch's logits.

    The spread is the root mean square, over tokens, of the logits' standard deviation over experts.
    """
    spreads: list[float] = []
    choose = layer.gate.choose

    def watched(scores, groups):
        choice = choose(scores, groups)
        spreads.append(float(scores.logits_TE.var(-1, correction=0).mean().sqrt()))
        return choice if change is None else change(scores, choice)

    layer.gate.choose = watched
    return spreads


def _unwatch(layers: Iterable) -> None:
    for layer in layers:
        del layer.gate.choose  # restores the method of the class


def _gradients(model: Any, recipe: Recipe, samples: Samples, layers: dict[int, Any]) -> dict[int, dict[str, float]]:
    """Return, by layer, the norms of the router's gradients by loss, for one micro batch of the validation text.

    "cosine" is that between the gradients of the language model's loss for this micro batch and the next. The gradient
    of an auxiliary loss is the difference between the gradients with and without it.
    """
    size = recipe.train.micro_batch
    factors = {number: dict(layer.aux.weights) for number, layer in layers.items()}

    def gradients(first: int, name: str | None = None) -> dict[int, Tensor]:
        for number, layer in layers.items():
            layer.aux.weights = {key: value if key == name else 0.0 for key, value in factors[number].items()}
        model.zero_grad()
        random.set_position(recipe.train.seed, recipe.train.steps, first * recipe.model.sequence_length)
        batch = collate([samples[first + i] for i in range(size)], recipe.model.vocab_size)
        loss, _ = loss_function(batch)(kind_of(recipe).forward(model, batch))
        loss.backward()
        return {number: layer.gate.weight.grad.clone() for number, layer in layers.items()}

    of_text = gradients(0)
    of_next = gradients(size)
    found = {
        number: {
            "text": float(grad.norm()),
            "cosine": float(F.cosine_similarity(grad.flatten(), of_next[number].flatten(), 0)),
        }
        for number, grad in of_text.items()
    }
    for name in sorted(set().union(*(layer.aux.metrics.seen for layer in layers.values()))):
        for number, total in gradients(0, name).items():
            found[number][name] = float((total - of_text[number]).norm())
    return found


def text(reports: Sequence[Report]) -> str:
    """Return both tables as Markdown."""
    losses = [["run", "loss", "with random experts"]]
    for report in reports:
        rise = report.random_loss - report.loss
        losses.append([report.name, f"{report.loss:.4f}", f"{report.random_loss:.4f} ({rise:+.4f})"])
    columns = list(dict.fromkeys(key for report in reports for row in report.layers.values() for key in row))
    routers = [["run", "layer", *columns]]
    for report in reports:
        for number, row in report.layers.items():
            routers.append([report.name, str(number), *(f"{row[c]:.3g}" if c in row else "-" for c in columns)])
    return f"{markdown(losses)}\n\n{markdown(routers)}"


def main(argv: Sequence[str]) -> None:
    """Print both tables.

    Raises:
        UserError: see `measure_run`.
    """
    parser = argparse.ArgumentParser(prog="python -m bench routers", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run of a GPT with experts")
    parser.add_argument("--sequences", type=int, default=32, help="number of sequences of the validation text")
    arguments = parser.parse_args(argv)
    if arguments.sequences < 1:
        raise UserError(f"--sequences={arguments.sequences} must be at least 1")
    print(text([measure_run(run, arguments.sequences) for run in arguments.runs]))
