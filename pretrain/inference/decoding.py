"""Token after token: what a GPT goes on with, what a T5 fills in.

Shape letters: N samples, S tokens of each, V vocabulary, D width.
"""

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from fmoe.errors import UserError
from fmoe.gates.expert_choice import ExpertChoiceRouter
from pretrain.inference.sampling import Sampling, distribution, draw


class Decoder(Protocol):
    """Gives the logits, float32 [N, V], of the token after ``tokens_NS``: each time all of them, of which all but the
    last were there the time before, if there was one."""

    def __call__(self, tokens_NS: Tensor) -> Tensor: ...


class GPTDecoder:
    """Of a GPT, which sees a window of its sequence's last tokens.

    A token after n others is predicted from those in the window, whose positions count from 0. It begins with the
    sequence while that fits; then it moves on by an eighth of its length whenever it is full. What a token is predicted
    from is a matter of n alone, and the layers' keys and values, kept while the window stands still, are computed anew
    for one token in so many.

    Args:
        model: experts of which none is ever full.
        length: tokens of the window.
        keeps: False computes the whole window for every token.
    """

    def __init__(self, model: nn.Module, length: int, *, keeps: bool = True):
        refuse_expert_choice(model)
        self._model, self._length, self._keeps = model, length, keeps
        self._context: Any = None  # Megatron-core's, which has keys and values
        self._begin = self._end = 0  # the tokens whose keys and values are there

    def __call__(self, tokens_NS: Tensor) -> Tensor:
        num_samples, count = tokens_NS.shape
        begin = window(count, self._length)
        if not self._keeps:
            return self._run(tokens_NS[:, begin:], 0)
        if self._context is None:
            from megatron.core.inference.contexts import StaticInferenceContext  # here, because it is slow to import

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
        positions = torch.arange(
            first, first + tokens_NS.shape[1], device=tokens_NS.device, dtype=torch.int64
        ).expand_as(tokens_NS)
        # No mask: causal attention makes its own.
        options = {"inference_context": self._context, "runtime_gather_output": True} if self._keeps else {}
        return self._model(tokens_NS, positions, None, **options)[:, -1].float()


def window(count: int, length: int) -> int:
    """The first of ``count`` tokens that the next one is predicted from; at most ``length`` are."""
    by = max(length // 8, 1)
    return -(-max(count - length, 0) // by) * by


class T5Decoder:
    """Of a T5: the encoder runs once, the decoder over all of its tokens each time.

    Args:
        model: experts of which none is ever full.
        inputs_S: what the encoder gets.
    """

    def __init__(self, model: Any, inputs_S: Tensor, num_samples: int):
        refuse_expert_choice(model.decoder)  # the encoder has all of its tokens
        self._model = model
        with torch.no_grad():
            encoded_S1D = model(inputs_S.unsqueeze(0), None, None, None, None, output_encoder_hidden_only=True)
        self._encoded_SND = encoded_S1D.expand(-1, num_samples, -1).contiguous()

    def __call__(self, tokens_NS: Tensor) -> Tensor:
        logits_NSV = self._model(None, tokens_NS, None, None, None, encoder_hidden_states=self._encoded_SND)
        return logits_NSV[:, -1].float()


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
    """The next token of each sample, None of those that are at their end; until all are.

    Args:
        prompt: ids that all samples begin with, at least one.
        max_tokens: of each sample; its end is one of them.
        end: the id that ends a sample; it comes as the last.
        vocab_size: ids of the tokenizer; the model may have rows for more.

    Raises:
        UserError: the model gives what is not finite.
    """
    generators = sampling.generators(num_samples)
    tokens_NS = torch.tensor([list(prompt)] * num_samples, device=device, dtype=torch.int64)
    is_over = [False] * num_samples
    for _ in range(max_tokens):
        logits_NV = decoder(tokens_NS)[:, :vocab_size]
        if not bool(logits_NV.isfinite().all()):
            raise UserError("the model's logits are not finite: its weights are not, or precision is too low for them")
        drawn = draw(distribution(logits_NV, sampling), generators)
        yield [None if over else token for token, over in zip(drawn, is_over, strict=True)]
        is_over = [over or token == end for token, over in zip(drawn, is_over, strict=True)]
        if all(is_over):
            return
        tokens_NS = torch.cat([tokens_NS, torch.tensor(drawn, device=device, dtype=torch.int64).unsqueeze(1)], dim=1)


def refuse_expert_choice(model: nn.Module) -> None:
    """Raises UserError where experts choose tokens: what a token gets then depends on those that are not there yet."""
    if any(isinstance(module, ExpertChoiceRouter) for module in model.modules()):
        raise UserError(
            "model.gate=expert_choice lets experts choose among all tokens of a sequence, also those that are still to "
            "come: text cannot be generated token by token"
        )
