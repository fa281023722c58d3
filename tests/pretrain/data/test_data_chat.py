"""Conversations: rows to tokens and answers, from every kind of source, and packed into samples."""

import json
import pickle
import re
from pathlib import Path

import numpy as np
import pytest

from fmoe.errors import UserError
from pretrain.data.chat import ChatEncoder, chat_template
from pretrain.data.cli import main
from pretrain.data.conversations import Conversations, pack
from pretrain.data.indexed import IndexedCorpus, IndexedWriter
from pretrain.data.prepare import prepare
from pretrain.data.streams import Dataset, Mixture
from pretrain.data.tokenizers import Tokenizer, load_tokenizer, train_tokenizer

START, END = "<|im_start|>", "<|im_end|>"
PROMPT = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
CHATML = "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}" + PROMPT
MARKED = (
    "{{ bos_token }}{% for m in messages %}<|im_start|>{{ m['role'] }}\n"
    "{% if m['role'] == 'assistant' %}{%- generation %}{{ m['content'] }}<|im_end|>{% endgeneration %}"
    "{% else %}{{ m['content'] }}<|im_end|>{% endif %}{{ '\n' }}{% endfor %}" + PROMPT
)
MESSAGES = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "What does json.dumps do?"},
    {"role": "assistant", "content": "It serializes an object."},
    {"role": "user", "content": "And loads?"},
    {"role": "assistant", "content": "The opposite."},
]


def tokenizer_with(folder: Path, template: str | None, jsonl: Path) -> Tokenizer:
    """A tokenizer.json of 512 tokens, with the two tokens of ChatML behind them."""
    folder.mkdir(exist_ok=True)
    train_tokenizer([jsonl], folder / "tokenizer.json", 512)
    added = {str(512 + i): {"content": name, "special": True} for i, name in enumerate((START, END))}
    settings = {"eos_token": "<eod>", "bos_token": "<bos>", "added_tokens_decoder": added}
    if template is not None:
        settings["chat_template"] = template
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return load_tokenizer(folder / "tokenizer.json")


@pytest.fixture(scope="session")
def chatml(jsonl: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pytest.importorskip("transformers")
    return tokenizer_with(tmp_path_factory.mktemp("chatml"), CHATML, jsonl)


@pytest.fixture(scope="session")
def marked(jsonl: Path, tmp_path_factory: pytest.TempPathFactory) -> Tokenizer:
    pytest.importorskip("transformers")
    return tokenizer_with(tmp_path_factory.mktemp("marked"), MARKED, jsonl)


def ids(tokenizer: Tokenizer, *texts: str) -> list[int]:
    """Tokens of texts and of names of special tokens."""
    special = {"<|im_start|>", "<|im_end|>", "<bos>", "<eod>"}
    return [i for text in texts for i in ([tokenizer.ids[text]] if text in special else tokenizer.encode(text))]


def lists(parts: list[np.ndarray]) -> list[list[int]]:
    return [part.tolist() for part in parts]


def test_messages_are_located_by_prefixes(chatml: Tokenizer) -> None:
    """An answer has what follows the generation prompt, up to the next message."""
    found = ChatEncoder(chatml).encode({"messages": MESSAGES})
    first = [*(START, "system\nBe brief.", END, "\n"), *(START, "user\nWhat does json.dumps do?", END, "\n")]
    assert lists(found) == [
        ids(chatml, *first, START, "assistant\n"),
        ids(chatml, "It serializes an object.", END, "\n"),
        ids(chatml, START, "user\nAnd loads?", END, "\n", START, "assistant\n"),
        ids(chatml, "The opposite.", END, "\n"),
    ]


def test_a_template_may_mark_the_answers(marked: Tokenizer) -> None:
    encoder = ChatEncoder(marked, bos=True)  # the template begins with BOS already
    found = encoder.encode({"messages": MESSAGES[1:3]})
    assert lists(found) == [
        ids(marked, "<bos>", START, "user\nWhat does json.dumps do?", END, "\n", START, "assistant\n"),
        ids(marked, "It serializes an object.", END),
        ids(marked, "\n"),
    ]


@pytest.mark.parametrize("template", ["chatml", "marked"])
def test_answers_of_a_prompt_are_not_learned(template: str, request: pytest.FixtureRequest) -> None:
    tokenizer = request.getfixturevalue(template)
    found = ChatEncoder(tokenizer).encode({"prompt": MESSAGES[:4], "completion": MESSAGES[4:]})
    whole = ChatEncoder(tokenizer).encode({"messages": MESSAGES})
    assert np.concatenate(found).tolist() == np.concatenate(whole).tolist()
    assert found[1].tolist() == whole[3].tolist() and len(found) == len(whole) - 2


@pytest.mark.parametrize("key", ["completion", "answer"])
def test_texts_are_joined_without_a_template(key: str, tokenizer: Tokenizer) -> None:
    encoder = ChatEncoder(tokenizer, bos=True)
    assert lists(encoder.encode({"prompt": "import <eod>", key: " json"})) == [
        [tokenizer.role("bos"), *tokenizer.encode("import <eod>")],  # not the special token
        [*tokenizer.encode(" json"), tokenizer.end_of_document],
    ]


def test_the_file_of_a_template_comes_first(tmp_path: Path) -> None:
    path = tmp_path / "tokenizer.json"
    assert chat_template(path) is None
    named = [{"name": "tools", "template": "b"}, {"name": "default", "template": "a"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    assert chat_template(path) == "a"
    (tmp_path / "chat_template.jinja").write_text("c")
    assert chat_template(path) == "c"
    assert chat_template(tmp_path / "other.json") is None
    (tmp_path / "chat_template.jinja").unlink()
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named[:1]}))
    with pytest.raises(UserError, match=r"tokenizer_config\.json: chat_template"):
        chat_template(path)


