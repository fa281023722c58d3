"""Token-by-token decoding: a GPT continues a text, a T5 fills in spans.

The model may be split over ranks, which all decode the same samples. Every rank gets the same logits.

Shape letters: N samples, S tokens of each, V vocabulary, D width.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fmoe.errors import UserError
from fmoe.gates.expert_choice import ExpertChoiceRouter
from megatron_patch.transformer_xl import StreamMemory
from pretrain.checkpoint.ranks import Ranks
from pretrain.inference.sampling import Sampling, distribution, draw
from pretrain.inference.stages import next_logits


class Decoder(Protocol):
    """Function from all tokens so far, [N, S], to the logits of the next token, float32 [N, V].

    Each call must pass the tokens of the previous call and one more.
    """

    def __call__(self, tokens_NS: Tensor) -> Tensor: ...


class GPTDecoder:
    """Decoder of a GPT, on a sliding window of the sequence's last tokens.

    Positions count from 0 at the window's start. The window starts at the sequence's first token. Whenever it is full,
    it advances by an eighth of its length. The context of a token therefore depends only on its index. Cached keys and
    values are recomputed only when the window advances.

    Args:
        model: a GPT without expert capacity limits (``load_model(..., drops=False)``).
        length: maximum number of tokens of the window.
        keeps: cache keys and values; False recomputes the whole window for every token.
    """

    def __init__(self, model: nn.Module, length: int, *, keeps: bool = True):
        refuse_expert_choice(model)
        self._model = model
        self._length = length
        self._keeps = keeps
        self._context: Any = None  # Megatron-core's cache of keys and values
        self._begin = self._end = 0  # the cached tokens

    def __call__(self, tokens_NS: Tensor) -> Tensor:
        num_samples, count = tokens_NS.shape
        begin = window(count, self._length)
        if not self._keeps:
            return self._run(tokens_NS[:, begin:], 0)
        if self._context is None:
            from megatron.core.inference.contexts import StaticInferenceContext  # slow to import

            self._context = StaticInferenceContext(num_samples, self._length)
        if begin != self._begin or count != self._end + 1:
            self._context.reset()
            self._begin = self._end = begin
        logits_NV = self._run(tokens_NS[:, self._end :], self._end - begin)
        self._context.sequence_len_offset += count - self._end
        self._context.enable_decode_mode()
        self._end = count
        return logits_NV

    def _run(self, tokens_NS: Tensor, first: int) -> Tensor:
        # Causal attention makes its own mask.
        options = {"inference_context": self._context, "runtime_gather_output": True} if self._keeps else {}
        positions_NS = _positions(tokens_NS, first)
        return next_logits(self._model, tokens_NS, lambda stage: stage(tokens_NS, positions_NS, None, **options))


class MemoryDecoder:
    """Decoder of a GPT with Transformer-XL's memory.

    The prompt is one segment, and each later token is a segment of its own. The next token is thus predicted from the
    last token and a memory of ``length`` positions, however long the text is.

    Args:
        model: a GPT with relative positions, without expert capacity limits (``load_model(..., drops=False)``).
        length: number of positions whose hidden states the memory holds.
    """

    def __init__(self, model: nn.Module, length: int):
        refuse_expert_choice(model)
        self._model = model
        self._memory = StreamMemory(model, length, streams=1)
        self._end = 0  # tokens so far

    def __call__(self, tokens_NS: Tensor) -> Tensor:
        new_NS = tokens_NS[:, self._end :]
        self._end = tokens_NS.shape[1]
        self._memory.enter(0)
        logits_NV = next_logits(self._model, new_NS, lambda stage: stage(new_NS, _positions(new_NS), None))
        self._memory.leave()
        return logits_NV


def _positions(tokens_NS: Tensor, first: int = 0) -> Tensor:
    stop = first + tokens_NS.shape[1]
    return torch.arange(first, stop, device=tokens_NS.device, dtype=torch.int64).expand_as(tokens_NS)


def window(count: int, length: int) -> int:
    """Return the index of the first token in `GPTDecoder`'s window, for a sequence of ``count`` tokens.

    The window has at most ``length`` tokens.
    """
    by = max(length // 8, 1)
    return -(-max(count - length, 0) // by) * by


class T5Decoder:
    """Decoder of a T5: the encoder runs once, and the decoder runs over all of its tokens for every new one.

    Args:
        model: a T5 without expert capacity limits (``load_model(..., drops=False)``).
        inputs_BS: the encoder's tokens of B texts, without padding.
        num_samples: number of samples to decode: B, or any number if B is 1.
    """

    def __init__(self, model: Any, inputs_BS: Tensor, num_samples: int):
        refuse_expert_choice(model.decoder)  # the encoder sees all of its tokens at once
        self._model = model
        with torch.no_grad():
            encoded_SBD = model(inputs_BS, None, None, None, None, output_encoder_hidden_only=True)
        self._encoded_SND = encoded_SBD.expand(-1, num_samples, -1).contiguous()

    def __call__(self, tokens_NS: Tensor) -> Tensor:
        encoded_SND = self._encoded_SND
        return next_logits(
            self._model,
            tokens_NS,
            lambda model: model(None, tokens_NS, None, None, None, encoder_hidden_states=encoded_SND),
        )


@torch.no_grad()
def generate(
    decoder: Decoder,
    prompt: Sequence[int],
    sampling: Sampling,
    *,
    max_tokens: int,
    end: int,
    vocab_size: int,
    num_samples: int = 1,
    device: torch.device | str = "cpu",
) -> Iterator[list[int | None]]:
    """Yield the next token of each sample (None if it has ended) until all have ended, at most ``max_tokens`` times.

    Args:
        prompt: ids that all samples begin with, at least one.
        max_tokens: maximum number of new tokens per sample, including ``end``.
        end: the id that ends a sample; it is yielded as the sample's last token.
        vocab_size: size of the tokenizer's vocabulary; the model's may be larger.

    Raises:
        UserError: the model's logits are not finite.
    """
    generators = sampling.generators(num_samples)
    tokens_NS = torch.tensor([list(prompt)] * num_samples, device=device, dtype=torch.int64)
    is_over = [False] * num_samples
    for _ in range(max_tokens):
        logits_NV = decoder(tokens_NS)[:, :vocab_size]
        if not bool(logits_NV.isfinite().all()):
            raise UserError(
                "the model's logits are not finite: either its weights contain NaN or infinity (use an earlier "
                "checkpoint), or its activations or logits overflow the run's train.precision"
            )
        drawn = draw(distribution(logits_NV, sampling), generators)
        yield [None if over else token for token, over in zip(drawn, is_over, strict=True)]
        is_over = [over or token == end for token, over in zip(drawn, is_over, strict=True)]
        if all(is_over):
            return
        tokens_NS = torch.cat([tokens_NS, torch.tensor(drawn, device=device, dtype=torch.int64).unsqueeze(1)], dim=1)


def refuse_expert_choice(model: nn.Module) -> None:
    """Raise UserError if a gate lets experts choose their tokens: the choice depends on later tokens. Collective."""
    with Ranks().together():  # pipeline stages have different layers
        if any(isinstance(module, ExpertChoiceRouter) for module in model.modules()):
            raise UserError(
                "moe.gate=expert_choice chooses among all tokens of a sequence, later ones included: token-by-token "
                "generation is not supported"
            )
