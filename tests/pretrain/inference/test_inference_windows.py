"""A text in samples: every token once, whatever it is cut into."""

import gzip
import json
from dataclasses import replace

import numpy as np
import pytest

from fmoe import UserError
from pretrain.config import ModelConfig, Recipe, load_recipe
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.tokenizers import load_tokenizer
from pretrain.inference.windows import Text, gpt_windows, samples_of

END = 3


@pytest.mark.parametrize(("length", "stride"), [(1, 1), (4, 1), (4, 3), (4, 4), (7, 3), (7, 7)])
@pytest.mark.parametrize("count", [1, 3, 4, 5, 8, 9, 29])
def test_every_token_is_predicted_once_from_what_is_before_it(length, stride, count):
    stream = np.arange(100, 100 + count)
    for parts in ([stream], np.split(stream, sorted([1, 1, count // 2])), [np.array([t]) for t in stream]):
        predicted = []
        for number, (block, first) in enumerate(gpt_windows(parts, END, length, stride)):
            assert 2 <= len(block) <= length + 1
            whole = np.concatenate([[END], stream])
            assert (block == whole[number * stride : number * stride + len(block)]).all()
            predicted += block[1 + first :].tolist()
            assert first == (length - stride if number else 0), "less is seen before a token than can be"
        assert predicted == stream.tolist()


@pytest.fixture
def texts(tmp_path, tiny_corpus):
    """The same documents, one of them empty, in several forms; their tokens."""
    tokenizer = load_tokenizer(tiny_corpus.tokenizer)
    documents = ["first\ndocument é", "", "second 🙂"]
    lines = "".join(json.dumps({"text": text, "body": text}) + "\n" for text in documents)
    (tmp_path / "a.jsonl").write_text(lines)
    with gzip.open(tmp_path / "a.jsonl.gz", "wt") as file:
        file.write(lines)
    folder = tmp_path / "folder"
    folder.mkdir()
    for number, text in enumerate(documents):
        (folder / f"{number}.txt").write_text(text)
    ids = [token for text in documents if text for token in [*tokenizer.encode(text), tokenizer.end_of_document]]
    return tmp_path, tokenizer, ids


@pytest.mark.parametrize("name", ["a.jsonl", "a.jsonl.gz", "folder"])
def test_text_is_tokenized_as_a_corpus_is(texts, name):
    folder, tokenizer, ids = texts
    for key in ("text", "body"):
        text = Text([folder / name], tokenizer, 384, key)
        assert np.concatenate(list(text.tokens())).tolist() == ids and text.num_tokens is None
    both = Text([folder / name, folder / name], tokenizer, 384)
    assert np.concatenate(list(both.tokens())).tolist() == ids * 2


def test_a_corpus_is_read_as_it_lies(tiny_corpus):
    tokenizer, corpus = load_tokenizer(tiny_corpus.tokenizer), IndexedCorpus(tiny_corpus.validation)
    text = Text([tiny_corpus.validation], tokenizer, 384)
    assert text.num_tokens == corpus.num_tokens
    assert (np.concatenate(list(text.tokens())) == corpus.flat).all()
    again = Text([tiny_corpus.validation.with_suffix(".jsonl")], tokenizer, 384)
    assert (np.concatenate(list(again.tokens())) == corpus.flat).all()
    with pytest.raises(UserError, match=r"outside model.vocab_size=100"):
        list(Text([tiny_corpus.validation], tokenizer, 100).tokens())


KINDS = {
    "gpt": ({}, {}),
    "documents": ({}, {"document_mask": True}),
    "t5": ({"kind": "t5"}, {}),
    "bert": ({"kind": "bert"}, {}),
}


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("repeat", [1, 3])
def test_samples_hold_the_whole_text(texts, recipe_file, kind, repeat):
    """The last is short, and nothing is padded."""
    folder, tokenizer, ids = texts
    ids = ids * repeat
    model, data = KINDS[kind]
    recipe = load_recipe(str(recipe_file(model=model, data=data)))
    samples = list(samples_of(recipe, tokenizer, Text([folder / "folder"] * repeat, tokenizer, 384)))
    again = samples_of(recipe, tokenizer, Text([folder / "folder"] * repeat, tokenizer, 384))
    for sample, same in zip(samples, again, strict=True):
        assert all((sample[name] == same[name]).all() for name in sample), "other noise"
    if kind == "t5":
        sentinels, found = set(tokenizer.sentinels), []
        for sample in samples:
            inputs, targets = sample["tokens"].tolist(), sample["labels"].tolist()
            assert inputs[-1] == targets[-1] == tokenizer.end_of_document
            spans, current = {}, None
            for token in targets[:-1]:
                if token in sentinels:
                    current = spans.setdefault(token, [])
                else:
                    current.append(token)
            for token in inputs[:-1]:
                found += spans[token] if token in sentinels else [token]
        assert found == ids[: len(found)] and len(ids) - len(found) <= 1
        assert samples[0]["tokens"].shape == (recipe.model.sequence_length,)
        return
    if kind == "bert":
        assert [token for sample in samples for token in sample["labels"][1:-1].tolist()] == ids
        assert all(sample["loss_mask"].sum() >= 1 for sample in samples if len(sample["labels"]) > 3)
        return
    predicted = [token for s in samples for token in s["labels"][s["loss_mask"].astype(bool)].tolist()]
    if kind == "gpt":
        assert predicted == ids
    else:  # the first token of a document is not predicted from the one before
        begins = [0, *(i + 1 for i, token in enumerate(ids[:-1]) if token == tokenizer.end_of_document)]
        assert predicted == [token for i, token in enumerate(ids) if i not in begins]
    strided = list(samples_of(recipe, tokenizer, Text([folder / "folder"] * repeat, tokenizer, 384), 5))
    assert [t for s in strided for t in s["labels"][s["loss_mask"].astype(bool)].tolist()] == predicted


@pytest.mark.parametrize("kind", KINDS)
def test_a_text_with_nothing_to_predict(texts, recipe_file, kind):
    folder, tokenizer, _ = texts
    (folder / "nothing.txt").touch()
    model, data = KINDS[kind]
    recipe = load_recipe(str(recipe_file(model=model, data=data)))
    with pytest.raises(UserError, match="no tokens to predict"):
        list(samples_of(recipe, tokenizer, Text([folder / "nothing.txt"], tokenizer, 384)))


def test_a_tail_of_a_t5_with_dense_noise(texts, recipe_file):
    """Fewer spans than usual where there are no tokens to keep between them."""
    folder, tokenizer, _ = texts
    recipe = load_recipe(str(recipe_file(model={"kind": "t5"}, data={"noise_density": 0.15, "mean_span": 1.0})))
    recipe = replace(recipe, data=replace(recipe.data, noise_density=0.15))
    for length in range(2, 30):
        (folder / "tail.jsonl").write_text(json.dumps({"text": "a " * length}) + "\n")
        samples = list(samples_of(recipe, tokenizer, Text([folder / "tail.jsonl"], tokenizer, 384)))
        assert all((sample["labels"][:-1] == sample["decoder_tokens"][1:]).all() for sample in samples)


@pytest.mark.parametrize("bos", [2, 3])
@pytest.mark.parametrize("stride", [None, 3])
def test_documents_that_begin_with_bos(tiny_corpus, tmp_path, bos, stride):
    """BOS begins the stream and is not predicted, even if it is also the token that ends documents (3)."""
    tokenizer = load_tokenizer(tiny_corpus.tokenizer)
    (tmp_path / "a.jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in ("one two", "", "three")))
    text = Text([tmp_path / "a.jsonl"], tokenizer, 384, bos=bos)
    documents = [[bos, *tokenizer.encode(each), 3] for each in ("one two", "three")]
    assert np.concatenate(list(text.tokens())).tolist() == [*documents[0], *documents[1]]
    recipe = replace(Recipe(), model=ModelConfig(sequence_length=4))
    predicted = []
    for sample in samples_of(recipe, tokenizer, text, stride):
        predicted += sample["labels"][sample["loss_mask"] == 1].tolist()
    assert predicted == [token for document in documents for token in document[1:]]
