"""``python -m bench recompute``: memory saved by recomputation, and its cost in time.

The quickstart model, in one process. Kept is the memory that autograd holds at the end of the forward pass of one micro
batch for its backward pass, without parameters; each memory block counts once. The time is that of the forward and
backward passes of a whole step, without the optimizer.
"""

import os
import warnings
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bench import frame, options, report
from bench.samples import Tokens
from pretrain import process
from pretrain.config import Recipe, load_recipe

MODES = ("none", "selective", "full")


class Kept(saved_tensors_hooks):
    """Context that counts the bytes that autograd saves in the model's forward pass, without parameters."""

    def __init__(self, model: nn.Module):
        self._own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._storages: dict[int, int] = {}
        super().__init__(self._note, lambda x: x)

    def _note(self, x: Tensor) -> Tensor:
        storage = x.untyped_storage()
        if storage.data_ptr() not in self._own:
            self._storages[storage.data_ptr()] = storage.nbytes()
        return x

    @property
    def bytes(self) -> int:
        return sum(self._storages.values())


def main(argv: Sequence[str]) -> None:
    parser = options.parser("recompute", __doc__, rounds=10, warmup=2)
    parser.add_argument("--recipe", default="quickstart", help="recipe whose model and batch are measured")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    arguments = parser.parse_args(argv)
    processes = process.start()
    try:
        rows = measure(load_recipe(arguments.recipe), processes, arguments)
    finally:
        process.stop()
    report.write(rows, arguments.out, "recompute")


def measure(recipe: Recipe, processes: process.Processes, arguments) -> list[frame.Measurement]:
    """Measure a row for each precision."""
    from megatron_patch import cpu
    from pretrain.engine import init_parallel

    cpu.install()
    warnings.filterwarnings("ignore", module="megatron")
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    recipe = replace(recipe, parallel=replace(recipe.parallel, expert=1, data=1))
    init_parallel(recipe, processes)
    tokens = recipe.train.global_batch * recipe.model.sequence_length
    rows = []
    for precision in arguments.precision:
        kept: dict[str, int] = {}
        row = frame.measure(
            [frame.Contender(mode, _passes(recipe, processes, mode, precision, kept), work=tokens) for mode in MODES],
            rounds=arguments.rounds,
            warmup=arguments.warmup,
            reference="none",
            seed=arguments.seed,
            label=precision,
            unit="tokens",
        )
        of_micro_batch = recipe.train.micro_batch * recipe.model.sequence_length
        for mode, num_bytes in kept.items():
            row.facts[mode] = {
                "kept, MB": f"{num_bytes / 1e6:.1f}",
                "kept, bytes per token": f"{num_bytes / of_micro_batch:,.0f}",
                "of none's": f"{num_bytes / kept['none']:.1%}",
            }
        rows.append(row)
    return rows


def _passes(recipe: Recipe, processes, mode: str, precision: str, kept: dict[str, int]) -> Callable:
    from pretrain.engine import Engine

    recipe = replace(
        recipe,
        parallel=replace(recipe.parallel, recompute=mode),
        train=replace(recipe.train, precision=precision),
    )

    def setup():
        engine = Engine(recipe, processes)
        samples = Tokens(recipe)
        kept[mode] = kept_bytes(engine, samples)

        def run() -> None:
            engine.backward(0, samples)
            engine.routing()

        return run

    return setup


def kept_bytes(engine, samples) -> int:
    """Return the bytes that autograd holds for the first micro batch on this rank at the end of its forward pass."""
    counter = Kept(engine.gpt)
    hooks = [
        engine.gpt.register_forward_pre_hook(lambda *_: counter.__enter__()),
        engine.gpt.register_forward_hook(lambda *_: counter.__exit__(None, None, None)),
    ]
    engine.accumulate(samples, 0, engine.recipe.train.micro_batch * engine.data_group.size(), 0)
    for hook in hooks:
        hook.remove()
    return counter.bytes
