"""The wheel: it has every file of the packages, and works where there is no checkout."""

import os
import shutil
import subprocess
import sys
import sysconfig
import venv
import zipfile
from pathlib import Path

import pytest

import fmoe

ROOT = Path(__file__).parent.parent
PACKAGES = ("fmoe", "megatron_patch", "pretrain")
LAYER = """
import torch, fmoe
layer = fmoe.FMoETransformerMLP(num_expert=4, d_model=8, d_hidden=16)
layer(torch.ones(3, 8)).sum().backward()
print(fmoe.__file__)
"""


def run(*argv, folder, **options):
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("PYTHON", "PYTEST"))}
    done = subprocess.run(argv, cwd=folder, env=environment, capture_output=True, text=True, timeout=300, **options)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    """The wheel of this checkout, built from a copy, so that the checkout gets no build folder."""
    pytest.importorskip("pip")
    if "FMOE_DIST" in os.environ:  # .ci/release has built it
        (path,) = Path(os.environ["FMOE_DIST"]).glob("*.whl")
        return path
    source, out = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, source)
    for name in PACKAGES:
        shutil.copytree(ROOT / name, source / name, ignore=shutil.ignore_patterns("__pycache__"))
    arguments = ("wheel", "--quiet", "--no-deps", "--no-build-isolation", "--no-index", "--wheel-dir", out, ".")
    run(sys.executable, "-m", "pip", *arguments, folder=source)
    (path,) = out.iterdir()
    return path


def test_every_file_of_the_packages_and_no_other(wheel):
    assert wheel.name == f"fmoe-{fmoe.__version__}-py3-none-any.whl"
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    walks = [os.walk(ROOT / name, followlinks=True) for name in PACKAGES]  # cuda/ is a link
    files = {Path(folder, name).relative_to(ROOT) for walk in walks for folder, _, names in walk for name in names}
    assert packed == {str(path) for path in files if path.suffix != ".pyc"}


@pytest.mark.slow  # .ci/run and the workflow of GitHub run it too
def test_layer_commands_and_quickstart_without_the_checkout(wheel, tmp_path):
    home, folder = tmp_path / "venv", tmp_path / "empty"
    folder.mkdir()
    venv.create(home)
    # Dependencies come from this environment: as a folder of modules, whose own editable install is not followed.
    site = Path(sysconfig.get_path("purelib", vars={"base": str(home), "platbase": str(home)}))
    (site / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    python = home / "bin" / "python"
    install = ("-m", "pip", "--python", python, "install", "--quiet", "--no-deps", "--no-index", wheel)
    run(sys.executable, *install, folder=folder)
    assert Path(run(python, "-c", LAYER, folder=folder).strip()).is_relative_to(home)
    assert "train" in run(home / "bin" / "fmoe", "--help", folder=folder)
    assert "quickstart" in run(home / "bin" / "fmoe", "train", "quickstart", "--dry-run", folder=folder)
    assert not list(folder.iterdir())
    run(home / "bin" / "fmoe", "data", "example", folder=folder)
    options = "--parallel.expert 1 --train.steps 1 --optimizer.warmup-steps 0 --train.validation-sequences 8"
    said = run(home / "bin" / "fmoe", "train", "quickstart", *options.split(), "--tracking.no-wandb", folder=folder)
    assert "finished at step 1" in said and (folder / "runs" / "quickstart" / "report.html").is_file()


def test_citation_names_the_version_of_the_package():
    assert f"\nversion: {fmoe.__version__}\n" in (ROOT / "CITATION.cff").read_text()
