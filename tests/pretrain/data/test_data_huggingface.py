"""tokenizer.json of Hugging Face tokenizers: trained here, from elsewhere, and not one at all."""

import json
from pathlib import Path

import pytest
from test_data_tokenizer import AWKWARD
from tokenizers import AddedToken, decoders, models, normalizers, pre_tokenizers, processors, trainers
from tokenizers import Tokenizer as Model

from fmoe.cli import main
from fmoe.errors import UserError
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer
from pretrain.data.tokenizers.huggingface import HuggingFaceTokenizer


@pytest.fixture(scope="module")
def trained(jsonl: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    """512 pieces, 8 of them sentinels."""
    return train_tokenizer([jsonl], tmp_path_factory.mktemp("hf") / "tokenizer.json", vocab_size=512)


def elsewhere(path: Path, special: list[str], texts: list[str]) -> Path:
    """A model with another library's names, which would put pieces around a text, cut it off and fill it up."""
    model = Model(models.BPE())
    model.pre_tokenizer = pre_tokenizers.ByteLevel(False)
    model.decoder = decoders.ByteLevel()
    options = {"initial_alphabet": pre_tokenizers.ByteLevel.alphabet(), "show_progress": False}
    tokens = [AddedToken(name, special=True) for name in special]
    model.train_from_iterator(texts, trainers.BpeTrainer(vocab_size=600, special_tokens=tokens, **options))
    first, last = special[0], special[1]
    model.post_processor = processors.TemplateProcessing(
        single=f"{first} $A {last}", special_tokens=[(name, model.token_to_id(name)) for name in (first, last)]
    )
    model.enable_truncation(8)
    model.enable_padding(length=16, pad_id=0)
    model.save(str(path))
    return path


def test_what_is_trained_here(trained: Tokenizer) -> None:
    assert isinstance(trained, HuggingFaceTokenizer)
    assert (trained.vocab_size, trained.pad, trained.end_of_document) == (512, 0, 3)
    assert [trained.role(name) for name in ("pad", "cls", "sep", "mask")] == [0, 4, 5, 6]
    assert trained.sentinels == tuple(range(7, 15))
    assert trained.special_ids == frozenset(range(15))
    assert trained.special("<mask>") == 6
    with pytest.raises(UserError, match="no special piece '<other>'"):
        trained.special("<other>")
    assert trained.decode([0, 2, 3, 4, 5, 6, 7]) == ""
    with pytest.raises(UserError, match="token id 512 is outside the vocabulary"):
        trained.decode([512])


@pytest.mark.parametrize("text", AWKWARD.values(), ids=AWKWARD.keys())
def test_awkward_text_comes_back(text: str, trained: Tokenizer) -> None:
    ids = trained.encode(text)
    assert trained.decode(ids) == text
    assert not trained.special_ids.intersection(ids), "the spelling of a special piece is text"


def test_one_from_elsewhere(texts: list[str], tmp_path: Path) -> None:
    tokenizer = load_tokenizer(elsewhere(tmp_path / "t.json", ["<s>", "</s>", "<|endoftext|>", "<mask>"], texts))
    text = texts[0] + "<s> <|endoftext|>"
    ids = tokenizer.encode(text)
    assert tokenizer.decode(ids) == text, "cut off, filled up, or put between pieces"
    assert not tokenizer.special_ids.intersection(ids)
    assert tokenizer.end_of_document == 2 and tokenizer.pad is None and tokenizer.sentinels == ()
    assert (tokenizer.role("cls"), tokenizer.role("sep"), tokenizer.role("mask")) == (0, 1, 3)
    with pytest.raises(UserError, match=r"t\.json has no piece for pad: .*'<pad>' or '\[PAD\]'"):
        tokenizer.role("pad")


def test_one_of_bert(texts: list[str], tmp_path: Path) -> None:
    special = ["[CLS]", "[SEP]", "[PAD]", "[MASK]", "[UNK]"]
    model = Model(models.WordPiece(unk_token="[UNK]"))
    model.normalizer = normalizers.BertNormalizer()
    model.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    model.decoder = decoders.WordPiece()
    tokens = [AddedToken(name, special=True) for name in special]
    trainer = trainers.WordPieceTrainer(vocab_size=600, special_tokens=tokens, show_progress=False)
    model.train_from_iterator(texts, trainer)
    model.save(str(tmp_path / "t.json"))
    tokenizer = load_tokenizer(tmp_path / "t.json")
    assert [tokenizer.role(name) for name in ("cls", "sep", "pad", "mask")] == [0, 1, 2, 3]
    assert tokenizer.end_of_document == 1
    assert tokenizer.decode(tokenizer.encode("Import  os")) == "import os"


@pytest.mark.parametrize(
    ("content", "says"),
    [
        (b"", "is damaged, or is not a tokenizer.json of Hugging Face tokenizers: .*EOF"),
        (b"cos\nmkdir\n(V/tmp/x\ntR.", "is not a tokenizer.json"),
        (b"{}", "is not a tokenizer.json"),
        (b"\xff\xfe", "is not a tokenizer.json"),
        (
            json.dumps({"version": "1.0", "model": {"type": "BPE", "vocab": {"a": 0}, "merges": []}}).encode(),
            "ends doc",
        ),
    ],
    ids=["empty", "pickle", "object", "bytes", "no end"],
)
def test_what_is_none_is_one_line(content: bytes, says: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_bytes(content)
    with pytest.raises(UserError, match=says) as caught:
        load_tokenizer(path)
    assert str(path) in str(caught.value) and len(str(caught.value).splitlines()) == 1


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"vocab_size": 100_000}, "vocab_size=100000 exceeds what this text can fill: use at most"),
        ({"vocab_size": 262, "sentinels": 0}, "vocab_size=262 must be at least 263: "),
        ({"model_type": "unigram"}, "model_type='unigram' is not supported for"),
        ({"model_type": "word"}, "model_type='word' must be one of bpe, unigram, bytes"),
    ],
    ids=str,
)
def test_what_cannot_be_trained(options: dict, says: str, jsonl: Path, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=says):
        train_tokenizer([jsonl], tmp_path / "t.json", **options)
    assert not list(tmp_path.iterdir())


