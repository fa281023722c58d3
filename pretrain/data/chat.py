"""Conversations as tokens: which of them are context, and which are answers to learn.

A row has one of two kinds, with the keys of TRL:

- ``messages``: messages with ``role`` and ``content``. The answers are the messages of the role assistant.
- ``prompt`` and ``completion`` (or ``answer``): texts, or lists of messages. The answers are the completion, or the
  messages of the role assistant in it.

Messages become text by the chat template of the tokenizer, which the package transformers applies. Texts are joined
without a template: prompt, completion, end-of-document token.
"""

import re
from collections.abc import Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np

from fmoe.errors import UserError, one_line, require
from pretrain.data.sources import shorten
from pretrain.data.tokenizers import Tokenizer
from pretrain.data.tokenizers.base import PUBLISHED_NAMES, SETTINGS, read_declared
from pretrain.data.tokenizers.huggingface import HuggingFaceTokenizer
from pretrain.files import read_object

ROLES = ("system", "developer", "user", "assistant", "tool")
# A template with this statement marks the answers itself.
_GENERATION = re.compile(r"\{%-?\s*generation\b")


def chat_template(path: Path) -> str | None:
    """Return the chat template beside a tokenizer's file; None if there is none.

    As in transformers, chat_template.jinja comes before ``chat_template`` in tokenizer_config.json. Of several
    templates there, the one named "default" counts.

    Raises:
        UserError: a file is unreadable, or has no template in a known form.
    """
    if path.name not in PUBLISHED_NAMES:
        return None
    file = path.with_name("chat_template.jinja")
    try:
        return file.read_text(encoding="utf-8")
    except FileNotFoundError:
        pass
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"cannot read {file}: {one_line(error)}") from error
    file = path.with_name(SETTINGS)
    template = (read_object(file) or {}).get("chat_template")
    if isinstance(template, list):
        named = {each.get("name"): each.get("template") for each in template if isinstance(each, dict)}
        template = named.get("default", named)
    if not isinstance(template, str | None):
        raise UserError(f"{file}: chat_template must be a text, or a list with a template named 'default'")
    return template


