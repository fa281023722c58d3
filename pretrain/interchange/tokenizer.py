"""Tokenizers in export and import: tokenizer.json and the files that transformers reads with it.

Export converts a sentencepiece model to a tokenizer.json. It fails unless both give the same tokens for sample texts.
"""

import json
import logging
import math
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from fmoe.errors import UserError, one_line, require
from pretrain.data.tokenizers import Tokenizer
from pretrain.data.tokenizers.base import ADDED, PUBLISHED_NAMES, SPECIAL_MAP, SPECIAL_NAMES, read_declared
from pretrain.data.tokenizers.base import SETTINGS as CONFIG
from pretrain.data.tokenizers.huggingface import HuggingFaceTokenizer, load_json
from pretrain.data.tokenizers.sentencepiece import SentencePieceTokenizer, parse_model
from pretrain.interchange.folder import json_bytes

TOKENIZER = "tokenizer.json"
SENTENCEPIECE = "tokenizer.model"
# Files that may accompany a tokenizer in a Hugging Face folder; import and export copy them.
BESIDE = (CONFIG, SPECIAL_MAP, ADDED, "chat_template.jinja", "chat_template.json", SENTENCEPIECE)
# Files of tokenizers that fmoe does not read.
_OTHERS = (
    "spiece.model",
    "sentencepiece.bpe.model",
    "tiktoken.model",
    "tekken.json",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
)
# Keys of tokenizer_config.json that decide how AutoTokenizer encodes a text.
_DECIDED = frozenset(
    ("auto_map", "tokenizer_file", "add_bos_token", "add_eos_token", "add_prefix_space", "legacy", "sp_model_kwargs")
)
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED = range(1, 6)  # sentencepiece's types of pieces
# sentencepiece's types of models.
_UNIGRAM = 1
_BPE = 2
_SPACE_MARK = "\u2581"  # sentencepiece's symbol for a space
_NEVER = -1e6  # score of a piece that no text produces

_PLAIN_PROBES = (
    "",
    " ",
    "a",
    " leading and trailing ",
    "two  three   four    five     spaces",
    "".join(" " * n + "x" for n in range(40)),
    "\n",
    "\n\n\n",
    "line\r\nline\r\tindented\n\t\ttwice\n    four",
    "".join(map(chr, range(32, 127))),
    "0123456789 3.14159 1e-05 0x1F",
    "def f(x):\n    return x ** 2  # squared\n",
    "naïve café Привет мир",
    "日本語のテキスト。中文",
    "🙂 e\u0301 \u00a0\u2003\u200b\u200d\ufeff\U0001f469\u200d\U0001f467",
)
# AutoTokenizer may treat these otherwise than the tokenizer.json does.
_PROBES = (
    *_PLAIN_PROBES,
    "\u2581 \u2581\u2581 a\u2581b",
    "<0x0A> <unk> <s> </s> <pad>",
    "\x00\x01\x7f\x85\u2028",
)

# Text as people write it: contractions, capitals, numbers, punctuation, indentation, several scripts.
_REAL = (
    "I'm sure they'll say WE'VE seen 1234567 of them, isn't it?  Yes -- it's $3,999.95 (or 12%) at 10:45!!!\n\n\tOk...",
    'for (int i = 0; i < n; ++i) {\n    total += a[i] * 0x1F;  // x != y\n\n}\r\nprintf("%d\\n", total);\n',
    "See https://www.example.org/a_b?c=1&d=%20 or mail jane.doe+spam@example.org; FooBarBaz, foo_bar, FOO-BAR #42.",
    "L'été dernier, à Zürich: „Straße“, 25 °C — el niño dijo «¿qué?». Łódź, Ελλάδα, Москва́, עברית, العربية ٣٤٥.",
    "今日は2024年5月17日です。你好。世界。한국어 텍스트. हिन्दी में लिखा है। ภาษาไทย 😀👍🏽",
)

logger = logging.getLogger(__name__)


