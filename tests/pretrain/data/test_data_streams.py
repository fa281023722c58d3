"""Documents streamed by Hugging Face `datasets`: the same corpus as from files, and errors of one line."""

import json
import os
import subprocess
import sys
from collections import Counter
from pathlib import Path

import pytest
from hub_server import COMMIT, hub

from fmoe.errors import UserError
from pretrain.data import documents, sources
from pretrain.data.cli import main
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.prepare import prepare
from pretrain.data.streams import Dataset, Mixture, open_mixture, parse_dataset
from pretrain.data.tokenizers import Tokenizer, train_tokenizer

datasets = pytest.importorskip("datasets")

TEXTS = [
    "one\r\nline\n\n",
    "",
    "  grüße\t世界 😀",
    "x" * 100 + "\n" + "y" * 50,
    *(f"document {i}\n" * i for i in range(8)),
]
PROVENANCE = ("sources", "mixture")


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_DATASETS_CACHE", tmp_path_factory.mktemp("cache"))


def write_rows(path: Path, texts: list[str | None], **columns: list) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    rows = [dict(zip(["text", *columns], row, strict=True)) for row in zip(texts, *columns.values(), strict=True)]
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return path


def write_texts(folder: Path, texts: list[str]) -> Path:
    """One text file per document, in order."""
    folder.mkdir()
    for i, text in enumerate(texts):
        (folder / f"{i:04}.txt").write_bytes(text.encode())
    return folder


def contents(prefix: Path) -> tuple[bytes, bytes, dict]:
    """The tokens, the index, and the description without provenance."""
    facts = json.loads(prefix.with_suffix(".json").read_text())
    kept = {name: value for name, value in facts.items() if name not in PROVENANCE}
    return prefix.with_suffix(".bin").read_bytes(), prefix.with_suffix(".idx").read_bytes(), kept


def assert_same_corpus(mixture: Mixture, texts: list[str], tokenizer: Tokenizer, folder: Path, **options) -> None:
    files = write_texts(folder / "files", texts)
    prepare([files], tokenizer.path, folder / "expected", num_workers=1)
    prepare(mixture, tokenizer.path, folder / "found", **{"num_workers": 1, **options})
    assert contents(folder / "found") == contents(folder / "expected")


def one(name: str | Path, **options) -> Mixture:
    return Mixture((Dataset(str(name), **options),))


def as_json(folder: Path) -> Mixture:
    write_rows(folder / "train.jsonl", TEXTS, id=list(range(len(TEXTS))))
    write_rows(folder / "test.jsonl", ["other"], id=[0])
    return one(folder)


def as_parquet(folder: Path) -> Mixture:
    folder.mkdir()
    datasets.Dataset.from_dict({"body": TEXTS, "text": ["no"] * len(TEXTS)}).to_parquet(folder / "part.parquet")
    return one("parquet", columns=("body",), data_files=(str(folder / "*.parquet"),), split="any")


def as_saved(folder: Path) -> Mixture:
    datasets.Dataset.from_dict({"text": TEXTS, "id": range(len(TEXTS))}).save_to_disk(str(folder))
    return one(folder)


def as_lines(folder: Path) -> Mixture:
    folder.mkdir()
    (folder / "train.txt").write_text("".join(f"line {i}\n" for i in range(20)))
    return one(folder)


@pytest.mark.parametrize("kind", [as_json, as_parquet, as_saved, as_lines])
def test_a_stream_gives_the_corpus_of_text_files(kind, tokenizer: Tokenizer, tmp_path: Path) -> None:
    texts = [f"line {i}" for i in range(20)] if kind is as_lines else TEXTS
    assert_same_corpus(kind(tmp_path / "dataset"), texts, tokenizer, tmp_path)