class ChatEncoder:
    """Encoder of conversations.

    Args:
        tokenizer: tokenizer of the corpus.
        bos: begin each conversation with BOS, unless its template does.
        sequence_length: refuse a conversation whose first answer begins after this many tokens; None for no limit.

    Raises:
        UserError: the tokenizer has no BOS token, or its chat template is unreadable.
    """

    def __init__(self, tokenizer: Tokenizer, bos: bool = False, sequence_length: int | None = None):
        self.tokenizer = tokenizer
        self.template = chat_template(tokenizer.path)
        self._begin = [tokenizer.role("bos")] if bos else []
        self._sequence_length = sequence_length

    def encode(self, row: Mapping[str, Any]) -> list[np.ndarray]:
        """Return the tokens of a conversation, in turn of context and of an answer.

        Context may be empty. The last part may be context.

        Args:
            row: values of `pretrain.data.sources.CONVERSATION_KEYS`.

        Raises:
            UserError: the row is invalid; the template fails, or does not show where the answers are.
        """
        kind = kind_of(row)
        completion = "answer" if "answer" in row else "completion"
        if kind == "messages":
            ids, is_answer = self._encode_messages("messages", _messages("messages", row["messages"]), 0)
        elif kind == "prompt as text":
            context = [*self._begin, *self.tokenizer.encode(_text("prompt", row["prompt"]))]
            answer = [*self.tokenizer.encode(_text(completion, row[completion])), self.tokenizer.end_of_document]
            ids = context + answer
            is_answer = np.arange(len(ids)) >= len(context)
        else:
            prompt = _messages("prompt", row["prompt"])
            answers = _messages(completion, row[completion])
            ids, is_answer = self._encode_messages(completion, prompt + answers, len(prompt))
        parts = np.split(np.array(ids, np.int64), np.flatnonzero(np.diff(is_answer, prepend=False)))
        limit = self._sequence_length
        if limit is not None and len(parts[0]) > limit:
            raise UserError(
                f"the first answer begins after {len(parts[0])} tokens, which exceeds sequence_length={limit}: shorten "
                "the prompt"
            )
        return parts

    def _encode_messages(
        self, key: str, messages: Sequence[Mapping[str, str]], first: int
    ) -> tuple[list[int], np.ndarray]:
        """Return the tokens of messages, and bool [tokens], True for answers among the messages from ``first`` on."""
        answers = [i for i, message in enumerate(messages) if message["role"] == "assistant" and i >= first]
        if not answers:
            raise UserError(f"{key} has no message of the role assistant, so there is no answer to learn")
        for i in answers:
            _text(f"{key}[{i - first}].content", messages[i]["content"])
        if self.template is not None and _GENERATION.search(self.template):
            rendered = self._render(messages, return_assistant_tokens_mask=True)
            ids = list(rendered["input_ids"])
            is_answer = np.array(rendered["assistant_masks"], bool)
            if first:
                is_answer[: len(self._prefix(key, ids, messages, first, True))] = False
        else:
            ids = list(self._render(messages)["input_ids"])
            is_answer = np.zeros(len(ids), bool)
            for i in answers:
                begin = len(self._prefix(key, ids, messages, i, True))
                is_answer[begin : len(self._prefix(key, ids, messages, i + 1, False))] = True
        if ids[: len(self._begin)] != self._begin:
            ids = self._begin + ids
            is_answer = np.concatenate([[False], is_answer])
        if not is_answer[1:].any():
            raise UserError(f"the chat template of {self.tokenizer.path} gives no tokens for the answers in {key}")
        return ids, is_answer

    def _prefix(
        self, key: str, ids: list[int], messages: Sequence[Mapping[str, str]], count: int, prompts: bool
    ) -> list[int]:
        """Return the tokens of the first ``count`` messages, which must begin those of all messages.

        Args:
            prompts: add the tokens after which the model generates an answer.
        """
        if count == len(messages):
            return ids
        prefix = list(self._render(messages[:count], add_generation_prompt=prompts)["input_ids"])
        if ids[: len(prefix)] != prefix:
            raise UserError(
                f"the chat template of {self.tokenizer.path} gives other tokens for the first {count} messages of "
                f"{key} than for all {len(messages)}, so the answers cannot be located: mark them in the template by "
                "{% generation %} and {% endgeneration %}, or make a row of each answer"
            )
        return prefix

    def _render(self, messages: Sequence[Mapping[str, str]], **options: bool) -> Mapping[str, Any]:
        try:
            return self._templated.apply_chat_template(list(messages), tokenize=True, return_dict=True, **options)
        except UserError:
            raise
        except Exception as error:  # the template's own errors, of any kind
            raise UserError(f"the chat template of {self.tokenizer.path} fails: {one_line(error, 200)}") from error

    @cached_property
    def _templated(self) -> Any:
        """The tokenizer, as transformers applies its template. Text can spell special tokens here."""
        tokenizer = self.tokenizer
        if not isinstance(tokenizer, HuggingFaceTokenizer) or self.template is None:
            raise UserError(
                f"messages need a chat template, and {tokenizer.path} has none: use a tokenizer.json with "
                "chat_template.jinja beside it, or rows with prompt and completion as texts"
            )
        transformers = require("transformers", "interop", "a chat template")
        tokenizers = require("tokenizers", "pretrain", f"reading {tokenizer.path}")
        names = {f"{role}_token": name for role, name in read_declared(tokenizer.path).names.items()}
        return transformers.PreTrainedTokenizerFast(
            tokenizer_object=tokenizers.Tokenizer.from_str(tokenizer.data.decode()),
            chat_template=self.template,
            **{name: token for name, token in names.items() if token in tokenizer.ids},
        )


def kind_of(row: Mapping[str, Any]) -> str:
    """Return the kind of a row: "messages", "prompt as text" or "prompt as messages".

    Raises:
        UserError: the row has keys of both kinds, or a prompt without a completion.
    """
    if "messages" in row:
        others = [key for key in row if key != "messages"]
        if others:
            raise UserError(f"the row has both 'messages' and {shorten(others)}: keep one")
        return "messages"
    if "prompt" not in row or len(row) != 2:
        raise UserError(f"the row has the keys {shorten(row)}, but needs 'prompt' and one of 'completion' and 'answer'")
    return "prompt as text" if isinstance(row["prompt"], str) else "prompt as messages"


def _text(key: str, value: Any) -> str:
    if not isinstance(value, str):
        raise UserError(f"{key} is a {type(value).__name__}, not a text like the prompt")
    if not value.strip():
        raise UserError(f"{key} is empty")
    return value


def _messages(key: str, values: Any) -> list[dict[str, str]]:
    """Return messages, each with ``role`` and ``content``."""
    if not isinstance(values, list) or not values:
        raise UserError(f"{key} must be a list of messages, not {str(values)[:40]!r}")
    messages = []
    for i, value in enumerate(values):
        # Tables give a message all keys that any message has.
        message = {name: x for name, x in value.items() if x is not None} if isinstance(value, dict) else {}
        if message.keys() != {"role", "content"} or not isinstance(message["content"], str):
            raise UserError(f"{key}[{i}] must have just role and content, both texts; it is {str(value)[:60]!r}")
        if message["role"] not in ROLES:
            raise UserError(f"{key}[{i}].role={str(message['role'])[:40]!r} must be one of {', '.join(ROLES)}")
        messages.append(message)
    return messages
