"""Evaluation of a model: loss, accuracy, bits per byte, and the routing of its tokens."""

import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from megatron.core import parallel_state
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe import MoE
from fmoe.errors import UserError
from fmoe.metrics import LayerReport, counting
from megatron_patch.transformer_xl import StreamMemory
from pretrain.config import Recipe
from pretrain.engine.routing import RoutingReports
from pretrain.inference.decoding import T5Decoder, generate
from pretrain.inference.sampling import Sampling
from pretrain.inference.stages import run_stages
from pretrain.inference.windows import Sample
from pretrain.models import kind_of
from pretrain.models.batch import Batch, collate, to_device


@dataclass
class Evaluation:
    """Sums over predicted tokens, and the metrics computed from them.

    Attributes:
        sequences: number of samples; for a GPT, windows.
        tokens: number of predicted tokens.
        nats: sum of the predicted tokens' negative log-probabilities.
        correct: number of tokens that the model ranked first.
        bytes: UTF-8 bytes of the predicted tokens' text; None if `evaluate` got no ``byte_lengths``.
        layers: routing metrics of each layer with experts, by layer number.
    """

    sequences: int = 0
    tokens: int = 0
    nats: float = 0.0
    correct: int = 0
    bytes: int | None = None
    layers: dict[int, LayerReport] = field(default_factory=dict)

    @property
    def loss(self) -> float:
        """Mean cross-entropy in nats per predicted token; NaN if no token was predicted."""
        return self.nats / self.tokens if self.tokens else math.nan

    @property
    def perplexity(self) -> float:
        """exp(loss); infinity for a loss above 700."""
        return math.inf if self.loss > 700 else math.exp(self.loss)

    @property
    def accuracy(self) -> float:
        """Share of the predicted tokens that the model ranked first; NaN if no token was predicted."""
        return self.correct / self.tokens if self.tokens else math.nan

    @property
    def bits_per_byte(self) -> float | None:
        """Mean cross-entropy in bits per byte of text; None if ``bytes`` is None."""
        return self.nats / math.log(2) / self.bytes if self.bytes else None


@torch.no_grad()
def evaluate(
    model: nn.Module,
    recipe: Recipe,
    samples: Iterable[Sample | np.ndarray],
    *,
    streams: int = 1,
    memory_length: int | None = None,
    byte_lengths: np.ndarray | None = None,
    device: torch.device | str = "cpu",
    on_progress: Callable[[int], None] = lambda sequences: None,
) -> Evaluation:
    """Evaluate the recipe's objective on samples. Collective.

    Data parallel ranks divide the micro batches. The result is that of a single process, on every rank.

    Args:
        model: the model, or this rank's part of it, in evaluation mode.
        samples: samples of the recipe's kind of model, the same on every rank; consecutive samples of equal length form
            micro batches.
        streams: for a model with memory, number of streams of text; sample i continues stream ``i % streams``.
        memory_length: number of hidden states in the model's memory; None for ``position.memory_length``.
        byte_lengths: UTF-8 bytes of each token's text, int64 [vocabulary]; None to skip bits per byte.
        on_progress: called with the number of sequences done.
    """
    forward = kind_of(recipe).forward
    length = recipe.model.position.memory_length if memory_length is None else memory_length
    size = recipe.train.micro_batch
    memory = StreamMemory(model, length, streams) if length else None
    micro_batches = batches(samples, size if memory is None else min(size, streams), recipe.model.vocab_size)
    data_group = parallel_state.get_data_parallel_group()
    # Streams are not divided: all data parallel ranks read them, and the first counts.
    num_parts = data_group.size() if memory is None else 1
    layers: list[Any] = [module for module in model.modules() if isinstance(module, MoE)]
    reports = RoutingReports.of(layers, recipe.model, torch.device(device))
    sums = Evaluation(bytes=None if byte_lengths is None else 0)
    done = 0
    with counting(model):
        for group in iter(lambda: list(islice(micro_batches, num_parts)), []):
            # The exchange needs every rank in every forward pass: a rank without a micro batch repeats another's.
            is_counted = data_group.rank() < len(group)
            batch = group[data_group.rank() if is_counted else 0]
            for layer in layers:
                layer.aux.counts_evaluation = is_counted
            if memory is not None:
                is_start = "starts" in batch and bool(batch.pop("starts").any())
                memory.enter(done, is_start, len(batch["tokens"]))
            done += sum(len(part["labels"]) for part in group)
            labels = batch.pop("labels")
            mask = batch.pop("loss_mask", None)
            moved = to_device(batch, device)

            def run(stage: nn.Module, moved: Batch = moved) -> Tensor:
                return forward(stage, moved)

            # Stages exchange hidden states of a T5's encoder and decoder together.
            parts = [moved[name] for name in ("tokens", "decoder_tokens") if name in moved] or [labels]
            logits_BSV = run_stages(model, run, torch.cat(parts, dim=1), recipe.model.vocab_size)
            if is_counted and logits_BSV is not None:
                masks = [None] * len(labels) if mask is None else mask
                for logits_SV, labels_S, mask_S in zip(logits_BSV, labels, masks, strict=True):
                    _add(sums, logits_SV, labels_S, mask_S, byte_lengths)
                sums.sequences += len(labels)
            on_progress(done)
        if memory is not None:
            memory.leave()
        collected = reports.collect()
    numbers = [number for number in collected if number not in recipe.model.mtp_numbers]
    return replace(_summed(sums, device), layers={number: collected[number] for number in numbers})


