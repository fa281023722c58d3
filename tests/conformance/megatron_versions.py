"""Compares versions of megatron-core: ``python tests/conformance/megatron_versions.py FOLDER...``. Not a test.

Each folder has one version: ``pip install --no-deps --ignore-requires-python --target FOLDER megatron-core==0.19.2``.
Each version imports every module of our packages, then trains every model of `megatron_splits` for five steps in one
process of its own. The first folder is the reference for losses, gradient norms, routing statistics, gradients, final
parameters and optimizer state. Exits with 1 if any bit differs.
"""

import importlib
import os
import pkgutil
import subprocess
import sys
import tempfile
from pathlib import Path

import torch
import torch.distributed as dist

HERE = Path(__file__).resolve().parent
sys.path[:0] = [str(HERE), str(HERE.parent), str(HERE.parent.parent)]

import megatron_splits as splits  # noqa: E402

STEPS = 5


def train(file: str) -> None:
    """Train all models with the megatron-core of this process; write its version, and model -> what was seen."""
    import megatron_patch
    import pretrain

    for package in (megatron_patch, pretrain):
        for module in pkgutil.walk_packages(package.__path__, f"{package.__name__}."):
            if not module.name.endswith("__main__"):
                importlib.import_module(module.name)
    torch.set_num_threads(1)
    dist.init_process_group(store=dist.HashStore(), rank=0, world_size=1)
    from megatron_patch import versions
    from pretrain.engine import stop_parallel

    seen = {}
    for model in splits.BUILDERS:
        seen[model] = vars(splits.train(splits.recipe_of(model), model, STEPS))
        stop_parallel()
    torch.save((versions.check(), seen), file)


def run(site: str) -> tuple[str, dict]:
    """`train` in a process of its own, with megatron-core from a folder."""
    path = [site, *filter(None, [os.environ.get("PYTHONPATH")])]
    environment = os.environ | {"PYTHONPATH": os.pathsep.join(path), "CUDA_VISIBLE_DEVICES": ""}
    with tempfile.TemporaryDirectory() as folder:
        file = f"{folder}/seen"
        subprocess.run([sys.executable, __file__, "--train", file], env=environment, check=True)
        version, seen = torch.load(file)
    return version, {model: splits.Seen(**parts) for model, parts in seen.items()}


def main(sites: list[str]) -> int:
    found = [run(os.path.abspath(site)) for site in sites]
    reference = found[0][1]
    worst = 0.0
    losses = " | ".join(f"loss {step + 1}" for step in range(STEPS))
    print(f"| model | megatron-core | {losses} | largest relative difference |\n|---|---|{'---|' * STEPS}---|")
    for model in reference:
        for version, seen in found:
            of_each = splits.errors(reference[model], [seen[model]])
            name = max(of_each, key=lambda name: of_each[name])
            worst = max(worst, of_each[name])
            difference = f"{of_each[name]:.1e} ({name})" if of_each[name] else f"none of {len(of_each)} values"
            cells = " | ".join(f"{seen[model].figures[f'loss {step}']:.8f}" for step in range(STEPS))
            print(f"| {model} | {version} | {cells} | {difference} |")
    return int(worst > 0)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--train"]:
        sys.exit(train(sys.argv[2]))
    sys.exit(main(sys.argv[1:]) if sys.argv[1:] else __doc__)