def message(role: str, content: object, **more: object) -> dict:
    return {"role": role, "content": content, **more}


INVALID = {
    "both": ({"messages": MESSAGES, "prompt": "a"}, "both 'messages' and 'prompt'"),
    "no completion": ({"prompt": "a"}, "'completion' and 'answer'"),
    "two answers": ({"prompt": "a", "completion": "b", "answer": "c"}, "one of 'completion' and 'answer'"),
    "empty prompt": ({"prompt": " ", "completion": "b"}, "^prompt is empty"),
    "empty completion": ({"prompt": "a", "answer": "\n"}, "^answer is empty"),
    "number": ({"prompt": "a", "completion": 3}, "^completion is a int"),
    "no list": ({"messages": "a"}, "^messages must be a list of messages, not 'a'"),
    "no messages": ({"messages": []}, "^messages must be a list"),
    "role": ({"messages": [message("human", "a")]}, r"^messages\[0\]\.role='human' must be one of system,"),
    "key": ({"messages": [message("user", "a", name="b")]}, r"^messages\[0\] must have just role and content"),
    "content": ({"messages": [message("user", ["a"])]}, r"^messages\[0\] must have just role and content"),
    "no answer": ({"messages": MESSAGES[:2]}, "^messages has no message of the role assistant"),
    "only a prompt": ({"prompt": MESSAGES[:3], "completion": MESSAGES[3:4]}, "^completion has no message of the role"),
    "empty answer": ({"messages": [*MESSAGES[:2], message("assistant", "")]}, r"^messages\[2\]\.content is empty"),
    "long prompt": ({"messages": MESSAGES}, r"begins after \d+ tokens, which exceeds sequence_length=20"),
}


@pytest.mark.parametrize(("row", "message"), INVALID.values(), ids=list(INVALID))
def test_an_invalid_row_is_one_line(row: dict, message: str, chatml: Tokenizer) -> None:
    with pytest.raises(UserError, match=message) as caught:
        ChatEncoder(chatml, sequence_length=20).encode(row)
    assert "\n" not in str(caught.value)


TEMPLATES = {
    "fails": ("{{ raise_exception('no system messages') }}", "fails: no system messages"),
    "broken": ("{% for %}", "fails: "),
    "no prefix": (
        "{{ messages | length }}" + CHATML,
        "other tokens for the first 2 messages of messages",
    ),
    "no answers": (
        "{% if false %}{% generation %}{% endgeneration %}{% endif %}a",
        "no tokens for the answers in messages",
    ),
    "none": (None, r"messages need a chat template, and .*tokenizer\.json has none"),
}


@pytest.mark.parametrize(("template", "message"), TEMPLATES.values(), ids=list(TEMPLATES))
def test_a_template_that_does_not_serve_is_one_line(
    template: str | None, message: str, jsonl: Path, tmp_path: Path
) -> None:
    pytest.importorskip("transformers")
    encoder = ChatEncoder(tokenizer_with(tmp_path / "t", template, jsonl))
    with pytest.raises(UserError, match=message) as caught:
        encoder.encode({"messages": MESSAGES})
    assert "\n" not in str(caught.value)


ROWS = [
    {"messages": MESSAGES, "id": 1},
    {"messages": MESSAGES[1:3], "id": 2},
    {"messages": [message("user", "grüße, 世界"), message("assistant", "grüße")], "id": 3},
]


def write_rows(path: Path, rows: list) -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def contents(prefix: Path) -> list[bytes]:
    return [prefix.with_suffix(suffix).read_bytes() for suffix in (".bin", ".idx")]


