import os
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

from fmoe.cli import run
from fmoe.errors import UserError
from pretrain.config.load import load_recipe
from pretrain.data.cli import main
from pretrain.data.indexed import IndexedCorpus
from pretrain.data.opening import open_corpus, open_tokenizer
from pretrain.data.samples import GPTSamples
from pretrain.data.tokenizers import Tokenizer, train_tokenizer

ROOT = Path(__file__).parents[3]


def test_from_text_to_samples(texts: list[str], jsonl: Path, tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    model, prefix = str(tmp_path / "tokenizer.model"), str(tmp_path / "train")
    assert main(["tokenizer", str(jsonl), "--out", model, "--vocab-size", "600", "--sentinels", "5"]) == 0
    assert f"{model}: 600 pieces, 5 sentinels" in capsys.readouterr().out
    assert main(["prepare", str(jsonl), "--tokenizer", model, "--out", prefix, "--workers", "1"]) == 0
    out = capsys.readouterr().out
    count = sum(bool(text) for text in texts)
    assert out.startswith(f"{count} documents, ")
    assert all(f"{prefix}{suffix}: " in out for suffix in (".bin", ".idx", ".json"))
    assert main(["show", prefix, "--tokenizer", model, "--documents", "2", "--verify"]) == 0
    out = capsys.readouterr().out
    assert f"{prefix}: {count} documents, " in out
    assert "document 0, " in out and repr(texts[0][:40])[:-1] in out
    assert "document 2" not in out
    assert len(GPTSamples([IndexedCorpus(prefix)], 128, seed=0)[0]) == 129


def test_outputs_are_replaced_only_when_asked(jsonl: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    prefix = tmp_path / "train"
    arguments = ["prepare", str(jsonl), "--tokenizer", str(tokenizer.path), "--out", str(prefix), "--workers", "1"]
    main(arguments)
    with pytest.raises(UserError, match=r"train\.bin exists; pass --overwrite"):
        main(arguments)
    main([*arguments, "--overwrite"])
    with pytest.raises(UserError, match=r"tokenizer\.model exists; pass --overwrite"):
        main(["tokenizer", str(jsonl), "--out", str(tokenizer.path)])
    with pytest.raises(UserError, match="is an input and would be overwritten"):
        main(["tokenizer", str(jsonl), "--out", str(jsonl), "--overwrite"])
    (tmp_path / "test.jsonl").touch()
    with pytest.raises(UserError, match=r"test\.jsonl exists; pass --overwrite"):
        main(["corpus", "--out", str(tmp_path)])


def test_show_refuses_another_tokenizer(jsonl: Path, tokenizer: Tokenizer, tmp_path: Path) -> None:
    main(["prepare", str(jsonl), "--tokenizer", str(tokenizer.path), "--out", str(tmp_path / "a"), "--workers", "1"])
    other = train_tokenizer([jsonl], tmp_path / "other.model", 400)
    with pytest.raises(UserError, match=r"was prepared with another tokenizer than .*other\.model"):
        main(["show", str(tmp_path / "a"), "--tokenizer", str(other.path)])


def test_a_wrong_input_is_one_line_and_exit_code_2(tmp_path: Path, capsys: pytest.CaptureFixture) -> None:
    assert run("fmoe data", lambda: main(["show", str(tmp_path / "none")])) == 2
    assert capsys.readouterr().err.count("\n") == 1
    for arguments in ([], ["other"], ["corpus"], ["corpus", "--ou", "x"]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)


def test_no_command_imports_torch(jsonl: Path, tmp_path: Path) -> None:
    script = (
        "import sys\n"
        "from fmoe.cli import main\n"
        "model, text, corpus = sys.argv[1:]\n"
        "assert main(['data', 'tokenizer', text, '--out', model, '--vocab-size', '512']) == 0\n"
        "assert main(['data', 'prepare', text, '--tokenizer', model, '--out', corpus, '--workers', '1']) == 0\n"
        "assert main(['data', 'show', corpus, '--tokenizer', model]) == 0\n"
        "assert not {'torch', 'megatron', 'transformers', 'datasets', 'pyarrow', 'wandb'} & set(sys.modules)\n"
    )
    files = [tmp_path / "tokenizer.model", jsonl, tmp_path / "corpus"]
    done = subprocess.run([sys.executable, "-c", script, *map(str, files)], cwd=ROOT, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("corpus", ["pylib", "docs", "bytes"])
def test_the_script_of_a_corpus(corpus: str) -> None:
    script = ROOT / "data" / corpus / "prepare.sh"
    subprocess.run(["bash", "-n", script], check=True)
    shown = subprocess.run([script, "--help"], check=True, capture_output=True, text=True)
    assert shown.stdout.startswith("usage: prepare.sh [") and "[OUT_DIR]\n" in shown.stdout
    wrong = subprocess.run([script, "--other"], capture_output=True, text=True)
    assert (wrong.returncode, wrong.stderr.count("\n")) == (2, 1)


def stand_in(folder: Path) -> Path:
    """A command for fmoe that notes its arguments and makes the output that the script looks for."""
    fmoe = folder / "fmoe"
    fmoe.write_text(
        "#!/usr/bin/env bash\n"
        f'echo "${{@: 2}}" >> "{folder}/calls"\n'
        'while [[ $1 != --out ]]; do step=${step-}.$1; shift; done; mkdir -p "$(dirname "$2")"\n'
        'case $step in .data.corpus*) mkdir -p "$2"; touch "$2/test.jsonl";; .data.tokenizer*) touch "$2";; '
        '*) touch "$2.idx";; esac\n'
    )
    fmoe.chmod(0o755)
    return fmoe


@pytest.mark.parametrize("corpus", ["pylib", "docs"])
def test_the_script_of_text_calls_the_command(corpus: str, tmp_path: Path) -> None:
    script = ROOT / "data" / corpus / "prepare.sh"
    environment = {**os.environ, "FMOE": str(stand_in(tmp_path))}
    for _ in range(2):
        subprocess.run([script, tmp_path / "out dir"], check=True, env=environment, capture_output=True)
    calls = (tmp_path / "calls").read_text().splitlines()
    assert calls == [f"example {corpus} --out {tmp_path / 'out dir'}"] * 2


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> None:
    """Instead of the standard library, its smaller modules."""
    files = sorted(path for path in Path(sysconfig.get_path("stdlib")).glob("*.py") if path.stat().st_size < 10_000)
    monkeypatch.setattr("pretrain.data.corpus._library_files", lambda _: [(path.name, path) for path in files])


def test_the_example_is_what_the_quickstart_reads(library, tmp_path: Path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    recipe = load_recipe("quickstart")
    with pytest.raises(UserError, match=r"data/pylib/out/tokenizer\.model.*fmoe data example pylib"):
        open_tokenizer(recipe)
    assert main(["example"]) == 0
    tokenizer = open_tokenizer(recipe)
    assert tokenizer.vocab_size == recipe.model.vocab_size
    assert all(open_corpus(prefix, tokenizer).num_tokens for prefix in (*recipe.data.train, *recipe.data.validation))
    capsys.readouterr()
    Path("data/pylib/out/validation.idx").unlink()
    assert main(["example"]) == 0  # makes only what is missing
    assert capsys.readouterr().out.count("documents") == 1


def test_the_script_of_bytes_splits_enwik8(tmp_path: Path) -> None:
    """With a stand-in for sha256sum, and one for fmoe that keeps what it is given."""
    script, file, out = ROOT / "data" / "bytes" / "prepare.sh", tmp_path / "enwik8", tmp_path / "out"
    with file.open("wb") as opened:
        for at, text in ((0, b"A"), (89_999_999, b"BC"), (94_999_999, b"DE"), (99_999_999, b"F")):
            opened.seek(at)
            opened.write(text)
    fmoe = stand_in(tmp_path)
    fmoe.write_text(fmoe.read_text() + f'if [[ $last == *.raw ]]; then cp "$last" "{tmp_path}"; fi\n')
    fmoe.write_text(fmoe.read_text().replace("\n", "\nlast=$3\n", 1))
    environment = {**os.environ, "FMOE": str(fmoe)}

    def run() -> subprocess.CompletedProcess:
        return subprocess.run([script, "--enwik8", file, out], env=environment, capture_output=True, text=True)

    refused = run()
    assert refused.returncode == 2 and "is not enwik8: its SHA-256 is " in refused.stderr
    sums = tmp_path / "bin" / "sha256sum"
    sums.parent.mkdir()
    sums.write_text("#!/bin/sh\necho 2b49720ec4d78c3c9fabaee6e4179a5e997302b3a70029f30f2d582218c024a8 -\n")
    sums.chmod(0o755)
    environment["PATH"] = f"{sums.parent}:{os.environ['PATH']}"
    for _ in range(2):
        assert run().returncode == 0
    calls = [line.split()[0] for line in (tmp_path / "calls").read_text().splitlines()]
    assert calls == ["tokenizer", *["corpus", "prepare", "prepare", "prepare"] * 2, "prepare", "prepare", "prepare"]
    for split, size, ends in (("train", 90, b"AB"), ("validation", 5, b"CD"), ("test", 5, b"EF")):
        data = (tmp_path / f"{split}.raw").read_bytes()
        assert len(data) == size * 1_000_000 and data[:1] + data[-1:] == ends
    assert not list((out / "enwik8").glob("*.raw"))
    with file.open("ab") as opened:
        opened.write(b"x")
    refused = run()
    assert refused.returncode == 2 and "has 100000001 bytes, not the 100000000 of enwik8" in refused.stderr


def test_formats_and_errors_on_the_command_line(tokenizer: Tokenizer, tmp_path: Path, capsys) -> None:
    (tmp_path / "a.log").write_bytes(b'{"text": "a"}\n{"text": null}\nb\n')
    prepare = ["prepare", str(tmp_path / "a.log"), "--tokenizer", str(tokenizer.path), "--workers", "1"]
    prepare += ["--out", str(tmp_path / "out")]
    with pytest.raises(UserError, match=r"a\.log has the suffix '\.log'"):
        main(prepare)
    with pytest.raises(UserError, match="line 2"):
        main([*prepare, "--format", "jsonl"])
    assert main([*prepare, "--format", "jsonl", "--on-error", "skip"]) == 0
    out = capsys.readouterr().out
    assert "1 documents, " in out and "2 documents skipped:\n  a.log, line 2: " in out
    main([*prepare, "--format", "text", "--overwrite"])
    assert IndexedCorpus(tmp_path / "out").num_documents == 1
    for arguments in ([*prepare, "--format", "csv"], [*prepare, "--on-error", "ignore"], ["prepare", "", *prepare[2:]]):
        with pytest.raises(SystemExit, match="2"):
            main(arguments)
    assert "the path is empty" in capsys.readouterr().err


def test_the_tokenizer_is_not_overwritten_by_what_it_makes(tmp_path: Path) -> None:
    main(["tokenizer", "--model-type", "bytes", "--out", str(tmp_path / "a.json")])
    (tmp_path / "text.txt").write_text("text")
    arguments = ["prepare", str(tmp_path / "text.txt"), "--tokenizer", str(tmp_path / "a.json"), "--workers", "1"]
    before = (tmp_path / "a.json").read_bytes()
    for more in ([], ["--overwrite"]):
        with pytest.raises(UserError, match=r"a\.json is an input and would be overwritten"):
            main([*arguments, "--out", str(tmp_path / "a"), *more])
    assert (tmp_path / "a.json").read_bytes() == before