def predict(
    model: nn.Module, recipe: Recipe, tokenizer: Any, samples: Iterable[Sample], device: torch.device
) -> list[list[int]]:
    """Return the predicted tokens of each sample. Collective: data parallel ranks all predict all samples.

    Consecutive samples of equal length form micro batches. A T5 decodes greedily from ``tokens``, up to the end token,
    which is left out, or to ``model.sequence_length`` tokens. Another model predicts the most probable token at each
    position that has a label and no 0 in ``loss_mask``.

    Args:
        model: for a T5, loaded without expert capacity limits (``load_model(..., drops=False)``).

    Raises:
        UserError: a T5 has no tokenizer, whose padding and end token decoding needs.
    """
    if recipe.model.kind == "t5" and tokenizer is None:
        raise UserError("data.tokenizer= is not supported for the scores of model.kind=t5: decoding needs a tokenizer")
    forward = kind_of(recipe).forward
    predicted: list[list[int]] = []
    for batch in batches(samples, recipe.train.micro_batch, recipe.model.vocab_size):
        if recipe.model.kind == "t5":
            tokens_BS = batch["tokens"].to(device)
            steps = generate(
                T5Decoder(model, tokens_BS, len(tokens_BS)),
                [tokenizer.role("pad")],
                Sampling(temperature=0),
                max_tokens=recipe.model.sequence_length,
                end=tokenizer.end_of_document,
                vocab_size=tokenizer.vocab_size,
                num_samples=len(tokens_BS),
                device=device,
            )
            for row in zip(*steps, strict=True):
                predicted.append([token for token in row if token not in (None, tokenizer.end_of_document)])
            continue
        labels_BS = batch.pop("labels")
        mask_BS = batch.pop("loss_mask", torch.ones_like(labels_BS)).bool()
        moved = to_device(batch, device)

        def run(stage: nn.Module, moved: Batch = moved) -> Tensor:
            return forward(stage, moved)

        logits_BSV = run_stages(model, run, labels_BS, recipe.model.vocab_size)
        assert logits_BSV is not None  # a single stage
        best_BS = logits_BSV.argmax(-1).cpu()
        predicted += [best_S[mask_S].tolist() for best_S, mask_S in zip(best_BS, mask_BS, strict=True)]
    return predicted


def _summed(sums: Evaluation, device: torch.device | str) -> Evaluation:
    """Return the sums over data parallel ranks and pipeline stages."""
    counts = [sums.sequences, sums.tokens, sums.nats, sums.correct, sums.bytes or 0]
    total = torch.tensor(counts, dtype=torch.float64, device=device)
    for group in (parallel_state.get_data_parallel_group(), parallel_state.get_pipeline_model_parallel_group()):
        dist.all_reduce(total, group=group)
    sequences, tokens, nats, correct, num_bytes = total.tolist()
    return Evaluation(
        sequences=int(sequences),
        tokens=int(tokens),
        nats=nats,
        correct=int(correct),
        bytes=None if sums.bytes is None else int(num_bytes),
    )


def batches(samples: Iterable[Sample | np.ndarray], size: int, vocab_size: int | None = None) -> Iterator[Batch]:
    """Group consecutive samples of equal length into micro batches of up to ``size`` samples.

    Raises:
        UserError: see `collate`.
    """
    batch: list[Sample | np.ndarray] = []
    for sample in samples:
        if batch and (len(batch) == size or _shape(sample) != _shape(batch[0])):
            yield collate(batch, vocab_size)
            batch = []
        batch.append(sample)
    if batch:
        yield collate(batch, vocab_size)


def _shape(sample: Sample | np.ndarray) -> tuple[int, ...]:
    return tuple(len(part) for part in sample.values()) if isinstance(sample, dict) else (len(sample),)


def _add(
    result: Evaluation, logits_SV: Tensor, labels_S: Tensor, mask_S: Tensor | None, byte_lengths: np.ndarray | None
) -> None:
    logits_SV = logits_SV.float()
    on_device_S = labels_S.to(logits_SV.device)
    nats_S = F.cross_entropy(logits_SV, on_device_S, reduction="none").cpu()
    is_correct_S = (logits_SV.argmax(-1) == on_device_S).cpu()
    counted_S = torch.ones_like(is_correct_S) if mask_S is None else mask_S.bool()
    result.tokens += int(counted_S.sum())
    result.nats += float(nats_S[counted_S].double().sum())
    result.correct += int(is_correct_S[counted_S].sum())
    if byte_lengths is not None:
        result.bytes = (result.bytes or 0) + int(byte_lengths[labels_S[counted_S].numpy()].sum())