def test_sequences_are_context_and_answer(chatml: Tokenizer, tmp_path: Path) -> None:
    rows = write_rows(tmp_path / "a.jsonl", ROWS)
    done = prepare([rows], chatml.path, tmp_path / "a", num_workers=1, chat=True)
    corpus = IndexedCorpus(tmp_path / "a")
    expected = [ChatEncoder(chatml).encode({"messages": row["messages"]}) for row in ROWS]
    assert [corpus.document(i).tolist() for i in range(3)] == [np.concatenate(parts).tolist() for parts in expected]
    assert corpus.sequence_lengths.tolist() == [len(part) for parts in expected for part in parts]
    assert corpus.lengths.tolist() == [sum(map(len, parts)) for parts in expected]
    answer_tokens = sum(len(part) for parts in expected for part in parts[1::2])
    assert (done.documents, done.answer_tokens) == (3, answer_tokens)
    assert corpus.description["chat"] == {"answer_tokens": answer_tokens}


def test_every_kind_of_source_gives_the_same_files(chatml: Tokenizer, tmp_path: Path) -> None:
    import datasets
    import pyarrow
    from pyarrow import parquet

    write_rows(tmp_path / "a.jsonl", ROWS)
    (tmp_path / "a.json").write_text(json.dumps(ROWS))
    parquet.write_table(pyarrow.Table.from_pylist(ROWS), tmp_path / "a.parquet")
    datasets.Dataset.from_list(ROWS).save_to_disk(tmp_path / "saved")
    (tmp_path / "folder").mkdir()
    write_rows(tmp_path / "folder" / "a.jsonl", ROWS)
    (tmp_path / "folder" / "settings.json").write_text("{}")
    sources = {
        "jsonl": [tmp_path / "a.jsonl"],
        "json": [tmp_path / "a.json"],
        "parquet": [tmp_path / "a.parquet"],
        "saved": [tmp_path / "saved"],
        "folder": [tmp_path / "folder"],
        "dataset": Mixture((Dataset("json", data_files=(str(tmp_path / "a.jsonl"),)),)),
        "saved dataset": Mixture((Dataset(str(tmp_path / "saved")),)),
    }
    for name, inputs in sources.items():
        prepare(inputs, chatml.path, tmp_path / "out" / name, num_workers=1, chat=True)
        assert contents(tmp_path / "out" / name) == contents(tmp_path / "out" / "jsonl"), name


