"""``python -m bench memory``: bytes per parameter of every optimizer and precision, on two data parallel ranks.

It counts the tensors that persist from step to step on rank 0: weights, gradient buffers, float32 master weights of
16-bit weights, and optimizer state. Activations, and other tensors that exist only within a step, are not counted.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from torch import Tensor

from bench import options, ranks, report
from bench.samples import Tokens
from fmoe.optim.eight_bit import CutMoment
from pretrain.config import load_recipe

OPTIMIZERS = ("adamw", "lamb", "lars", "muon", "sgd", "adafactor", "adamw8bit")
PRECISIONS = ("fp32", "bf16", "fp16")
COLUMNS = ("weights", "gradients", "masters", "state")


def main(argv: Sequence[str]) -> None:
    parser = options.bare_parser("memory", __doc__)
    parser.add_argument("--recipe", default="quickstart", help="recipe whose model is measured")
    parser.add_argument("--optimizers", nargs="+", choices=OPTIMIZERS, default=list(OPTIMIZERS))
    parser.add_argument("--precision", nargs="+", choices=PRECISIONS, default=list(PRECISIONS))
    arguments = parser.parse_args(argv)
    rows = ranks.run(2, _count_all, arguments.recipe, arguments.optimizers, arguments.precision)
    header = ["optimizer", "precision", "`shard`", *COLUMNS, "in all"]
    cells = [header]
    for row in rows:
        figures = [row["bytes"][column] / row["parameters"] for column in COLUMNS]
        shown = [f"{figure:.2f}" for figure in (*figures, sum(figures))]
        cells.append([row["optimizer"], row["precision"], row["shard"], *shown])
    text = "\n".join(report.table(cells))
    arguments.out.mkdir(parents=True, exist_ok=True)
    (arguments.out / "memory.json").write_text(json.dumps(rows, indent=1) + "\n")
    (arguments.out / "memory.md").write_text(text + "\n")
    print(f"{rows[0]['parameters']:,} parameters, 2 data parallel ranks; bytes per parameter on one of them\n\n{text}")


def _count_all(name: str, optimizers: Sequence[str], precisions: Sequence[str]) -> list[dict]:
    recipe = load_recipe(name)
    recipe = replace(
        recipe,
        model=replace(recipe.model, sequence_length=32),
        train=replace(recipe.train, global_batch=2, micro_batch=1),
        parallel=replace(recipe.parallel, expert=1, data=2),
    )
    processes = ranks.start_parallel(recipe)
    from pretrain.engine import Engine

    rows = []
    for optimizer in optimizers:
        for precision in precisions:
            for shard in ("none", "optimizer"):
                loss_scale = 1.0 if precision == "fp16" else None  # a step that overflows creates no state
                own = replace(recipe.optimizer, name=optimizer, loss_scale=loss_scale)
                of_row = replace(
                    recipe,
                    optimizer=own,
                    parallel=replace(recipe.parallel, shard=shard),
                    train=replace(recipe.train, precision=precision),
                )
                of_row.check()
                engine = Engine(of_row, processes)
                engine.train_step(0, Tokens(of_row))  # before it, the optimizer has no state
                of_row_bytes = {column: sum(map(_bytes, tensors)) for column, tensors in tensors_of(engine).items()}
                rows.append(
                    {
                        "optimizer": optimizer,
                        "precision": precision,
                        "shard": shard,
                        "parameters": sum(p.numel() for p in engine.gpt.parameters()),
                        "bytes": of_row_bytes,
                    }
                )
    return rows


def tensors_of(engine) -> dict[str, list[Tensor]]:
    """Return the tensors of an engine that persist from step to step, by `COLUMNS`; the state exists after a step."""
    from megatron_patch.optimizer import optimizers, shards

    held = list(shards(engine.optimizer))
    if engine.recipe.parallel.is_fully_sharded:
        weights = [shard.main for shard in held]  # float32 in every precision, so there are no masters
        gradients = [shard.main.main_grad for shard in held]
        masters = []
    else:
        buffers = [buffer for chunk in engine.model for buffer in (*chunk.buffers, *chunk.expert_parallel_buffers)]
        weights = list(engine.gpt.parameters())
        gradients = [buffer.grad_data for buffer in buffers]
        masters = [shard.main for shard in held if shard.has_master]
    states = [state for part in optimizers(engine.optimizer) for state in part.optimizer.state.values()]
    return {
        "weights": weights,
        "gradients": gradients,
        "masters": masters,
        "state": [tensor for state in states for value in state.values() for tensor in _plain(value)],
    }


def _plain(value: Any) -> Iterator[Tensor]:
    """Yield the plain tensors of which a tensor consists, such as codes, scales and map of an 8-bit tensor."""
    if isinstance(value, CutMoment):
        yield from (value.head, value.tail, *_plain(value.blocks))
    elif hasattr(value, "codes"):
        yield from (value.codes, value.scale, value.qmap)
    else:
        yield value


def _bytes(tensor: Tensor) -> int:
    return tensor.numel() * tensor.element_size()
