"""``python -m bench routers RUN...``: whether the routers of trained GPTs choose, and which losses train them.

Two measurements at the newest checkpoint of each run, on its validation text:

* What the choice is worth: the rise of the validation loss if each token goes to other experts than its own, with its
  own weights: to the next best ones, and to random ones. A router that hardly chooses loses little.
* What trains the router: for each layer, the norm of the router's gradient from the language model's loss and from each
  auxiliary loss, at the recipe's factors.
"""

import argparse
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor

from fmoe.errors import UserError
from fmoe.gates import Choice, Scores
from pretrain.compare.table import markdown

Chooser = Callable[[Scores, Choice], Tensor]


@dataclass(frozen=True)
class Report:
    """Measurements of one run.

    Attributes:
        name: the run's folder.
        losses: validation loss in nats per token, by how experts are chosen (`CHOOSERS`).
        layers: per layer number, the columns of the second table.
    """

    name: str
    losses: dict[str, float]
    layers: dict[int, dict[str, float]]


def next_best(scores: Scores, choice: Choice) -> Tensor:
    """Return the K experts that the router ranks after the chosen ones."""
    others_TE = scores.probs_TE.scatter(-1, choice.expert_TK, -1.0)
    return others_TE.topk(choice.expert_TK.shape[1], dim=-1).indices


def at_random(scores: Scores, choice: Choice) -> Tensor:
    """Return K different experts of each token, drawn uniformly."""
    draws_TE = torch.rand(scores.probs_TE.shape, generator=torch.Generator().manual_seed(1))
    return draws_TE.topk(choice.expert_TK.shape[1], dim=-1).indices


CHOOSERS: dict[str, Chooser | None] = {"own": None, "next best": next_best, "random": at_random}


def measure(run: Path, count: int) -> Report:
    """Measure one run on the first ``count`` sequences of its validation text.

    Raises:
        UserError: the run has no complete checkpoint, or its model is no GPT with routers.
    """
    from megatron_patch import MegatronMoE
    from pretrain.data.inputs import open_validation
    from pretrain.inference.evaluation import evaluate
    from pretrain.inference.load import load_model, open_run, single_process

    trained = open_run(run)
    recipe = trained.recipe
    if recipe.model.kind != "gpt" or not recipe.model.num_experts:
        has = f"model.kind={recipe.model.kind} and model.num_experts={recipe.model.num_experts}"
        raise UserError(f"{run} has {has}: pass the run of a gpt with experts")
    samples, _ = open_validation(recipe, trained.tokenizer)
    with single_process(recipe.train.seed) as processes:
        model = load_model(trained, processes, drops=False)
        layers = {m.layer_number: m for m in model.modules() if isinstance(m, MegatronMoE)}
        losses = {}
        for name, chooser in CHOOSERS.items():
            spreads = {number: _watch(layer, chooser) for number, layer in layers.items()}
            result = evaluate(model, recipe, [samples[i] for i in range(count)])
            for layer in layers.values():
                del layer.gate.choose  # the method of the class again
            losses[name] = result.loss
            if chooser is None:
                own, spread = result.layers, {n: sum(values) / len(values) for n, values in spreads.items()}
        gradients = _gradients(model.train().requires_grad_(), recipe, samples, layers)
    rows = {
        number: {"entropy": own[number].entropy, "load CV": own[number].load_cv, "logit spread": spread[number]}
        | gradients[number]
        for number in layers
    }
    return Report(str(run), losses, rows)


def _watch(layer, chooser: Chooser | None) -> list[float]:
    """Let ``chooser`` replace the layer's experts; return the list that gets the spread of each batch's logits: the
    root mean square, over tokens, of their standard deviation over experts."""
    spreads: list[float] = []
    choose = layer.gate.choose

    def watched(scores, groups):
        choice = choose(scores, groups)
        spreads.append(float(scores.logits_TE.var(-1, correction=0).mean().sqrt()))
        return choice if chooser is None else replace(choice, expert_TK=chooser(scores, choice))

    layer.gate.choose = watched
    return spreads


def _gradients(model, recipe, samples, layers) -> dict[int, dict[str, float]]:
    """Return the norm of each router's gradient by loss, for one micro batch of the validation text. Gradients are
    linear in the factors of the losses, so that of a loss is a difference."""
    from fmoe import random
    from pretrain.models import kind_of
    from pretrain.models.batch import collate, loss_function

    batch = collate([samples[i] for i in range(recipe.train.micro_batch)], recipe.model.vocab_size)
    factors = {number: dict(layer.aux.weights) for number, layer in layers.items()}

    def gradients(name: str | None) -> dict[int, Tensor]:
        for number, layer in layers.items():
            layer.aux.weights = {key: value if key == name else 0.0 for key, value in factors[number].items()}
        model.zero_grad()
        random.set_position(recipe.train.seed, recipe.train.steps)
        loss, _ = loss_function(dict(batch))(kind_of(recipe).forward(model, dict(batch)))
        loss.backward()
        return {number: layer.gate.weight.grad.clone() for number, layer in layers.items()}

    of_text = gradients(None)
    found = {number: {"text": float(of_text[number].norm())} for number in layers}
    seen = sorted(set().union(*(layer.aux.metrics.seen for layer in layers.values())))
    for name in seen:
        for number, total in gradients(name).items():
            found[number][name] = float((total - of_text[number]).norm())
    return found


def text(reports: Sequence[Report]) -> str:
    """Return both tables as Markdown."""
    choices = [["run", *(f"loss, {name} experts" for name in CHOOSERS)]]
    for report in reports:
        own = report.losses["own"]
        rises = [f"{loss:.3f} (+{loss - own:.3f})" for name, loss in report.losses.items() if name != "own"]
        choices.append([report.name, f"{own:.4f}", *rises])
    columns = list(dict.fromkeys(key for report in reports for row in report.layers.values() for key in row))
    routers = [["run", "layer", *columns]]
    for report in reports:
        for number, row in report.layers.items():
            routers.append([report.name, str(number), *(f"{row[c]:.3g}" if c in row else "-" for c in columns)])
    return f"{markdown(choices)}\n\n{markdown(routers)}"


def main(argv: Sequence[str]) -> None:
    """Print both tables.

    Raises:
        UserError: see `measure`.
    """
    parser = argparse.ArgumentParser(prog="python -m bench routers", description=__doc__, allow_abbrev=False)
    parser.add_argument("runs", nargs="+", type=Path, metavar="RUN", help="folder of a run of a GPT with experts")
    parser.add_argument("--sequences", type=int, default=32, help="of the validation text")
    arguments = parser.parse_args(argv)
    if arguments.sequences < 1:
        raise UserError(f"--sequences={arguments.sequences} is not positive")
    print(text([measure(run, arguments.sequences) for run in arguments.runs]))