def test_invalid_rows_are_skipped_and_counted(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """In the order of the rows of a batch: those that are no conversation, then those that cannot be encoded."""
    good = {"prompt": "import", "completion": " json"}
    rows = [good, [], {"text": "a"}, {"prompt": "a", "answer": ""}, good, {"messages": MESSAGES}]
    path = write_rows(tmp_path / "a.jsonl", rows)
    for num_workers in (1, 2):
        out = tmp_path / str(num_workers) / "a"
        done = prepare([path], tokenizer.path, out, num_workers=num_workers, chat=True, skip_errors=True)
        assert (done.documents, done.skipped) == (2, 4)
        assert [re.match(r"a\.jsonl, line \d", text).group() for text in done.first_skipped] == [
            f"a.jsonl, line {number}" for number in (2, 3, 6, 4)
        ]
    assert "line 1 has prompt as text" in done.first_skipped[2]
    assert contents(tmp_path / "1" / "a") == contents(tmp_path / "2" / "a")
    with pytest.raises(UserError, match=rf"^{re.escape(str(path))}, line 2: the row is a JSON list"):
        prepare([path], tokenizer.path, tmp_path / "other", num_workers=1, chat=True)
    (tmp_path / "a.txt").write_text("text")
    with pytest.raises(UserError, match=r"a\.txt is text, but conversations are rows"):
        prepare([tmp_path / "a.txt"], tokenizer.path, tmp_path / "other", num_workers=1, chat=True)


def test_the_command_tells_the_tokens_of_answers(
    tokenizer: Tokenizer, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    rows = write_rows(tmp_path / "a.jsonl", [{"prompt": "import", "completion": " json"}])
    prepare_it = ["prepare", str(rows), "--tokenizer", str(tokenizer.path), "--out", str(tmp_path / "a")]
    main([*prepare_it, "--chat", "--workers", "1"])
    answer = len(tokenizer.encode(" json")) + 1
    assert f"tokens ({answer} of answers)" in capsys.readouterr().out
    main(["show", str(tmp_path / "a")])
    assert f"conversations: {answer} tokens are of answers" in capsys.readouterr().out
    for options in (["--chat", "--text-key", "b"], ["--sequence-length", "9"], ["--chat", "--sequence-length", "0"]):
        with pytest.raises(UserError, match=options[-2].strip("-").replace("-", ".")):
            main([*prepare_it, "--overwrite", *options])


LENGTH = 16
PADDING = 99


def made_up(prefix: Path, seed: int, count: int = 40) -> list[list[list[int]]]:
    """Write a corpus of conversations of 3 to 20 tokens; return their parts. Tokens are distinct."""
    draw = np.random.default_rng(seed)
    conversations = []
    token = 100 + 10_000 * seed
    with IndexedWriter(prefix, np.int32) as writer:
        for _ in range(count):
            parts = []
            for size in draw.integers(1, 6, draw.integers(2, 6)):
                parts.append(list(range(token, token + size)))
                token += size
            for part in parts:
                writer.append(part)
                writer.end_sequence() if part is not parts[-1] else writer.end_document()
            conversations.append(parts)
    return conversations


def unpacked(sample: dict[str, np.ndarray]) -> list[tuple[list[int], list[int], list[int]]]:
    """Tokens, labels and mask of each conversation of a sample; the last document may be padding."""
    found = []
    for number in np.unique(sample["documents"]):
        own = sample["documents"] == number
        assert sample["positions"][own].tolist() == list(range(own.sum()))
        if sample["tokens"][own][0] == PADDING:
            assert not sample["loss_mask"][own].any() and number == sample["documents"][-1]
            continue
        found.append(tuple(sample[name][own].tolist() for name in ("tokens", "labels", "loss_mask")))
    return found


def test_an_epoch_has_every_conversation_once(tmp_path: Path) -> None:
    rows = [*made_up(tmp_path / "a", 1), *made_up(tmp_path / "b", 2)]
    corpora = [IndexedCorpus(tmp_path / name) for name in "ab"]
    samples = Conversations(corpora, LENGTH, 5, PADDING)
    expected = {}
    for parts in rows:
        tokens = np.concatenate(parts).tolist()[: LENGTH + 1]
        mask = [number % 2 for number, part in enumerate(parts) for _ in part][: LENGTH + 1]
        expected[tokens[0]] = (tokens[:-1], tokens[1:], mask[1:])
    assert samples.num_cut == sum(sum(map(len, parts)) > LENGTH + 1 for parts in rows) > 0
    orders = []
    for epoch in range(2):
        first = epoch * samples.samples_per_epoch
        taken = [unpacked(samples[n]) for n in range(first, first + samples.samples_per_epoch)]
        orders.append([sample[0][0][0] for sample in taken])
        conversations = [each for sample in taken for each in sample]
        assert {each[0][0]: each for each in conversations} == expected and len(conversations) == len(expected)
    assert orders[0] != orders[1] and sorted(orders[0]) == sorted(orders[1])
    copy = pickle.loads(pickle.dumps(samples))  # noqa: S301 - our own
    for n in (7, 3 * samples.samples_per_epoch, 0):  # of a run that begins anywhere
        assert all(np.array_equal(copy[n][name], value) for name, value in samples[n].items())
    other = Conversations(corpora, LENGTH, 6, PADDING)
    assert any(not np.array_equal(other[n]["tokens"], samples[n]["tokens"]) for n in range(4))
    filled = sum(min(sum(map(len, parts)) - 1, LENGTH) for parts in rows)
    assert samples.padding_share == pytest.approx(1 - filled / LENGTH / samples.samples_per_epoch)
    with pytest.raises(IndexError):
        samples[-1]


def test_a_conversation_whose_answer_begins_too_late_is_left_out(tmp_path: Path) -> None:
    with IndexedWriter(tmp_path / "a", np.int32) as writer:
        for context in (LENGTH + 1, LENGTH):
            writer.append([1] * context)
            writer.end_sequence()
            writer.append([2, 3])
            writer.end_document()
    corpus = IndexedCorpus(tmp_path / "a")
    samples = Conversations([corpus], LENGTH, 0, PADDING)
    assert (samples.num_conversations, samples.num_cut, samples.num_left_out) == (2, 1, 1)
    assert samples.samples_per_epoch == 1
    assert samples[0]["labels"].tolist() == [1] * (LENGTH - 1) + [2]
    assert samples[0]["loss_mask"].tolist() == [0] * (LENGTH - 1) + [1]
    with pytest.raises(UserError, match=r"no conversation of .* within model\.sequence_length=8"):
        Conversations([corpus], 8, 0, PADDING)


def test_packs_are_those_of_best_fit_decreasing() -> None:
    """A search through all packs for the one that an item fills best; packs with equal room are alike."""
    lengths = np.random.default_rng(0).integers(1, 33, 500)
    packs = pack(lengths, 32)
    used = np.bincount(packs, weights=lengths)
    rooms: list[int] = []
    for length in sorted(lengths.tolist(), reverse=True):
        fitting = [i for i, room in enumerate(rooms) if room >= length]
        if not fitting:
            rooms.append(32)
            fitting = [len(rooms) - 1]
        rooms[min(fitting, key=lambda i: rooms[i])] -= length
    assert sorted(32 - used) == sorted(rooms)
