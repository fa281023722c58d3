"""A tiny corpus of real text, a recipe on it that trains in seconds, and a browser where there is one."""

import json
import shutil
import sysconfig
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import pytest
from opened import BROWSERS, FLAGS, WIDE, Opened
from runs import with_sections

from pretrain.config import (
    AttentionConfig,
    CheckpointConfig,
    DataConfig,
    ModelConfig,
    MoEConfig,
    OptimizerConfig,
    ParallelConfig,
    Recipe,
    TrackingConfig,
    TrainConfig,
    write_recipe,
)
from pretrain.data.prepare import prepare
from pretrain.data.tokenizers import train_tokenizer


@dataclass(frozen=True)
class TinyCorpus:
    """Paths of what lies in ``folder``; the prefixes are without .bin."""

    folder: Path
    tokenizer: Path
    train: Path
    validation: Path


@pytest.fixture(scope="session")
def tiny_corpus(tmp_path_factory) -> TinyCorpus:
    """The sources of Python's json package, 384 tokens, 4 of them sentinels."""
    folder = tmp_path_factory.mktemp("corpus")
    texts = [path.read_text() for path in sorted((Path(sysconfig.get_path("stdlib")) / "json").glob("*.py"))]
    corpus = TinyCorpus(folder, folder / "tokenizer.model", folder / "train", folder / "validation")
    for prefix, part in ((corpus.train, texts[1:]), (corpus.validation, texts[:1])):
        prefix.with_suffix(".jsonl").write_text("".join(json.dumps({"text": text}) + "\n" for text in part))
    train_tokenizer([corpus.train.with_suffix(".jsonl")], corpus.tokenizer, 384, sentinels=4)
    for prefix in (corpus.train, corpus.validation):
        prepare([prefix.with_suffix(".jsonl")], corpus.tokenizer, prefix, num_workers=1)
    return corpus


@pytest.fixture(scope="session")
def write_tiny_recipe(tiny_corpus):
    """``write_tiny_recipe(path, section={"key": value}, ...)`` writes a tiny recipe with those values."""
    base = Recipe(
        model=ModelConfig(
            num_layers=2,
            hidden_size=32,
            ffn_hidden_size=32,
            sequence_length=16,
            vocab_size=384,
            attention=AttentionConfig(num_heads=2),
            moe=MoEConfig(num_experts=4, jitter=0.1, capacity_factor=1.0),
        ),
        data=DataConfig(
            tokenizer=str(tiny_corpus.tokenizer),
            train=(str(tiny_corpus.train),),
            validation=(str(tiny_corpus.validation),),
        ),
        parallel=ParallelConfig(),
        optimizer=OptimizerConfig(lr=1e-2, min_lr=1e-3, warmup_steps=2),
        train=TrainConfig(steps=4, global_batch=4, micro_batch=2, validation_every=4, validation_sequences=4),
        checkpoint=CheckpointConfig(every=0),
        tracking=TrackingConfig(wandb=False),
    )

    def write(path: Path, **sections) -> Path:
        write_recipe(with_sections(base, **sections), path)
        return path

    return write


@pytest.fixture
def recipe_file(write_tiny_recipe, tmp_path):
    """``recipe_file(section={"key": value}, ...)`` writes it in the test's own folder and returns its path."""
    return partial(write_tiny_recipe, tmp_path / "recipe.toml")


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium; skips where none is installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """``open_page(path or url, **of the browser's context) -> Opened``; at the end nothing was said on the console, and
    no file was asked for but the page itself."""
    opened, contexts = [], []

    def go(where, **options):
        context = browser.new_context(**{"viewport": WIDE, "color_scheme": "light", **options})
        contexts.append(context)
        one = Opened(context.new_page())
        opened.append(one)
        one.goto(where if isinstance(where, str) else where.as_uri())
        return one

    yield go
    for one in opened:
        assert one.said == []
        assert not [url for url in one.asked if not url.startswith(("file://", "http://127.0.0.1:", "blob:"))]
        assert sum(url.startswith("file:") for url in one.asked) <= 1
    for context in contexts:
        context.close()
