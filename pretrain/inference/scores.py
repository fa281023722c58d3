"""Figures of a source of samples: its scores, and the load of experts by class."""

from torch import nn

from pretrain.data.custom import SourceSamples
from pretrain.inference.evaluation import evaluate, predict
from pretrain.inference.load import Trained, load_model
from pretrain.start.process import Processes

Loads = dict[int, dict[int, list[float]]]
"""Share of each expert in the kept assignments, by class of the samples and number of the layer."""


def score(
    model: nn.Module, trained: Trained, samples: SourceSamples, count: int, processes: Processes
) -> tuple[dict[str, float], Loads]:
    """Return the source's figures of a model on the first ``count`` samples, and loads by class. Collective.

    Either is empty if the source has no ``score``, or no ``classes``.

    Args:
        model: the model of ``trained``, loaded with its limits of expert capacity.
    """
    source = samples.source
    recipe = trained.recipe
    numbers = [samples.index(n) for n in range(count)]
    values: dict[str, float] = {}
    if hasattr(source, "score"):
        # A token that a T5 decodes must not depend on others that compete for an expert's capacity.
        decoder = load_model(trained, processes, drops=False) if recipe.model.kind == "t5" else model
        values = source.score(numbers, lambda rows: predict(decoder, recipe, trained.tokenizer, rows, processes.device))
    loads: Loads = {}
    classes = getattr(source, "classes", None)
    if classes is not None:
        for number in sorted({int(classes[i]) for i in numbers}):
            of_class = (samples[n] for n, i in enumerate(numbers) if classes[i] == number)
            layers = evaluate(model, recipe, of_class, device=processes.device).layers
            loads[number] = {layer: report.load for layer, report in layers.items()}
    return values, loads