def files_for(
    tokenizer: Tokenizer,
    model_max_length: int,
    *,
    bos: bool | None = False,
    model_type: str | None = None,
) -> dict[str, bytes]:
    """Return the tokenizer files of a Hugging Face folder, by name.

    A tokenizer.json with a tokenizer_config.json next to it is copied unchanged, with the other files in `BESIDE`, if
    AutoTokenizer then gives the model's tokens.

    Any other tokenizer gets a tokenizer_config.json with which AutoTokenizer behaves like fmoe. AutoTokenizer then
    adds no tokens to a text but BOS. Unless there was a tokenizer_config.json, the name of a special token in a text is
    encoded like any other text. A sentencepiece model that llama.cpp can apply is included for llama.cpp's converter.

    Args:
        bos: the model's documents begin with BOS (``data.bos``); None for a model that is not a GPT, whose samples need
            other tokens around a text.
        model_type: ``model_type`` of the folder's config.json, which may decide AutoTokenizer's class.

    Raises:
        UserError: a sentencepiece model cannot be converted, or the written tokenizer.json would tokenize differently.
    """
    begin = [tokenizer.role("bos")] if bos else []
    beside = _without(_beside(tokenizer.path), _absent(tokenizer))
    if isinstance(tokenizer, HuggingFaceTokenizer) and CONFIG in beside:
        copied = {TOKENIZER: tokenizer.path.read_bytes(), **beside}
        if bos is None:
            return copied
        reason = _why_different(copied, model_type, tokenizer, begin)
        if reason == "" or (reason is None and tokenizer.before == begin):
            return copied
    settings = json.loads(beside.pop(CONFIG, b"{}"))
    beside.pop(SENTENCEPIECE, None)
    for_llama_cpp: dict[str, bool] = {"add_bos_token": bool(begin)}
    if isinstance(tokenizer, SentencePieceTokenizer):
        proto = parse_model(tokenizer.data, tokenizer.path)
        data = _converted(tokenizer, proto)
        if _suits_llama_cpp(proto):
            beside[SENTENCEPIECE] = tokenizer.data
            for_llama_cpp["add_prefix_space"] = proto.normalizer_spec.add_dummy_prefix
    else:
        assert isinstance(tokenizer, HuggingFaceTokenizer)
        data = tokenizer.data
    names = {i: piece for piece, i in tokenizer.ids.items()}
    bos_token = names[begin[0]] if begin else None
    model = json.loads(data) | {"post_processor": None, "padding": None, "truncation": None}
    if bos_token is not None:
        model["post_processor"] = _template(bos_token, begin[0])
    data = json.dumps(model, ensure_ascii=False).encode()
    _compare(tokenizer, data)
    config: dict[str, Any] = {
        **{key: value for key, value in settings.items() if key not in _DECIDED},
        "tokenizer_class": "PreTrainedTokenizerFast",
        "model_max_length": model_max_length,
        "model_input_names": ["input_ids", "attention_mask"],
        "clean_up_tokenization_spaces": False,
        "split_special_tokens": settings.get("split_special_tokens", not settings),
        "eos_token": names[tokenizer.end_of_document],
        **for_llama_cpp,
    }
    if tokenizer.pad is not None:
        config["pad_token"] = names[tokenizer.pad]
    if bos_token is not None:
        config["bos_token"] = bos_token
    for unknown in ("<unk>", "[UNK]"):
        if unknown in tokenizer.ids:
            config.setdefault("unk_token", unknown)
    beside = _without(beside, [key for key in config if key.endswith("_token")])  # special_tokens_map.json comes first
    return {TOKENIZER: data, CONFIG: json_bytes(config), **beside}


def _template(name: str, number: int) -> dict[str, Any]:
    """Return the post-processor of a tokenizer.json that puts a special token in front of each text."""

    def part(text: str) -> list[dict[str, Any]]:
        return [{"SpecialToken": {"id": name, "type_id": 0}}, {"Sequence": {"id": text, "type_id": 0}}]

    tokens = {name: {"id": name, "ids": [number], "tokens": [name]}}
    return {
        "type": "TemplateProcessing",
        "single": part("A"),
        "pair": [*part("A"), *part("B")],
        "special_tokens": tokens,
    }