def test_from_text_to_tokens_by_commands(texts: list[str], jsonl: Path, tmp_path: Path, capsys) -> None:
    model, prefix = tmp_path / "t.json", tmp_path / "corpus"
    main(["data", "tokenizer", str(jsonl), "--out", str(model), "--vocab-size", "400"])
    main(["data", "prepare", str(jsonl), "--tokenizer", str(model), "--out", str(prefix), "--workers", "1"])
    main(["data", "show", str(prefix), "--tokenizer", str(model)])
    assert "400 pieces" in capsys.readouterr().out
    corpus, tokenizer = IndexedCorpus(prefix), load_tokenizer(model)
    documents = [corpus.document(i) for i in range(corpus.num_documents)]
    assert [tokenizer.decode(document) for document in documents] == [text for text in texts if text]
    assert all(document[-1] == tokenizer.end_of_document for document in documents)
    assert corpus.tokenizer_fingerprint == tokenizer.fingerprint


def test_a_token_a_byte(tmp_path, texts):
    tokenizer = train_tokenizer([], tmp_path / "bytes.json", model_type="bytes")
    assert (tokenizer.vocab_size, tokenizer.pad, tokenizer.end_of_document, tokenizer.sentinels) == (263, 0, 3, ())
    for text in (*texts[:3], "", "é世界\r\n\t 007 <eod><pad>", "".join(map(chr, range(0x250)))):
        ids = tokenizer.encode(text)
        assert len(ids) == len(text.encode()) and tokenizer.decode(ids) == text
        assert all(7 <= i < 263 for i in ids)
    assert len(set(tokenizer.encode("".join(map(chr, range(128)))))) == 128
    assert load_tokenizer(tmp_path / "bytes.json").encode("a\nb") == tokenizer.encode("a\nb")
    sentinels = train_tokenizer([], tmp_path / "t5.json", model_type="bytes", sentinels=4)
    assert (sentinels.vocab_size, sentinels.sentinels) == (267, (7, 8, 9, 10))


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        ("b.model", {}, "model_type='bytes' needs an output that ends in .json, not b.model"),
        ("b.json", {"vocab_size": 300}, "vocab_size=300 must be 263: .* 256 bytes"),
        ("b.json", {"sentinels": -1}, "sentinels=-1 must be at least 0"),
        ("b.json", {"model_type": "bpe"}, "model_type='bpe' needs text to train on"),
    ],
)
def test_bytes_that_cannot_be(tmp_path, name, options, says):
    with pytest.raises(UserError, match=says):
        train_tokenizer([], tmp_path / name, **{"model_type": "bytes"} | options)
    assert not list(tmp_path.iterdir())
