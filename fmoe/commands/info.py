"""``fmoe info``: installed packages, devices and backends."""

import platform
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version

import torch

import fmoe
from fmoe.cli import Parser, commands
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
        found = {package: _version(package) for package in packages}
        missing = [package for package, number in found.items() if number is None]
        if there := [f"{package} {number}" for package, number in found.items() if number]:
            report.append(f"{extra}: {', '.join(there)}")
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


def main(argv: Sequence[str]) -> int:
    """Print the installed and missing packages, devices and backends."""
    Parser(
        prog="fmoe info",
        description="List installed and missing packages, devices and backends; paste the output into bug reports.",
    ).parse_args(argv)
    print("\n".join(lines()))
    return 0
