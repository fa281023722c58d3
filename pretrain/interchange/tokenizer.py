"""Tokenizers in export and import: tokenizer.json and the files that transformers reads with it.

Export converts a sentencepiece model to a tokenizer.json. It fails unless both give the same tokens for sample texts.
"""

import json
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from fmoe.errors import UserError, require
from pretrain.data.tokenizers import Tokenizer, load_tokenizer
from pretrain.data.tokenizers.base import SPECIAL_NAMES
from pretrain.data.tokenizers.huggingface import load_json
from pretrain.data.tokenizers.sentencepiece import SentencePieceTokenizer

TOKENIZER = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
CONFIG = "tokenizer_config.json"
# Files that may accompany tokenizer.json in a Hugging Face folder; import and export copy them.
BESIDE = (CONFIG, "special_tokens_map.json", "added_tokens.json", "chat_template.jinja", SENTENCEPIECE)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = range(1, 7)  # sentencepiece's types of pieces
_UNIGRAM, _BPE = 1, 2
_SPACE_MARK = "\u2581"  # sentencepiece's symbol for a space
_NEVER = -1e6  # score of a piece that no text produces

_PROBES = (
    *("", " ", "a", " leading and trailing ", "two  three   four    five     spaces"),
    *("".join(" " * n + "x" for n in range(40)), "\n", "\n\n\n", "line\r\nline\r\tindented\n\t\ttwice\n    four"),
    *("".join(map(chr, range(32, 127))), "0123456789 3.14159 1e-05 0x1F", "def f(x):\n    return x ** 2  # squared\n"),
    *(
        "naïve café Привет мир",
        "日本語のテキスト。中文",
        "🙂 e\u0301 \u00a0\u2003\u200b\u200d\ufeff\U0001f469\u200d\U0001f467",
    ),
    *("\u2581 \u2581\u2581 a\u2581b", "<0x0A> <unk> <s> </s> <pad>", "\x00\x01\x7f\x85\u2028"),
)


def files_for(tokenizer: Tokenizer, model_max_length: int) -> dict[str, bytes]:
    """Return the tokenizer files of a Hugging Face folder, by name.

    A tokenizer.json with a tokenizer_config.json next to it is copied unchanged, with the other files in `BESIDE`.

    Any other tokenizer gets a tokenizer_config.json with which AutoTokenizer behaves like fmoe. AutoTokenizer then
    adds no tokens to a text. The name of a special token in a text is encoded like any other text. A sentencepiece
    model that llama.cpp can apply is included for llama.cpp's converter.

    Raises:
        UserError: a sentencepiece model cannot be converted, or the written tokenizer.json would tokenize differently.
    """
    beside: dict[str, bytes] = {}
    for_llama_cpp: dict[str, bool] = {"add_bos_token": False}
    if not isinstance(tokenizer, SentencePieceTokenizer):
        kept = _beside(tokenizer.path)
        if CONFIG in kept:
            return {TOKENIZER: tokenizer.path.read_bytes(), **kept}
        model = json.loads(tokenizer.path.read_bytes())
        model |= {"post_processor": None, "padding": None, "truncation": None}
        data = json.dumps(model, ensure_ascii=False).encode()
    else:
        proto = _proto(tokenizer)
        data = _converted(tokenizer, proto)
        if _suits_llama_cpp(proto):
            beside[SENTENCEPIECE] = tokenizer.path.read_bytes()
            for_llama_cpp["add_prefix_space"] = proto.normalizer_spec.add_dummy_prefix
    _compare(tokenizer, data)
    names = {i: piece for piece, i in tokenizer.ids.items()}
    config: dict[str, Any] = {
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": True,
        "eos_token": names[tokenizer.end_of_document],
        **for_llama_cpp,
    }
    if tokenizer.pad is not None:
        config["pad_token"] = names[tokenizer.pad]
    unknown = next((name for name in ("<unk>", "[UNK]") if name in names.values()), None)
    if unknown is not None:
        config["unk_token"] = unknown
    return {TOKENIZER: data, CONFIG: (json.dumps(config, indent=2, ensure_ascii=False) + "\n").encode(), **beside}


def files_from(source: Path) -> dict[str, bytes]:
    """Return the contents of tokenizer files, by name.

    Args:
        source: folder, or a tokenizer file. The files in `BESIDE` next to a tokenizer.json are included.

    Returns:
        The files, unchanged; {} for a folder without a tokenizer.

    Raises:
        UserError: the tokenizer is damaged, or has no end-of-document token.
    """
    if source.is_dir():
        found = [source / name for name in (TOKENIZER, SENTENCEPIECE) if (source / name).is_file()]
        if not found:
            return {}
        source = found[0]
    load_tokenizer(source)
    name = TOKENIZER if source.suffix == ".json" else SENTENCEPIECE
    return {name: source.read_bytes(), **(_beside(source) if name == TOKENIZER else {})}


def _beside(path: Path) -> dict[str, bytes]:
    return {name: (path.parent / name).read_bytes() for name in BESIDE if (path.parent / name).is_file()}


def _proto(tokenizer: Tokenizer) -> Any:
    require("google.protobuf", "pretrain", f"converting {tokenizer.path}")
    from sentencepiece import sentencepiece_model_pb2

    messages: Any = sentencepiece_model_pb2
    return messages.ModelProto.FromString(tokenizer.path.read_bytes())


