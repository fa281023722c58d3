"""Newest tested versions: bounds of the extras, and one line where a newer version is installed."""

import re
import tomllib
from pathlib import Path

import pytest
from torch import nn

import fmoe
from fmoe.runtime import versions

PROJECT = Path(__file__).parents[2] / "pyproject.toml"


@pytest.mark.parametrize("package", versions.TESTED)
def test_extras_have_the_tested_version_as_upper_bound(package):
    extras = tomllib.loads(PROJECT.read_text())["project"]["optional-dependencies"]
    found = [entry for extra in extras.values() for entry in extra if re.match(rf"{package}\W", entry)]
    major, minor = versions.TESTED[package]
    assert found
    assert all(entry.endswith(f",<{major}.{minor + 1}") for entry in found)


@pytest.mark.parametrize(("installed", "lines"), [("5.24.9", 0), ("5.25.0.dev0", 1), ("6.0", 1), ("4.57", 0)])
def test_a_newer_version_is_one_warning(monkeypatch, caplog, installed, lines):
    monkeypatch.setattr(versions, "version", lambda package: installed)
    versions.warn_untested.cache_clear()
    model = type("Model", (nn.TransformerEncoder,), {"__module__": "transformers.models.made_up"})
    for seed in range(2):
        encoder = model(nn.TransformerEncoderLayer(8, 2, 16, batch_first=True), 1)
        fmoe.fmoefy(encoder, num_experts=2, seed=seed)
    warnings = [record.getMessage() for record in caplog.records if "transformers" in record.getMessage()]
    assert len(warnings) == lines
    assert all(installed in text and "5.24" in text for text in warnings)
    versions.warn_untested.cache_clear()
