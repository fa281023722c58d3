"""Tokens to text as they come, bytes of tokens, and the spans of a T5."""

import pytest

from fmoe import UserError
from pretrain.data.tokenizers import train_tokenizer
from pretrain.inference.text import TextStream, answer, encode_spans, fill, spans_of

TEXT = "def f(x):\n    return '«Grüße»' + x  # 日本語 🙂 \u2581 end\n\tend"


@pytest.fixture(scope="module", params=["model", "json", "bytes"])
def tokenizer(request, tiny_corpus, tmp_path_factory):
    folder = tmp_path_factory.mktemp("tokenizer")
    if request.param == "bytes":
        return train_tokenizer([], folder / "bytes.json", model_type="bytes", sentinels=3)
    path = folder / f"small.{request.param}"
    return train_tokenizer([tiny_corpus.train.with_suffix(".jsonl")], path, 384, sentinels=3)


@pytest.mark.parametrize("cut", range(0, len(TEXT), 3))
def test_a_stream_gives_the_text_in_whole_characters(tokenizer, cut):
    before, ids = tokenizer.encode(TEXT[:cut]) if cut else [], tokenizer.encode(TEXT[cut:])
    stream = TextStream(tokenizer, before)
    parts = [stream.add(token) for token in [*ids, tokenizer.end_of_document]]
    assert "".join(parts) == TEXT[cut:] and stream.close() == ""
    assert "\ufffd" not in "".join(parts)
    assert sum(map(bool, parts)) > len(ids) / 3, "it does not come piece by piece"


def test_what_is_no_character_comes_at_the_end(tokenizer):
    ids = tokenizer.encode("a🙂")
    stream = TextStream(tokenizer, [])
    parts = [stream.add(token) for token in ids[:-1]]
    assert "".join(parts) == "a"
    assert set(stream.close()) == {"\ufffd"}


def test_bytes_of_tokens_are_those_of_their_text(tokenizer):
    lengths = tokenizer.byte_lengths
    for text in (TEXT, "  two", "\u2581", "é", "🙂", "\r\n", "<extra_id_0>", "x" * 100):
        assert lengths[tokenizer.encode(text)].sum() == len(text.encode()), text
    assert lengths[[tokenizer.end_of_document, *tokenizer.sentinels]].sum() == 0
    assert len(lengths) == tokenizer.vocab_size


def test_spans_go_in_and_come_out(tokenizer):
    prompt = "def <extra_id_0>(x):\n<extra_id_1>"
    ids = encode_spans(prompt, tokenizer)
    first, second = tokenizer.sentinels[:2]
    expected = [*tokenizer.encode("def "), first, *tokenizer.encode("(x):\n"), second, tokenizer.end_of_document]
    assert ids == expected
    out = [first, *tokenizer.encode("name"), second, *tokenizer.encode("    pass"), tokenizer.end_of_document]
    assert spans_of(out, tokenizer) == {0: "name", 1: "    pass"}
    assert fill(prompt, spans_of(out, tokenizer)) == "def name(x):\n    pass"
    assert fill(prompt, spans_of(out[:3], tokenizer)).endswith("(x):\n<extra_id_1>"), "not reached"
    twice = [*tokenizer.encode("x"), first, *tokenizer.encode("a"), first, *tokenizer.encode("b")]
    assert spans_of(twice, tokenizer) == {0: "a"}
    assert answer(prompt, out, tokenizer) == "def name(x):\n    pass"
    ids = encode_spans("red car", tokenizer, needs_spans=False)
    assert ids == [*tokenizer.encode("red car"), tokenizer.end_of_document]
    assert answer("red car", [*tokenizer.encode("Auto"), tokenizer.end_of_document], tokenizer) == "Auto"


@pytest.mark.parametrize(
    ("prompt", "says"),
    [
        ("no span", "has no <extra_id_0>"),
        ("<extra_id_1>", "sentinels must be numbered from 0"),
        ("<extra_id_0> <extra_id_0>", "has <extra_id_0>, <extra_id_0>: sentinels must be numbered"),
        ("".join(f"<extra_id_{n}>" for n in range(4)), "has 4 sentinels"),
    ],
)
def test_spans_that_cannot_be(tokenizer, prompt, says):
    with pytest.raises(UserError, match=says):
        encode_spans(prompt, tokenizer)
