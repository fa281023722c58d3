"""``fmoe info``: installed packages, devices and backends, or the experts of a model of transformers."""

import platform
from collections import Counter
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from typing import Any

import torch

import fmoe
from fmoe.cli import Parser, commands
from fmoe.convert import find_experts, fmoefy
from fmoe.errors import UserError, one_line, require
from fmoe.kernels import compilation
from fmoe.kernels.native import loader as native
from fmoe.packaging import entries, extras

_REPORTED = ("pretrain", "tensorboard")  # extras whose packages the report lists


def lines() -> list[str]:
    """Return the lines that ``fmoe info`` prints."""
    report = [f"fmoe {fmoe.__version__}, torch {torch.__version__}, Python {platform.python_version()}"]
    if torch.cuda.is_available():
        names = [torch.cuda.get_device_name(i) for i in range(torch.cuda.device_count())]
        report.append(f"devices: {', '.join(names)} (nccl)")
    else:
        report.append(f"devices: cpu, {torch.get_num_threads()} threads (gloo)")
    report.append(f"native: {native.describe()}")
    report.append(f"cuda: {compilation.describe()}")
    for extra, packages in extras().items():
        if extra not in _REPORTED:
            continue
        versions = {package: _version(package) for package in packages}
        installed = [f"{package} {number}" for package, number in versions.items() if number]
        missing = [package for package, number in versions.items() if number is None]
        if installed:
            report.append(f"{extra}: {', '.join(installed)}")
        if missing:
            report.append(f"{extra}: missing {', '.join(missing)}: pip install 'fmoe[{extra}]'")
    report.append(f"commands: {', '.join(commands())}")
    report.append(f"converters: {', '.join(sorted(entry.name for entry in entries('fmoe.converters')))}")
    return report


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def experts_of(name: str) -> str:
    """Return a line with the experts of a model that `fmoe.fmoefy` would convert. The model's weights are not loaded.

    Args:
        name: folder or Hugging Face id of a model of transformers.

    Raises:
        UserError: the folder or the id has no model that transformers knows, or its experts cannot be converted.
    """
    transformers: Any = require("transformers", "interop", "fmoe info MODEL")
    try:
        config = transformers.AutoConfig.from_pretrained(name)
        kind = getattr(transformers, (config.architectures or ["AutoModel"])[0])
        with torch.device("meta"):
            model = kind._from_config(config) if config.architectures else kind.from_config(config)
    except (OSError, ValueError, AttributeError) as error:
        raise UserError(f"MODEL={name!r} is not a model of transformers: {one_line(error, 200)}") from None
    layers: Counter[str] = Counter()
    for path, _, block in find_experts(model):
        parent = model.get_submodule(path.rpartition(".")[0])
        top_k = next((module.top_k for module in parent.modules() if hasattr(module, "top_k")), None)
        of_layer = f"{block.num_experts} experts ({type(block.module).__name__}"
        layers[of_layer + (")" if top_k is None else f", top {top_k})")] += 1
    fmoefy(model)  # raises an error if the experts cannot be converted
    counted = [f"{count} layer{'s' * (count > 1)} of {text}" for text, count in layers.items()]
    return f"{type(model).__name__}: {', '.join(counted)}"


def main(argv: Sequence[str]) -> int:
    """Print the installed and missing packages, devices and backends; or the experts of a model."""
    parser = Parser(
        prog="fmoe info",
        description="List installed and missing packages, devices and backends; paste the output into bug reports.",
    )
    parser.add_argument("model", nargs="?", metavar="MODEL", help="folder or id of a Hugging Face model: its experts")
    model = parser.parse_args(argv).model
    try:
        print("\n".join(lines() if model is None else [experts_of(model)]))
    except UserError as error:
        parser.error(str(error))
    return 0
