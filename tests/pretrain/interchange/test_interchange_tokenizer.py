"""Tokenizers that AutoTokenizer loads give the ids that ours give, on real text too."""

import json
import os
import random
import string
import sysconfig
from pathlib import Path

import pytest

from fmoe.errors import UserError
from pretrain.data.tokenizers import load_tokenizer, train_tokenizer
from pretrain.interchange.tokenizer import (
    CONFIG,
    SENTENCEPIECE,
    TOKENIZER,
    are_equally_likely,
    files_for,
    files_of,
    find_tokenizer,
)

PYTHON = "def f(x):\n\tif x:\r\n        return  'ünïcode' * 3  # 日本\n\n\n    1234567890\n"


def written(folder, tokenizer, length=64, model_type=None):
    """The folder with a tokenizer's files, loaded by AutoTokenizer; ``model_type`` of a config.json beside them."""
    import transformers

    folder.mkdir()
    for name, data in files_for(tokenizer, length).items():
        (folder / name).write_bytes(data)
    if model_type is not None:
        (folder / "config.json").write_text(json.dumps({"model_type": model_type}))
    return transformers.AutoTokenizer.from_pretrained(folder)


def some_texts(text):
    """Pieces of a text, of it with other characters thrown in, and what is hard."""
    draw = random.Random(3)
    yield from (text[at : at + 997] for at in range(0, len(text), 997))
    odd = "\u2581\n\t\r \u00a0éß漢字🙂\u200d\x00\x7f<>" + string.printable
    for _ in range(200):
        yield "".join(draw.choice(odd) * draw.randint(1, 4) for _ in range(draw.randint(0, 40)))
    yield from ("", "<eod><unk><s></s><pad>", " <extra_id_0> ", "<0x0A>", PYTHON, PYTHON * 3, " leading", "trailing ")


TRAINED = {
    "sentencepiece bpe": ("tokenizer.model", {}),
    "sentencepiece unigram": ("tokenizer.model", {"model_type": "unigram"}),
    "byte-level bpe": ("tokenizer.json", {}),
    "bytes": ("tokenizer.json", {"model_type": "bytes"}),
}


@pytest.fixture(scope="module")
def corpus(tmp_path_factory):
    """Sources of Python, and real text where there is some."""
    sources = [Path(sysconfig.get_path("stdlib")) / name for name in ("argparse.py", "json/decoder.py", "textwrap.py")]
    sources += sorted(Path(os.environ.get("FMOE_TEXT", "/nowhere")).glob("*.txt"))
    text = "".join(path.read_text()[:60_000] for path in sources) + PYTHON * 20
    path = tmp_path_factory.mktemp("text") / "text.txt"
    path.write_text(text)
    return path, text


@pytest.mark.parametrize("kind", TRAINED)
def test_ids_are_the_same(tmp_path, corpus, kind):
    name, options = TRAINED[kind]
    size = 267 if kind == "bytes" else 800
    ours = train_tokenizer([corpus[0]], tmp_path / name, size, sentinels=4, **options)
    theirs = written(tmp_path / "out", ours, model_type="qwen3_moe")
    assert theirs.vocab_size == ours.vocab_size == len(theirs) == size
    assert (theirs.eos_token_id, theirs.pad_token_id, theirs.unk_token_id) == (ours.end_of_document, ours.pad, 1)
    assert theirs.model_max_length == 64
    # llama.cpp reads this file, of bpe alone, and would add a space and a special piece in front of a text.
    copied = tmp_path / "out" / SENTENCEPIECE
    assert copied.is_file() == (kind == "sentencepiece bpe")
    config = json.loads((tmp_path / "out" / CONFIG).read_bytes())
    assert config["add_bos_token"] is False
    if copied.is_file():
        assert copied.read_bytes() == ours.path.read_bytes() and config["add_prefix_space"] is False
    texts = list(some_texts(corpus[1]))
    differ = [(text, theirs(text)["input_ids"]) for text in texts if theirs(text)["input_ids"] != ours.encode(text)]
    if kind == "sentencepiece unigram":  # 4 + 8 spaces or 8 + 4
        assert len(differ) < 0.2 * len(texts)
        differ = [text for text, ids in differ if not are_equally_likely(ours, ids, ours.encode(text))]
    assert not differ, differ[:3]
    ids = ours.encode(PYTHON)
    assert theirs.decode(ids) == ours.decode(ids) == PYTHON
    assert theirs.decode([*ids, ours.end_of_document], skip_special_tokens=True) == PYTHON


def foreign(folder, corpus, **options):
    """A sentencepiece model as others train them: text normalised, a space put in front."""
    import sentencepiece

    sentencepiece.SentencePieceTrainer.train(
        input=str(corpus[0]), model_prefix=str(folder / "foreign"), vocab_size=700, minloglevel=2, **options
    )
    return load_tokenizer(folder / "foreign.model")


def test_a_model_with_a_space_in_front(tmp_path, corpus):
    """As Llama's: no normalisation but the space in front, bytes for what is unknown."""
    ours = foreign(
        tmp_path,
        corpus,
        model_type="bpe",
        byte_fallback=True,
        normalization_rule_name="identity",
        remove_extra_whitespaces=False,
    )
    theirs = written(tmp_path / "out", ours)
    config = json.loads((tmp_path / "out" / CONFIG).read_bytes())
    assert (tmp_path / "out" / SENTENCEPIECE).is_file() and config["add_prefix_space"] is True
    texts = [text for text in some_texts(corpus[1]) if "<" not in text]
    assert [t for t in texts if theirs(t)["input_ids"] != ours.encode(t)] == []
    assert theirs.decode(ours.encode("one two")) == "one two"


def test_llama_cpp_needs_pieces_of_bytes(tmp_path, corpus):
    ours = foreign(
        tmp_path, corpus, model_type="bpe", normalization_rule_name="identity", remove_extra_whitespaces=False
    )
    assert files_for(ours, 64).keys() == {TOKENIZER, CONFIG}


def test_what_cannot_be_imitated_is_told(tmp_path, corpus):
    ours = foreign(tmp_path, corpus, model_type="word", hard_vocab_limit=False)
    with pytest.raises(UserError, match=r"foreign\.model is a model of words or characters"):
        files_for(ours, 64)


def test_a_tokenizer_keeps_its_companions(tmp_path, corpus):
    """Imported with tokenizer_config.json and a template, exported with them, byte for byte."""
    theirs = tmp_path / "theirs"
    theirs.mkdir()
    train_tokenizer([corpus[0]], theirs / TOKENIZER, 600, sentinels=0)
    (theirs / CONFIG).write_text('{"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": "<eod>"}')
    (theirs / "chat_template.jinja").write_text("{{ messages }}")
    (theirs / SENTENCEPIECE).write_bytes(b"not read")
    found = files_of(load_tokenizer(find_tokenizer(theirs)))
    assert {name: (theirs / name).read_bytes() for name in found} == found
    assert found.keys() == {TOKENIZER, CONFIG, "chat_template.jinja", SENTENCEPIECE}
    assert files_for(load_tokenizer(theirs / TOKENIZER), 64) == found
    assert find_tokenizer(tmp_path) is None