@pytest.mark.parametrize("num_workers", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_workers_and_pieces_change_nothing(num_workers: int, tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(sources, "PIECE_SIZE", 64)
    assert_same_corpus(as_json(tmp_path / "dataset"), TEXTS, tokenizer, tmp_path, num_workers=num_workers)


def parts_of(folder: Path) -> tuple[Mixture, list[list[str]]]:
    """Three datasets of different columns, builders and splits, and their texts."""
    texts = [[f"{name} {i}" for i in range(count)] for name, count in (("a", 60), ("b", 25), ("c", 15))]
    write_rows(folder / "a" / "train.jsonl", texts[0])
    datasets.Dataset.from_dict({"body": texts[1], "id": range(25)}).save_to_disk(str(folder / "b"))
    titles = [text.split()[0] for text in texts[2]]
    write_rows(folder / "c" / "validation.jsonl", [text.split()[1] for text in texts[2]], title=titles)
    parts = (
        Dataset(str(folder / "a")),
        Dataset(str(folder / "b"), columns=("body",)),
        Dataset(str(folder / "c"), split="validation", columns=("title", "text")),
    )
    return Mixture(parts, separator=" "), texts


@pytest.mark.parametrize("strategy", ["first_exhausted", "all_exhausted"])
@pytest.mark.parametrize(("weights", "seed"), [((0.5, 0.3, 0.2), 0), ((0.5, 0.3, 0.2), 7), ((0.2, 0.1, 0.7), 0)])
def test_interleaving(weights, seed: int, strategy: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    """The reference is the interleaving of datasets in memory."""
    mixture, texts = parts_of(tmp_path)
    tables = [datasets.Dataset.from_dict({"text": part}) for part in texts]
    order = datasets.interleave_datasets(tables, list(weights), seed=seed, stopping_strategy=strategy)["text"]
    interleaved = Mixture(mixture.datasets, weights, seed, strategy, " ")
    assert_same_corpus(interleaved, list(order), tokenizer, tmp_path)
    counts = Counter(text.split()[0] for text in order)
    sizes = {"a": 60, "b": 25, "c": 15}
    if strategy == "all_exhausted":
        assert set(order) == {text for part in texts for text in part}
    else:
        assert len(set(order)) == len(order) and any(counts[name] == size for name, size in sizes.items())


def test_datasets_without_weights_are_read_one_after_the_other(tokenizer: Tokenizer, tmp_path: Path) -> None:
    mixture, texts = parts_of(tmp_path)
    assert_same_corpus(mixture, [text for part in texts for text in part], tokenizer, tmp_path)
    short = Mixture(mixture.datasets, separator=" ", max_documents=61)
    prepare(short, tokenizer.path, tmp_path / "short", num_workers=1)
    corpus = IndexedCorpus(tmp_path / "short")
    assert corpus.num_documents == 61 and tokenizer.decode(corpus.document(60)) == "b 0"


def test_columns_are_joined_without_the_empty_ones(tmp_path: Path) -> None:
    write_rows(tmp_path / "d" / "a.jsonl", ["text", "", "alone", ""], title=["title", "title", "", ""])
    stream = open_mixture(one(tmp_path / "d", columns=("title", "text")))
    assert [text for _, text, _ in stream.documents()] == ["title\n\ntext", "title", "alone", ""]


def test_provenance(tokenizer: Tokenizer, tmp_path: Path, capsys) -> None:
    mixture, _ = parts_of(tmp_path)
    mixture = Mixture(mixture.datasets, (0.5, 0.3, 0.2), 3, "all_exhausted", " ", 40)
    prepare(mixture, tokenizer.path, tmp_path / "out", num_workers=1)
    facts = IndexedCorpus(tmp_path / "out").description
    assert str(tmp_path) not in json.dumps(facts)
    found = facts["mixture"]
    assert [(part["name"], part["split"], part["columns"]) for part in found["datasets"]] == [
        ("a", "train", ["text"]),
        ("b", "train", ["body"]),
        ("c", "validation", ["title", "text"]),
    ]
    assert all(part["fingerprint"] and part["revision"] is None for part in found["datasets"])
    assert found["weights"] == [0.5, 0.3, 0.2] and (found["seed"], found["max_documents"]) == (3, 40)
    assert found["stopping_strategy"] == "all_exhausted" and found["separator"] == " "
    assert facts["sources"] == ["a, split train, b, split train, c, split validation"]
    main(["show", str(tmp_path / "out")])
    assert capsys.readouterr().out.count("\ndataset: ") == 3


def test_a_text_that_is_missing(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_rows(tmp_path / "a" / "a.jsonl", [None, "one", "two"], title=["0", "1", None])
    write_rows(tmp_path / "b" / "b.jsonl", ["b"], title=["b"])
    parts = tuple(Dataset(str(tmp_path / name), columns=("title", "text")) for name in "ab")
    with pytest.raises(UserError, match=r"^a, split train, row 1: the value of 'text' is a NoneType, not a string"):
        prepare(Mixture(parts), tokenizer.path, tmp_path / "out", num_workers=1)
    assert not list(tmp_path.glob("out*"))
    done = prepare(Mixture(parts), tokenizer.path, tmp_path / "out", num_workers=1, skip_errors=True)
    assert (done.documents, done.skipped) == (2, 2)
    assert [said.split(":")[0] for said in done.first_skipped] == ["a, split train, row 1", "a, split train, row 3"]


def test_a_file_that_is_damaged_stops_also_with_skips(tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_rows(tmp_path / "d" / "a.jsonl", TEXTS)
    (tmp_path / "d" / "b.jsonl").write_text("damaged")
    for skip in (False, True):
        with pytest.raises(UserError, match=r"^d, split train cannot be read: ") as error:
            prepare(one(tmp_path / "d"), tokenizer.path, tmp_path / "out", num_workers=1, skip_errors=skip)
        assert "\n" not in str(error.value)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["d"]


def wrong(name: str, says: str, **options):
    return pytest.param(name, options, says, id=says.replace(" ", "-")[:30])


@pytest.mark.parametrize(
    ("name", "options", "says"),
    [
        wrong("d", "split='dev' is not in .*its splits are 'train'", split="dev"),
        wrong("d", "columns: 'body' is not in .*its columns are 'text', 'id'", columns=("body",)),
        wrong("d", r"columns: 'id' of .* has the type int\w*, not text", columns=("text", "id")),
        wrong("d", r"columns=\(\) of", columns=()),
        wrong("d", "revision='v1' of .* has no effect", revision="v1"),
        wrong("d", "BuilderConfig 'other' not found", config="other"),
        wrong("d", r"data_files: 'x\*.jsonl' of .* matches no file", data_files=("x*.jsonl",)),
        wrong("empty", "dataset='.*empty' "),
        wrong("none", "dataset='.*none' does not exist: pass a Hub id"),
        wrong("scripted", "dataset='.*scripted' has a loading script"),
        wrong("saved", "split='dev' is not in .*its splits are 'train', 'test'", split="dev"),
        wrong("saved", r"data_files=\('x',\) of .*saved' has no effect", data_files=("x",)),
        wrong("saved", "config='x' of .*saved' has no effect", config="x"),
    ],
)
def test_what_cannot_be_opened(name: str, options: dict, says: str, tokenizer: Tokenizer, tmp_path: Path) -> None:
    write_rows(tmp_path / "d" / "train.jsonl", ["a"], id=[1])
    write_rows(tmp_path / "empty" / "train.jsonl", [])
    write_rows(tmp_path / "scripted" / "train.jsonl", ["a"])
    (tmp_path / "scripted" / "scripted.py").write_text("raise SystemExit('code of a dataset ran')")
    table = datasets.Dataset.from_dict({"text": ["a"]})
    datasets.DatasetDict({"train": table, "test": table}).save_to_disk(str(tmp_path / "saved"))
    with pytest.raises(UserError, match=says) as error:
        prepare(one(tmp_path / name, **options), tokenizer.path, tmp_path / "out", num_workers=1)
    assert "\n" not in str(error.value)
    assert not list(tmp_path.glob("out*"))


@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"weights": (1.0,)}, r"weights=\(1.0,\) must have 2 numbers"),
        ({"weights": (0.5, 0.6)}, r"weights=\(0.5, 0.6\) must sum to 1, not 1.1"),
        ({"weights": (1.5, -0.5)}, r"weights=\(1.5, -0.5\) must all be positive and finite"),
        ({"weights": (1.0, 0.0)}, "must all be positive and finite"),
        ({"weights": (float("nan"), 1.0)}, "must all be positive and finite"),
        ({"seed": -1}, "seed=-1 must be at least 0"),
        ({"stopping_strategy": "never"}, "stopping_strategy='never' must be one of first_exhausted, all_exhausted"),
        ({"max_documents": 0}, "max_documents=0 must be at least 1"),
        ({"datasets": ()}, "at least one dataset"),
        ({"datasets": (Dataset("json"),)}, "dataset='json' is a builder and needs data_files"),
        ({"datasets": (Dataset(""),)}, "dataset='' has no name"),
        ({"datasets": (Dataset("pandas", data_files=("x.pkl",)),)}, "dataset='pandas' is not supported: it unpickles"),
        ({"datasets": (Dataset("a" * 300),)}, "dataset=aaa.* is too long"),
    ],
    ids=str,
)
def test_what_cannot_be_mixed(options: dict, says: str) -> None:
    with pytest.raises(UserError, match=says):
        open_mixture(Mixture(**{"datasets": (Dataset("a"), Dataset("b")), **options}))


def test_an_output_that_is_read_is_refused(tokenizer: Tokenizer, tmp_path: Path) -> None:
    path = write_rows(tmp_path / "d" / "a.json", ["text"])
    before = path.read_bytes()
    with pytest.raises(UserError, match=r"a\.json is an input and would be overwritten"):
        prepare(one(tmp_path / "d"), tokenizer.path, tmp_path / "d" / "a", num_workers=1)
    with pytest.raises(UserError, match=r"a\.json is an input and would be overwritten"):
        train_tokenizer(one(tmp_path / "d"), path, 300, sentinels=0)
    assert path.read_bytes() == before


def test_a_tokenizer_of_a_dataset(jsonl: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    out = tmp_path / "tokenizer.model"
    options = ["--out", str(out), "--vocab-size", "512"]
    main(["tokenizer", "--dataset", "json", "--data-files", str(jsonl), *options])
    assert out.read_bytes() == tokenizer.path.read_bytes()
    with pytest.raises(UserError, match="no text to train a tokenizer on in d, split train"):
        train_tokenizer(one(write_rows(tmp_path / "d" / "a.jsonl", [""]).parent), tmp_path / "b.model")


def test_progress_without_a_known_size(tokenizer: Tokenizer, tmp_path: Path, capfd, monkeypatch) -> None:
    monkeypatch.setattr("pretrain.data.progress._SECONDS_BETWEEN_LINES", 0.0)
    mixture = Mixture(as_json(tmp_path / "d").datasets, max_documents=3)
    assert documents.open_sources(mixture)[0].num_bytes is None
    prepare(mixture, tokenizer.path, tmp_path / "out", num_workers=1, progress=True)
    assert capfd.readouterr().err.splitlines()[-1].startswith("tokenizing: 0.0 MiB, 2 documents, ")
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    prepare(mixture, tokenizer.path, tmp_path / "out", num_workers=1, progress=True)


def test_names(tmp_path: Path, monkeypatch) -> None:
    assert parse_dataset("owner/name") == ("owner/name", None, None)
    assert parse_dataset("owner/name:en@refs/convert/parquet") == ("owner/name", "en", "refs/convert/parquet")
    assert parse_dataset("name@v1") == ("name", None, "v1")
    (tmp_path / "a:b@c").mkdir()
    monkeypatch.chdir(tmp_path)
    assert parse_dataset("a:b@c") == ("a:b@c", None, None)


def test_the_command_line(tokenizer: Tokenizer, tmp_path: Path) -> None:
    mixture, _ = parts_of(tmp_path)
    names = [option for part in mixture.datasets for option in ("--dataset", part.name)]
    prepare_ = ["prepare", "--tokenizer", str(tokenizer.path), "--workers", "1", "--out"]
    each = [*("--columns", "text", "--columns", "body", "--columns", "title", "text"), "--separator", " "]
    each += ["--split", "train", "--split", "train", "--split", "validation"]
    mixed = ["--weights", "0.5", "0.3", "0.2", "--seed", "7", "--stopping-strategy", "all_exhausted"]
    main([*prepare_, str(tmp_path / "found"), *names, *each, *mixed, "--max-documents", "90"])
    weighted = Mixture(mixture.datasets, (0.5, 0.3, 0.2), 7, "all_exhausted", " ", 90)
    prepare(weighted, tokenizer.path, tmp_path / "expected", num_workers=1)
    for suffix in (".bin", ".idx", ".json"):
        assert (tmp_path / f"found{suffix}").read_bytes() == (tmp_path / f"expected{suffix}").read_bytes()

    one_part, out = names[:2], str(tmp_path / "none")
    for arguments, says in (
        ([], "no input: pass at least one file or folder as INPUT, or --dataset"),
        (["x.txt", "--weights", "1"], "--weights needs --dataset"),
        (["x.txt", *one_part], "mutually exclusive"),
        ([*one_part, "--text-key", "body"], "--text-key body applies only to INPUT"),
        ([*one_part, "--format", "json"], "--format json applies only to INPUT"),
        ([*names, "--split", "a", "--split", "b"], "--split is given 2 times for 3 --dataset: give it once"),
    ):
        with pytest.raises(UserError, match=says):
            main([*prepare_, out, *arguments])


HUB = """
import sys, traceback
from fmoe.cli import run
from pretrain.data.cli import main
tokenizer, *names = sys.argv[1:]
for i, name in enumerate(names):
    command = ["prepare", "--dataset", name, "--tokenizer", tokenizer, "--out", f"out/{i}", "--workers", "1"]
    print("code", run("fmoe data", lambda: main(command)), file=sys.stderr)
"""


@pytest.mark.slow
def test_a_hub(tokenizer: Tokenizer, tmp_path: Path) -> None:
    """A process of its own, because the Hub's address is read when `huggingface_hub` is imported."""
    root = tmp_path / "mirror"
    for name in ("plain", "closed", "coded"):
        write_rows(root / "owner" / name / "train.jsonl", TEXTS)
    (root / "owner" / "coded" / "coded.py").touch()
    names = ["owner/plain", "owner/plain@main", "owner/plain@v1", "owner/none", "owner/closed", "owner/coded", "a b"]
    unset = ("HF_TOKEN", "HF_HUB_OFFLINE", "HF_DATASETS_OFFLINE")
    environment = {name: value for name, value in os.environ.items() if name not in unset}
    with hub(root, gated=("owner/closed",)) as (address, requests):
        environment |= {"HF_ENDPOINT": address, "HF_HOME": str(tmp_path / "home"), "HF_HUB_DISABLE_TELEMETRY": "1"}
        command = [sys.executable, "-c", HUB, str(tokenizer.path), *names]
        done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True, text=True, check=True)
    codes = [line for line in done.stderr.splitlines() if line.startswith("code ")]
    errors = [line for line in done.stderr.splitlines() if line.startswith("fmoe data: error: ")]
    assert codes == ["code 0"] * 2 + ["code 2"] * 5, done.stderr
    for error, says in zip(
        errors,
        ["revision='v1' is not in", "neither a folder here nor a dataset", "HF_TOKEN", "loading script", "'a b' is"],
        strict=True,
    ):
        assert says in error and address not in done.stdout
    assert not any(request.endswith("coded.py") for request in requests)
    prepare([write_texts(tmp_path / "files", TEXTS)], tokenizer.path, tmp_path / "expected", num_workers=1)
    for prefix in ("0", "1"):
        assert contents(tmp_path / "out" / prefix) == contents(tmp_path / "expected")
        (found,) = IndexedCorpus(tmp_path / "out" / prefix).description["mixture"]["datasets"]
        assert (found["name"], found["revision"]) == ("owner/plain", COMMIT)
    assert sorted(path.name for path in (tmp_path / "out").iterdir()) == [
        f"{prefix}.{suffix}" for prefix in "01" for suffix in ("bin", "idx", "json")
    ]


def test_a_hub_that_cannot_be_reached(tokenizer: Tokenizer, tmp_path: Path, monkeypatch) -> None:
    monkeypatch.setattr(datasets.config, "HF_ENDPOINT", "http://127.0.0.1:9")  # discard: nothing listens
    with pytest.raises(UserError, match=r"dataset='owner/name': http://127.0.0.1:9 cannot be reached .* HF_ENDPOINT"):
        prepare(one("owner/name"), tokenizer.path, tmp_path / "out", num_workers=1)
    assert not list(tmp_path.iterdir())
