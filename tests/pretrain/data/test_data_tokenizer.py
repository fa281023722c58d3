import io
import random
from pathlib import Path

import numpy as np
import pytest
import sentencepiece

from fmoe.errors import UserError
from pretrain.data.documents import Piece
from pretrain.data.tokenizers import Tokenizer, load_tokenizer, sample_lines, train_tokenizer

AWKWARD = {
    "empty": "",
    "space": " ",
    "spaces around": "  a  ",
    "runs of spaces": "a" + " " * 1000 + "b" + " " * 7,
    "newlines": "\n\n\na\n",
    "tabs": "\tif x:\n\t\ty\t",
    "CRLF": "a\r\nb\r\n\r",
    "emoji": "😀👩‍👩‍👧é",
    "decomposed": "e\u0301 ﬁ Å",
    "line separators": "a\u2028b\u2029c\x0b\x0c\x85d",
    "byte order mark": "\ufeffa",
    "special pieces": "<pad> <unk><bos> <eod><cls> <sep> <mask><extra_id_3>",
    "bytes pieces": "<0x41><0xE2>",
    "sentencepiece's space": "▁a▁▁ ▁b▁",
    "sentencepiece's unknown": " ⁇ ▅",
    "controls": "".join(map(chr, range(1, 32))) + "\x7f",
    "NUL": "a\x00b\x00",
    "replacement": "\ufffd",
    "last code point": "\U0010ffff\ue000",
}


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_text_comes_back(text: str, tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(text)) == text


def test_real_and_random_text_comes_back(texts: list[str], tokenizer: Tokenizer) -> None:
    choose = random.Random(0)
    alphabet = [*map(chr, range(128)), *" \n\t▁世é", *map(chr, range(0xE000, 0x110000, 997))]
    noise = ["".join(choose.choices(alphabet, k=choose.randrange(60))) for _ in range(500)]
    for text in texts + noise:
        ids = tokenizer.encode(text)
        assert tokenizer.decode(np.array(ids, dtype=np.uint16)) == text
        assert all(7 + len(tokenizer.sentinels) <= i < tokenizer.vocab_size for i in ids)


def test_ids_of_the_special_pieces(tokenizer: Tokenizer) -> None:
    assert tokenizer.vocab_size == 512
    assert (tokenizer.pad, tokenizer.end_of_document) == (0, 3)
    assert [tokenizer.special(piece) for piece in ("<pad>", "<bos>", "<eod>", "<cls>", "<sep>", "<mask>")] == [
        *(0, 2, 3, 4, 5, 6)
    ]
    assert tokenizer.sentinels == tuple(range(7, 15))
    assert tokenizer.decode([0, 2, 3, 4, 5, 6, 7]) == ""
    with pytest.raises(UserError, match="no special piece '<other>'"):
        tokenizer.special("<other>")
    with pytest.raises(UserError, match="no special piece"):
        tokenizer.special("a")


@pytest.mark.parametrize("i", [-1, 512])
def test_ids_outside_the_vocabulary_are_named(i: int, tokenizer: Tokenizer) -> None:
    with pytest.raises(UserError, match=f"token id {i} is outside the vocabulary of .*, 0 to 511"):
        tokenizer.decode([5, i])


def test_training_is_repeatable_and_quiet(jsonl: Path, tmp_path: Path, capfd: pytest.CaptureFixture) -> None:
    first = train_tokenizer([jsonl], tmp_path / "a.model", 600)
    second = train_tokenizer([jsonl], tmp_path / "b.model", 600)
    assert first.fingerprint == second.fingerprint
    assert first.path.read_bytes() == second.path.read_bytes()
    assert capfd.readouterr() == ("", "")


def test_unigram_and_sentinels(jsonl: Path, tmp_path: Path) -> None:
    tokenizer = train_tokenizer([jsonl], tmp_path / "u.model", 400, "unigram", 60_000, sentinels=3)
    assert tokenizer.vocab_size == 400
    assert tokenizer.sentinels == (7, 8, 9)
    for text in AWKWARD.values():
        assert tokenizer.decode(tokenizer.encode(text)) == text


