"""``fmoe train RECIPE``: starts as many processes as the recipe's splits need, here, and trains."""

import os
import sys
from collections.abc import Sequence
from pathlib import Path

from pretrain import process, supervise
from pretrain.__main__ import main as train
from pretrain.__main__ import parse
from pretrain.config import Recipe, load_recipe


def main(argv: Sequence[str]) -> int:
    """Checks the recipe and its inputs, then runs torchrun, or trains in this process if one is enough."""
    arguments, overrides = parse(argv, "fmoe train")
    recipe = load_recipe(arguments.recipe, overrides, f"fmoe train {arguments.recipe}")
    if process.world_size() > 1 or recipe.parallel.world_size == 1:
        return train(argv)
    if check(recipe, arguments.resume, arguments.fallback):
        return 0
    size = recipe.parallel.world_size
    environment = dict(os.environ)
    # Threads of all processes together are the machine's cores.
    environment.setdefault("OMP_NUM_THREADS", str(max(1, len(os.sched_getaffinity(0)) // size)))
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr", "127.0.0.1"]
    command += ["--nproc-per-node", str(size), "-m", "pretrain", *argv]
    sys.stdout.flush()
    return supervise.run(command, environment)


def check(recipe: Recipe, resume: str | None, fallback: bool = False) -> bool:
    """Meets every wrong input that can be met before processes are started, where it is one line and exit code 2.

    Returns:
        Whether the run is finished already, which it then says.
    """
    from pretrain import session  # here, because it imports megatron-core

    inputs = session.open_inputs(recipe)
    checkpoint = session.find_checkpoint(Path(recipe.run.folder), resume, fallback=fallback)
    if checkpoint is None:
        session.open_weights(recipe)
    if not session.is_finished(recipe, inputs, checkpoint) or fallback:
        return False
    session.summarize(recipe)
    return True