def _suits_llama_cpp(proto: Any) -> bool:
    """Return whether llama.cpp encodes text as the sentencepiece model does."""
    # llama.cpp merges by score, falls back to bytes, and normalizes nothing.
    spec, trainer = proto.normalizer_spec, proto.trainer_spec
    is_normalized = bool(spec.precompiled_charsmap) or spec.remove_extra_whitespaces
    return trainer.model_type == _BPE and trainer.byte_fallback and not is_normalized


def _converted(tokenizer: Tokenizer, proto: Any) -> bytes:
    tokenizers = require("tokenizers", "pretrain", f"converting {tokenizer.path}")
    spec = proto.normalizer_spec
    # Without a normalizer that adds or drops spaces, a space stays a space, and U+2581 in a text is a plain character.
    is_plain = not (spec.precompiled_charsmap or spec.add_dummy_prefix or spec.remove_extra_whitespaces)
    pieces = [(p.piece.replace(_SPACE_MARK, " ") if is_plain else p.piece, p.score, p.type) for p in proto.pieces]
    vocabulary = {piece: i for i, (piece, _, _) in enumerate(pieces)}
    if len(vocabulary) != len(pieces):
        raise UserError(
            f"{tokenizer.path} has pieces that differ only in a space or U+2581, which export does not support: pass "
            "--tokenizer none"
        )
    kind, has_bytes = proto.trainer_spec.model_type, proto.trainer_spec.byte_fallback
    unknown = next(piece for piece, _, type_ in pieces if type_ == UNKNOWN)
    if kind == _BPE:
        merges = list(_merges(pieces, vocabulary))
        model = tokenizers.models.BPE(vocabulary, merges, unk_token=unknown, fuse_unk=True, byte_fallback=has_bytes)
    elif kind == _UNIGRAM:
        scored = [(piece, score if type_ in (NORMAL, UNUSED) else _NEVER) for piece, score, type_ in pieces]
        model = tokenizers.models.Unigram(scored, unk_id=vocabulary[unknown], byte_fallback=has_bytes)
    else:
        raise UserError(
            f"{tokenizer.path} is a model of words or characters; export supports only bpe and unigram: pass "
            "--tokenizer none"
        )
    result = tokenizers.Tokenizer(model)
    decoders = [tokenizers.decoders.ByteFallback(), tokenizers.decoders.Fuse()] if has_bytes else []
    if not is_plain:
        result.normalizer = tokenizers.normalizers.Sequence(list(_normalizers(tokenizers, spec)))
        decoders.insert(0, tokenizers.decoders.Replace(_SPACE_MARK, " "))
        if spec.add_dummy_prefix:
            decoders.append(tokenizers.decoders.Strip(" ", 1, 0))
    elif not has_bytes:
        decoders.append(tokenizers.decoders.Fuse())
    result.decoder = tokenizers.decoders.Sequence(decoders)
    result.add_tokens(
        [
            tokenizers.AddedToken(piece, special=type_ != USER_DEFINED, normalized=False)
            for piece, _, type_ in pieces
            if type_ in (UNKNOWN, CONTROL, USER_DEFINED)
        ]
    )
    return result.to_str().encode()


def _normalizers(tokenizers, spec) -> Iterator[Any]:
    if spec.precompiled_charsmap:
        yield tokenizers.normalizers.Precompiled(spec.precompiled_charsmap)
    if spec.remove_extra_whitespaces:
        yield tokenizers.normalizers.Strip()
        yield tokenizers.normalizers.Replace(tokenizers.Regex(" {2,}"), " ")
    if spec.add_dummy_prefix:
        yield tokenizers.normalizers.Prepend(" ")
    yield tokenizers.normalizers.Replace(" ", _SPACE_MARK)


def _merges(pieces: list[tuple[str, float, int]], vocabulary: dict[str, int]) -> Iterator[tuple[str, str]]:
    """Yield pairs of pieces that together form a third, ordered by the score of the third, best first."""
    normal = {piece for piece, _, type_ in pieces if type_ == NORMAL}
    ranked = sorted((p for p in pieces if p[0] in normal), key=lambda p: (-p[1], vocabulary[p[0]]))
    for piece, _, _ in ranked:
        for cut in range(1, len(piece)):
            if piece[:cut] in normal and piece[cut:] in normal:
                yield piece[:cut], piece[cut:]


def _compare(tokenizer: Tokenizer, data: bytes) -> None:
    """Raise UserError unless the tokenizer.json ``data`` encodes sample texts as ``tokenizer`` does."""
    exported = load_json(data, tokenizer.path.with_name(TOKENIZER))
    spelled = "".join(name for name in SPECIAL_NAMES if name in tokenizer.ids)
    for text in (*_PROBES, f"a{spelled}b"):
        found, expected = exported.encode(text), tokenizer.encode(text)
        # Of two equally likely ways to cut a text, either is accepted, because rounding decides between them.
        if found != expected and not are_equally_likely(tokenizer, found, expected):
            raise UserError(
                f"the tokenizer {tokenizer.path} is not supported: written as {TOKENIZER}, it tokenizes {text!r} "
                "differently; pass --tokenizer none"
            )


def are_equally_likely(tokenizer: Tokenizer, one: Sequence[int], other: Sequence[int]) -> bool:
    """Return whether two lists of ids decode to the same text and have the same total score in a sentencepiece model.

    False for any other tokenizer.
    """
    if not isinstance(tokenizer, SentencePieceTokenizer) or tokenizer.decode(one) != tokenizer.decode(other):
        return False
    scores = [sum(map(tokenizer.score, ids)) for ids in (one, other)]
    return math.isclose(*scores, rel_tol=1e-6)
