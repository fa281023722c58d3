"""Small real text and a tokenizer trained on it, once a session."""

import json
import sysconfig
from pathlib import Path

import pytest

from pretrain.data.tokenizers import Tokenizer, train_tokenizer


@pytest.fixture(scope="session")
def texts() -> list[str]:
    """Python sources, a few hundred kilobytes, some with letters beyond ASCII."""
    library = Path(sysconfig.get_path("stdlib"))
    names = [*sorted(library.glob("json/*.py")), *sorted(library.glob("email/*.py")), library / "argparse.py"]
    return [path.read_text(encoding="utf-8") for path in names] + ["grüße, 世界\n" * 40]


@pytest.fixture(scope="session")
def jsonl(texts: list[str], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The texts as JSON lines."""
    path = tmp_path_factory.mktemp("text") / "text.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in texts))
    return path


@pytest.fixture(scope="session")
def tokenizer(jsonl: Path) -> Tokenizer:
    """512 pieces, 8 of them sentinels."""
    return train_tokenizer([jsonl], jsonl.with_name("tokenizer.model"), vocab_size=512)