def test_sample_is_spread_evenly() -> None:
    pieces = [
        Piece("".join(f"{i:03d}\n" for i in range(start, start + 100)), 400, True) for start in range(0, 1000, 100)
    ]
    assert sample_lines(pieces, max_bytes=10_000) == [f"{i:03d}" for i in range(1000)]
    assert sample_lines(pieces, max_bytes=400) == [f"{i:03d}" for i in range(0, 1000, 8)]
    assert sample_lines([Piece("x" * 10_000, 10_000, True)], max_bytes=1) == ["x" * 4096]
    assert sample_lines([Piece("\n\n", 2, True)], max_bytes=1) == []


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"vocab_size": 100_000}, r"vocab_size=100000 exceeds what this text can fill: use at most \d+"),
        ({"vocab_size": 280}, r"vocab_size=280 is too small: .* raise vocab_size to at least \d+"),
        ({"vocab_size": -5, "sentinels": 0}, "vocab_size=-5 must be at least 266"),
        ({"vocab_size": 500, "sentinels": 400}, "vocab_size=500 must be at least 666: .* sentinels=400"),
        ({"sentinels": -1}, "sentinels=-1 must be at least 0"),
        ({"max_bytes": 0}, "max_bytes=0 must be at least 1"),
        ({"model_type": "word"}, "model_type='word' must be one of bpe, unigram, bytes"),
        ({"character_coverage": 2.0}, r"character_coverage=2\.0 must be between"),
        ({"text_key": "body"}, "no key 'body'"),
    ],
    ids=str,
)
def test_training_names_a_wrong_value(options: dict, message: str, jsonl: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=message) as caught:
        train_tokenizer([jsonl], tmp_path / "a.model", **options)
    assert "\n" not in str(caught.value)
    assert list(tmp_path.iterdir()) == []


def test_no_text_is_one_line(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("\n\n")
    with pytest.raises(UserError, match=r"no text to train a tokenizer on in .*a\.txt"):
        train_tokenizer([tmp_path / "a.txt"], tmp_path / "a.model")
    assert not (tmp_path / "a.model").exists()


@pytest.mark.parametrize("damage", ["missing", "empty", "cut", "noise", "text"])
def test_a_bad_model_file_is_one_line(damage: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = tmp_path / "bad.model"
    data = tokenizer.path.read_bytes()
    content = {"empty": b"", "cut": data[:-7], "noise": random.Random(0).randbytes(500), "text": b"hello\n" * 9}
    if damage != "missing":
        path.write_bytes(content[damage])
    with pytest.raises(UserError, match=r"bad\.model"):
        load_tokenizer(path)


def test_a_model_from_elsewhere_is_taken_as_it_is(texts: list[str], tmp_path: Path) -> None:
    """sentencepiece's defaults put a space in front and fold spaces: our shortcuts must not change its tokens."""
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[0].split("\n")), model_writer=model, vocab_size=200, minloglevel=2
    )
    (tmp_path / "other.model").write_bytes(model.getvalue())
    tokenizer = load_tokenizer(tmp_path / "other.model")
    processor = sentencepiece.SentencePieceProcessor(model_proto=model.getvalue())
    for text in ("def f(x):\n    return x", "a▁b"):
        assert tokenizer.encode(text) == processor.encode(text)
    assert tokenizer.pad is None
    assert tokenizer.sentinels == ()
    assert tokenizer.end_of_document == processor.eos_id()


def test_a_model_without_an_end_is_refused(texts: list[str], tmp_path: Path) -> None:
    model = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(texts[0].split("\n")), model_writer=model, vocab_size=200, eos_id=-1, minloglevel=2
    )
    (tmp_path / "other.model").write_bytes(model.getvalue())
    with pytest.raises(UserError, match=r"other\.model has no piece that ends documents"):
        load_tokenizer(tmp_path / "other.model")