def files_of(tokenizer: Tokenizer) -> dict[str, bytes]:
    """Return the tokenizer's file, under its name in a Hugging Face folder, and the files in `BESIDE` next to it."""
    name = SENTENCEPIECE if isinstance(tokenizer, SentencePieceTokenizer) else TOKENIZER
    own_file = {name: tokenizer.path.read_bytes()}
    return own_file | _beside(tokenizer.path) | own_file


def find_tokenizer(source: Path) -> Path | None:
    """Return the path of a folder's tokenizer, None if it has none. A file is its own tokenizer.

    Raises:
        UserError: the folder has only tokenizer files that fmoe does not read.
    """
    if not source.is_dir():
        return source
    for name in (TOKENIZER, SENTENCEPIECE):
        if (source / name).is_file():
            return source / name
    others = [name for name in _OTHERS if (source / name).is_file()]
    if others:
        raise UserError(
            f"{source} has a tokenizer in {', '.join(others)}, which is not supported without {TOKENIZER} or "
            f"{SENTENCEPIECE}: save it as {TOKENIZER} with transformers' AutoTokenizer"
        )
    return None


def check_tokenizer(tokenizer: Tokenizer, model_type: str | None, vocab_size: int) -> None:
    """Check the declared tokens, and warn if AutoTokenizer differs from tokenizer.json.

    Args:
        model_type: the folder's ``model_type``, which may decide AutoTokenizer's class.
        vocab_size: size of the model's vocabulary.

    Raises:
        UserError: a declared token is missing, other than one for padding or BERT.
    """
    path = tokenizer.path
    declared = read_declared(path)
    # The pieces of a sentencepiece model are fixed, but the model's vocabulary may have room for added tokens.
    new = {i: token["content"] for i, token in declared.added.items() if token["content"] not in tokenizer.ids}
    room = range(tokenizer.vocab_size, min(vocab_size, tokenizer.vocab_size + len(new)))
    present = {*tokenizer.ids, *(name for i, name in new.items() if i in room)}
    absent = _absent(tokenizer)
    names = {f"{role}_token": name for role, name in declared.names.items()}
    required = [(key, name) for key, name in names.items() if key not in absent]
    required += [("added_tokens_decoder", token["content"]) for token in declared.added.values()]
    required += [("additional_special_tokens", name) for name in declared.others]
    for key, name in required:
        if name not in present:
            raise UserError(
                f"{declared.files.get(key, path.with_name(CONFIG))} declares the token {name!r}, which {path.name} "
                "does not have: AutoTokenizer would give it an id that the model was not trained with; remove it"
            )
    for key in absent:
        logger.warning(
            "%s declares %s=%r, which %s does not have: an export omits it",
            declared.files[key],
            key,
            names[key],
            path.name,
        )
    if isinstance(tokenizer, SentencePieceTokenizer):  # export converts it
        return
    reason = _why_different(files_of(tokenizer), model_type, tokenizer, None)
    if reason:
        logger.warning("%s: fmoe uses %s, and an export of a GPT converts it", reason, path)


def _absent(tokenizer: Tokenizer) -> list[str]:
    """Return keys of declared tokens without an id, which a language model can do without."""
    declared = read_declared(tokenizer.path)
    present = {*tokenizer.ids, *(token["content"] for token in declared.added.values())}
    roles = [role for role in ("pad", "cls", "sep", "mask") if role in declared.names]
    return [f"{role}_token" for role in roles if declared.names[role] not in present]


