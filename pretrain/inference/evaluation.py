"""How well a model predicts: loss, accuracy, bits a byte, and where its tokens were routed."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe.metrics import LayerReport, counting, metrics
from pretrain.config import Recipe
from pretrain.inference.windows import Sample
from pretrain.models import kind_of
from pretrain.models.batch import Batch, collate


@dataclass
class Evaluation:
    """Sums over what was predicted, and what they say.

    Attributes:
        sequences: samples, the windows of a GPT.
        tokens: predicted ones.
        nats: minus the logarithms of their probabilities.
        correct: those that the model held for the most probable.
        bytes: UTF-8 bytes of their text; None of a model that does not predict a text from its begin to its end.
        layers: routing by layer number.
    """

    sequences: int = 0
    tokens: int = 0
    nats: float = 0.0
    correct: int = 0
    bytes: int | None = None
    layers: dict[int, LayerReport] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Nats a predicted token."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss)."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def accuracy(self) -> float:
        """Share of the tokens that were the most probable."""
        return self.correct / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        """None without bytes."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    recipe: Recipe,
    samples: Iterable[Sample | np.ndarray],
    *,
    byte_lengths: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] = lambda sequences: None,
) -> Evaluation:
    """The recipe's objective over samples, each predicted token once.

    Args:
        model: in evaluation.
        samples: as the recipe's kind of model takes them; neighbours of one length make micro batches.
        byte_lengths: of each token's text, int64 [vocabulary]; None for no bits a byte.
        on_progress: called with the sequences done.
    """
    forward = kind_of(recipe).forward
    result = Evaluation(bytes=None if byte_lengths is None else 0)
    with counting(model):
        for batch in batches(samples, recipe.train.micro_batch, recipe.model.vocab_size):
            labels, mask = batch.pop("labels"), batch.pop("loss_mask", None)
            logits_BSV = forward(model, {name: tensor.to(device) for name, tensor in batch.items()})
            for logits_SV, labels_S, mask_S in zip(
                logits_BSV, labels, [None] * len(labels) if mask is None else mask, strict=True
            ):
                _add(result, logits_SV, labels_S, mask_S, byte_lengths)
            result.sequences += len(labels)
            on_progress(result.sequences)
        layers = {module: name for name, module in model.named_modules()}
        reports = metrics(model)
        numbered = {module.layer_number: reports[name] for module, name in layers.items() if name in reports}
        result.layers = dict(sorted(numbered.items()))
    return result


def batches(samples: Iterable[Sample | np.ndarray], size: int, vocab_size: int | None = None) -> Iterator[Batch]:
    """Micro batches of ``size`` neighbours, fewer before a sample of another length and at the end.

    Raises:
        UserError: see `collate`.
    """
    held: list[Sample | np.ndarray] = []
    for sample in samples:
        if held and (len(held) == size or _shape(sample) != _shape(held[0])):
            yield collate(held, vocab_size)
            held = []
        held.append(sample)
    if held:
        yield collate(held, vocab_size)


def _shape(sample: Sample | np.ndarray) -> tuple[int, ...]:
    return tuple(len(part) for part in sample.values()) if isinstance(sample, dict) else (len(sample),)


def _add(
    result: Evaluation, logits_SV: Tensor, labels_S: Tensor, mask_S: Tensor | None, byte_lengths: np.ndarray | None
) -> None:
    """Counts one sequence; one at a time, because its logits are there in float32 a second time."""
    logits_SV, on_device_S = logits_SV.float(), labels_S.to(logits_SV.device)
    nats_S = F.cross_entropy(logits_SV, on_device_S, reduction="none").cpu()
    is_correct_S = (logits_SV.argmax(-1) == on_device_S).cpu()
    counted_S = torch.ones_like(is_correct_S) if mask_S is None else mask_S.bool()
    result.tokens += int(counted_S.sum())
    result.nats += float(nats_S[counted_S].double().sum())
    result.correct += int(is_correct_S[counted_S].sum())
    if byte_lengths is not None:
        result.bytes = (result.bytes or 0) + int(byte_lengths[labels_S[counted_S].numpy()].sum())
