"""``python -m bench recompute``: memory saved by recomputation and by encoded activations, and their cost in time.

The quickstart model, in one process. Kept is the memory that autograd holds at the end of the forward pass of one micro
batch for its backward pass, without parameters; each memory block counts once. The time is that of the forward and
backward passes of a whole step, without the optimizer.

The largest micro batch is the largest for which autograd holds at most ``--budget-mb`` at any moment of both passes:
tensors that the backward pass recomputes count, and tensors that it has consumed do not. A line through the peaks of
two small micro batches gives a first guess; its neighbors are run until one fits and the next does not.
"""

import contextlib
import functools
import math
import os
import warnings
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn
from torch.autograd.graph import saved_tensors_hooks

from bench import frame, options, report
from bench.samples import Tokens
from fmoe.errors import UserError
from pretrain.config import Recipe, load_recipe
from pretrain.start import process

MODES = ("none", "selective", "full")
ENCODINGS = ("mask", "int8", "offload")  # of `train.activations`, without recomputation


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


class Held(saved_tensors_hooks):
    """Context that counts the bytes that autograd holds at each moment, without the model's parameters.

    Attributes:
        peak: the largest number of bytes so far.
    """

    def __init__(self, model: nn.Module):
        self._own = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self._uses: Counter[int] = Counter()
        self._now = self.peak = 0
        super().__init__(functools.partial(_Saved, self), lambda saved: saved.x)

    def add(self, storage: torch.UntypedStorage, uses: int) -> None:
        """Count one use more or less of a storage."""
        pointer = storage.data_ptr()
        if pointer in self._own:
            return
        before = self._uses[pointer]
        self._uses[pointer] += uses
        self._now += storage.nbytes() * ((before + uses > 0) - (before > 0))
        self.peak = max(self.peak, self._now)


class _Saved:
    """A tensor that autograd holds; it is dropped with the part of the graph that needs it."""

    def __init__(self, held: Held, x: Tensor):
        self.x = x
        self._held = held
        held.add(x.untyped_storage(), 1)

    def __del__(self) -> None:
        self._held.add(self.x.untyped_storage(), -1)


def largest(peak: Callable[[int], float], budget: float) -> int:
    """Return the largest whole number whose peak is at most the budget; 0 if the peak of 1 exceeds it.

    Args:
        peak: function that grows with its argument, about linearly.
    """
    peak = functools.cache(peak)
    if peak(1) > budget:
        return 0
    slope = (peak(3) - peak(1)) / 2
    guess = max(1, int(1 + (budget - peak(1)) / slope))
    while peak(guess) > budget:
        guess -= 1
    while peak(guess + 1) <= budget:
        guess += 1
    return guess


def main(argv: Sequence[str]) -> None:
    parser = options.parser("recompute", __doc__, rounds=10, warmup=2)
    parser.add_argument("--recipe", default="quickstart", help="recipe whose model and batch are measured")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument(
        "--budget-mb", type=float, default=256.0, help="most MB held by autograd, for the largest micro batch"
    )
    parser.add_argument("--threads", type=int, default=len(os.sched_getaffinity(0)))
    options.add_clock(parser)
    arguments = parser.parse_args(argv)
    options.clock(arguments.clock, arguments.threads)  # raises for --clock cpu with several threads
    options.at_least(arguments, threads=1, rounds=2, warmup=0)
    if not 0 < arguments.budget_mb < math.inf:
        raise UserError(f"--budget-mb={arguments.budget_mb:g} must be finite and above 0")
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
    torch.set_num_threads(arguments.threads)
    recipe = replace(recipe, parallel=replace(recipe.parallel, expert=1, data=1))
    init_parallel(recipe)
    tokens = recipe.train.global_batch * recipe.model.sequence_length
    rows = []
    for precision in arguments.precision:
        found: dict[str, tuple[int, int]] = {}
        passes = functools.partial(_passes, recipe, processes, precision, 1e6 * arguments.budget_mb, found)
        row = frame.measure(
            [frame.Contender(mode, passes(mode), work=tokens) for mode in (*MODES, *ENCODINGS)],
            rounds=arguments.rounds,
            warmup=arguments.warmup,
            reference="none",
            seed=arguments.seed,
            label=precision if arguments.clock == "wall" else f"{precision}, processor seconds",
            unit="tokens",
            clock=options.CLOCKS[arguments.clock],
        )
        of_micro_batch = recipe.train.micro_batch * recipe.model.sequence_length
        for mode, (kept, fits) in found.items():
            none_kept, none_fits = found["none"]
            row.facts[mode] = {
                "kept, MB": f"{kept / 1e6:.1f}",
                "kept, bytes per token": f"{kept / of_micro_batch:,.0f}",
                "share of none": f"{kept / none_kept:.1%}",
                f"largest micro batch in {arguments.budget_mb:g} MB": f"{fits}",
                "ratio to none": f"{fits / none_fits:.2f}" if none_fits else "",
            }
        rows.append(row)
    return rows


def _passes(
    recipe: Recipe, processes, precision: str, budget: float, found: dict[str, tuple[int, int]], mode: str
) -> Callable:
    """Return the setup of a contender, which adds its bytes kept and its largest micro batch to ``found``."""
    from pretrain.engine import Engine

    recipe = replace(
        recipe,
        parallel=replace(recipe.parallel, recompute=mode if mode in MODES else "none"),
        train=replace(recipe.train, precision=precision, activations=mode if mode in ENCODINGS else "full"),
    )

    def setup():
        engine = Engine(recipe, processes)
        samples = Tokens(recipe)
        found[mode] = kept_bytes(engine, samples), largest(functools.partial(peak_bytes, engine, samples), budget)

        def run() -> None:
            engine.backward(0, samples)
            engine.routing()

        return run

    return setup


def kept_bytes(engine, samples) -> int:
    """Return the bytes that autograd holds for the first micro batch on this rank at the end of its forward pass."""
    if engine.activations is not None:
        return peak_bytes(engine, samples, engine.recipe.train.micro_batch)
    counter = Kept(engine.gpt)
    hooks = [
        engine.gpt.register_forward_pre_hook(lambda *_: counter.__enter__()),
        engine.gpt.register_forward_hook(lambda *_: counter.__exit__(None, None, None)),
    ]
    engine.accumulate(samples, 0, engine.recipe.train.micro_batch * engine.data_group.size(), 0)
    for hook in hooks:
        hook.remove()
    return counter.bytes


def peak_bytes(engine, samples, micro_batch: int) -> int:
    """Return the most bytes that autograd holds at once, in the passes of one micro batch of this size per rank."""
    recipe = engine.recipe
    count = micro_batch * engine.data_group.size()
    engine.recipe = replace(recipe, train=replace(recipe.train, micro_batch=micro_batch, global_batch=count))
    held = engine.activations or Held(engine.gpt)
    held.peak = 0
    try:
        with held if engine.activations is None else contextlib.nullcontext():
            engine.accumulate(samples, 0, count, 0)
    finally:
        engine.recipe = recipe
    return held.peak