def _why_different(
    files: Mapping[str, bytes], model_type: str | None, tokenizer: Tokenizer, begin: Sequence[int] | None
) -> str | None:
    """Return how AutoTokenizer, with ``files``, differs from ``tokenizer``.

    Args:
        begin: ids that AutoTokenizer must put in front of a text; None to compare without any.

    Returns:
        An empty string if AutoTokenizer gives the same tokens; None without transformers.
    """
    try:
        theirs = _load_auto(files, model_type)
    except UserError as error:
        return str(error)
    if theirs is None:
        return None
    name = type(theirs).__name__
    text = _difference(theirs, tokenizer, begin)
    if text is not None:
        return f"AutoTokenizer ({name}) tokenizes {text[:40]!r} differently from {TOKENIZER}"
    if not _has_same_end(theirs, tokenizer):
        end = tokenizer.end_of_document
        return f"AutoTokenizer ({name}) ends documents with token {theirs.eos_token_id}, but {TOKENIZER} with {end}"
    return ""


def _has_same_end(theirs: Any, tokenizer: Tokenizer) -> bool:
    return theirs.eos_token_id in (None, tokenizer.end_of_document)


def _load_auto(files: Mapping[str, bytes], model_type: str | None) -> Any | None:
    """Return AutoTokenizer's tokenizer of a folder with ``files``; None without transformers."""
    try:
        from transformers import AutoTokenizer
    except ImportError as error:  # not installed, or not for the installed tokenizers
        logger.warning("the tokenizer is not compared with AutoTokenizer's: %s", one_line(error, 200))
        return None
    with tempfile.TemporaryDirectory(prefix="fmoe-") as temporary:
        for name, data in files.items():
            (Path(temporary) / name).write_bytes(data)
        (Path(temporary) / "config.json").write_text(json.dumps({"model_type": model_type} if model_type else {}))
        try:
            return AutoTokenizer.from_pretrained(temporary, trust_remote_code=False, local_files_only=True)
        except Exception as error:  # of many kinds, some from Rust
            raise UserError(f"AutoTokenizer cannot read the tokenizer: {one_line(error, 200)}") from error


def _difference(theirs: Any, tokenizer: Tokenizer, begin: Sequence[int] | None) -> str | None:
    """Return a text that AutoTokenizer encodes differently from ``tokenizer``; None if there is none."""
    names = [name for name in theirs.get_added_vocab() if name.strip()]  # AutoTokenizer finds them in a text
    for text in (*_REAL, *_PLAIN_PROBES, *(getattr(str, name).__doc__ or "" for name in dir(str))):
        if any(name in text for name in names):
            continue
        ids = theirs(text, add_special_tokens=begin is not None)["input_ids"]
        if list(ids) != [*(begin or ()), *tokenizer.encode(text)]:
            return text
    return None


def _beside(path: Path) -> dict[str, bytes]:
    if path.name not in PUBLISHED_NAMES:
        return {}
    return {name: (path.parent / name).read_bytes() for name in BESIDE if (path.parent / name).is_file()}


def _without(files: Mapping[str, bytes], keys: Sequence[str]) -> dict[str, bytes]:
    """Return ``files`` without these keys of the files that declare special tokens."""
    changed = dict(files)
    for name in (CONFIG, SPECIAL_MAP):
        values = json.loads(files.get(name, b"{}"))
        kept = {key: value for key, value in values.items() if key not in keys}
        if kept != values:
            changed[name] = json_bytes(kept)
    return changed


def _suits_llama_cpp(proto: Any) -> bool:
    """Return whether llama.cpp encodes text as the sentencepiece model does."""
    # llama.cpp merges by score, falls back to bytes, and normalizes nothing.
    spec = proto.normalizer_spec
    trainer = proto.trainer_spec
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
    kind = proto.trainer_spec.model_type
    has_bytes = proto.trainer_spec.byte_fallback
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
    exported = load_json(data, tokenizer.path)
    spelled = "".join(name for name in SPECIAL_NAMES if name in tokenizer.ids)
    for text in (*_PROBES, f"a{spelled}b"):
        ids = exported.encode(text)
        expected = tokenizer.encode(text)
        # Of two equally likely ways to cut a text, either is accepted, because rounding decides between them.
        if ids != expected and not are_equally_likely(tokenizer, ids, expected):
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
