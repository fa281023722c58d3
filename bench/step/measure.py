"""Measurements of a row's contenders: whole steps, the regions of a step, and the blocks of experts alone."""

import functools
import random
import statistics
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench import frame, ranks, report
from bench.layer.rows import speedup
from bench.step.contenders import MEGATRON, NATIVE, TORCH, Contenders
from bench.step.goals import Comparison
from bench.step.marks import blocks, marks_of
from bench.step.regions import BLOCK, REGIONS, Regions

Looks = Mapping[str, Mapping[str, float]]  # by contender, by region: seconds of a step


def steps(contenders: Contenders, label: str, arguments, clock: Callable[[], float]) -> frame.Measurement:
    """Time whole steps."""
    recipe = contenders.recipe
    tokens = recipe.train.global_batch * recipe.model.sequence_length
    return _measure(contenders, contenders.step, tokens, label, arguments, clock)


def _measure(contenders: Contenders, setup, tokens: int, label: str, arguments, clock) -> frame.Measurement:
    is_together = dist.get_world_size() > 1
    result = frame.measure(
        [frame.Contender(name, functools.partial(setup, name), work=tokens) for name in contenders.names],
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        reference=MEGATRON,
        seed=arguments.seed,
        label=label,
        unit="tokens",
        clock=clock,
        sync=torch.cuda.synchronize if contenders.device.type == "cuda" else None,
        line_up=dist.barrier if is_together else None,
        agree=ranks.slowest if is_together else None,
    )
    if result.failures and is_together:  # on this rank: the others cannot go on without it
        raise RuntimeError(f"{label}: {result.failures}")
    return result


def regions(contenders: Contenders, arguments, clock: Callable[[], float]) -> Looks:
    """Return the seconds of each region: medians over ``--looks`` steps of each contender, in shuffled order."""
    order = random.Random(arguments.seed)
    looks: dict[str, list[Mapping[str, float]]] = {name: [] for name in contenders.names}
    for _ in range(max(arguments.looks, 1)):
        for name in order.sample(contenders.names, len(contenders.names)):
            engine = contenders.engine(name)
            step = contenders.step(name)
            with Regions(marks_of(engine), (engine.model[0], "forward"), clock) as found:
                step()
            looks[name].append(found.seconds)
    return {
        name: {region: statistics.median(look.get(region, 0.0) for look in of_name) for region in REGIONS}
        for name, of_name in looks.items()
    }


def facts(looks: Looks) -> dict[str, dict[str, str]]:
    """Return, by contender, the regions' times and the block's share, as columns of the report."""
    found = {}
    for name, seconds in looks.items():
        found[name] = {
            region: "in experts" if name == NATIVE and region in ("dispatch", "combine") else report.duration(second)
            for region, second in seconds.items()
        }
        found[name]["block"] = f"{share(seconds):.1%}"
    return found


def share(seconds: Mapping[str, float]) -> float:
    """Return the share of the block of experts in a step."""
    return sum(seconds[region] for region in BLOCK) / sum(seconds.values())


def blocks_alone(contenders: Contenders, label: str, arguments, clock: Callable[[], float]) -> frame.Measurement:
    """Time forward and backward of all blocks, one by one, on their inputs in a step's first micro batch."""
    recipe = contenders.recipe
    tokens = recipe.train.micro_batch * recipe.model.sequence_length * len(recipe.model.layers_with_experts)

    def setup(name: str) -> Callable[[], None]:
        engine = contenders.engine(name)
        inputs = _inputs(engine, contenders.step(name))
        gradient = torch.randn_like(inputs[0]) * 1e-3

        def run() -> None:
            for block, x in zip(blocks(contenders.engine(name)), inputs, strict=True):
                out, _ = block(x.detach().requires_grad_())
                out.backward(gradient)

        return run

    return _measure(contenders, setup, tokens, label, arguments, clock)


def _inputs(engine: Any, step: Callable[[], object]) -> list[Tensor]:
    """Return the hidden states that each block gets in a step's first micro batch."""
    found: dict[Any, Tensor] = {}

    def keep(block, args, kwargs) -> None:
        found.setdefault(block, (args[0] if args else kwargs["hidden_states"]).detach())

    hooks = [block.register_forward_pre_hook(keep, with_kwargs=True) for block in blocks(engine)]
    step()
    for hook in hooks:
        hook.remove()
    return [found[block] for block in blocks(engine)]


def comparisons(timed: frame.Measurement, alone: frame.Measurement, looks: Looks) -> Iterator[Comparison]:
    """Return the comparisons of our native layer with the others, if it was measured."""
    for other in (TORCH, MEGATRON):
        of_step = speedup(timed, NATIVE, other)
        of_block = speedup(alone, NATIVE, other)
        if of_step is not None and of_block is not None:
            yield Comparison(timed.label, NATIVE, other, share(looks[other]), of_block, of_step)
