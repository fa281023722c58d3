"""``python -m bench zero``: bytes that a rank holds and sends by stage of ZeRO (arXiv 1910.02054), against formulas.

Data parallel ranks train a small GPT with experts by the trainer's engine, at each stage of ``parallel.shard``. Stage 2
gathers weights once in a step, stage 3 twice. All figures are in bytes per parameter on rank 0, after AdamW's first
step; the bytes sent are those of the second step, as a ring sends them. The exit code is 1 if a figure is further than
``--tolerance`` from its formula, N being the number of ranks and f = (N - 1) / N.
"""

import itertools
import warnings
from collections.abc import Iterable, Sequence

import torch.distributed as dist
from torch import Tensor

from bench import options, ranks, report
from bench.samples import Tokens
from bench.traffic import Traffic
from fmoe.errors import UserError

STAGES = ("none", "optimizer", "gradients", "parameters")
# Bytes per parameter: held from step to step, also gathered in a step (None: one block at a time), and sent / f.
# Gradients are float32 in both precisions, which adds 2 to the 16 bytes of the paper.
FORMULAS = {
    ("fp32", 0): ("16", "0", "8"),
    ("fp32", 1): ("8 + 8 / N", "0", "8"),
    ("fp32", 2): ("16 / N", "4", "8"),
    ("fp32", 3): ("16 / N", None, "12"),
    ("bf16", 0): ("18", "0", "8"),
    ("bf16", 1): ("6 + 12 / N", "0", "6"),
    ("bf16", 2): ("16 / N", "2", "6"),
    ("bf16", 3): ("16 / N", None, "8"),
}
# From the paper, figure 1 and section 7: bytes held with 16-bit weights and gradients, and elements sent per parameter.
PAPER = {0: ("16", "2"), 1: ("4 + 12 / N", "2"), 2: ("2 + 14 / N", "2"), 3: ("16 / N", "3")}


def main(argv: Sequence[str]) -> int:
    parser = options.bare_parser("zero", __doc__)
    parser.add_argument("--ranks", type=int, nargs="+", default=[2, 4], help="numbers of data parallel ranks")
    parser.add_argument("--precision", nargs="+", choices=("fp32", "bf16"), default=["fp32", "bf16"])
    parser.add_argument("--width", type=int, default=128, help="width of the models, a multiple of 64")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--tolerance", type=float, default=0.02, help="largest relative deviation from a formula")
    arguments = parser.parse_args(argv)
    options.at_least(arguments, ranks=2, width=64, layers=1)
    if arguments.width % 64:
        raise UserError(f"--width={arguments.width} must be a multiple of 64")
    rows = []
    for size in arguments.ranks:
        rows += ranks.run(size, count_all, arguments.precision, arguments.width, arguments.layers)
    text, is_met = table(rows, arguments.tolerance)
    report.write_rows(rows, text, arguments.out, "zero")
    return 0 if is_met else 1


def count_all(precisions: Sequence[str], width: int, layers: int) -> list[dict]:
    """Return a row for each precision and stage, on every rank."""
    for module in ("megatron", "torch"):
        warnings.filterwarnings("ignore", module=module)
    rows = []
    for precision in precisions:
        for stage in range(len(STAGES)):
            found = _count(stage, precision, width, layers)
            rows.append({"ranks": dist.get_world_size(), "precision": precision, "stage": stage} | found)
    return rows


def _count(stage: int, precision: str, width: int, layers: int) -> dict:
    """Count the bytes of the trainer's engine at a stage."""
    from bench.studies.memory import tensors_of
    from pretrain.config import (
        AttentionConfig,
        ModelConfig,
        MoEConfig,
        ParallelConfig,
        Recipe,
        TrainConfig,
    )

    size = dist.get_world_size()
    model = ModelConfig(
        num_layers=layers,
        hidden_size=width,
        ffn_hidden_size=2 * width,
        sequence_length=32,
        vocab_size=64,  # the embedding is gathered once in a step at all stages, which the formulas leave out
        attention=AttentionConfig(num_heads=4),
        moe=MoEConfig(num_experts=4, top_k=2, gate="naive"),
    )
    recipe = Recipe(
        model=model,
        parallel=ParallelConfig(data=size, shard=STAGES[stage]),
        train=TrainConfig(micro_batch=1, global_batch=size, precision=precision),
    )
    recipe.check()
    processes = ranks.start_parallel(recipe)
    from torch.distributed.tensor import DTensor

    from megatron_patch import MegatronMoE
    from pretrain.engine import Engine, stop_parallel
    from pretrain.engine.model import build_model

    gathered = [0]

    def build(*arguments, **keywords):
        chunk = build_model(*arguments, **keywords)
        for layer in chunk.modules():
            if isinstance(layer, MegatronMoE) and recipe.parallel.is_fully_sharded:
                # Runs before the hook that frees the gathered parameters.
                layer.experts.register_forward_hook(
                    lambda *_: gathered.append(_bytes(p for p in chunk.parameters() if not isinstance(p, DTensor)))
                )
        return chunk

    engine = Engine(recipe, processes, build)
    count = recipe.num_params()
    samples = Tokens(recipe)
    engine.train_step(0, samples)
    with Traffic() as traffic:
        engine.train_step(1, samples)
    held = _bytes(itertools.chain.from_iterable(tensors_of(engine).values()))
    stop_parallel()
    return {"parameters": count, "held": held, "gathered": max(gathered), "sent": traffic.sent}


def _bytes(tensors: Iterable[Tensor]) -> int:
    """Return the bytes of tensors, without scalars, which are counters of steps."""
    return sum(tensor.nbytes for tensor in tensors if tensor.dim())


def table(rows: Sequence[dict], tolerance: float) -> tuple[str, bool]:
    """Return Markdown, and whether all figures are within the tolerance of their formulas."""
    header = ["stage", "precision", "N", "held", "formula", "paper", "gathered", "formula", "sent", "formula"]
    cells = [[*header, "paper, elements"]]
    worst = 0.0
    for row in rows:
        ranks_ = row["ranks"]
        count = row["parameters"]
        formulas = FORMULAS[row["precision"], row["stage"]]
        shown = []
        for name, formula in zip(("held", "gathered", "sent"), formulas, strict=True):
            value = row[name] / count
            shown.append(f"{value:.2f}")
            shown.append("a block's" if formula is None else formula + (" x f" if name == "sent" else ""))
            if formula is not None:
                expected = _value(formula, ranks_) * (1 - 1 / ranks_ if name == "sent" else 1)
                worst = max(worst, abs(value - expected) / (expected or 1))
        held, sent = PAPER[row["stage"]]
        shown.insert(2, f"{held} = {_value(held, ranks_):.2f}")
        cells.append([f"{row['stage']}: {STAGES[row['stage']]}", row["precision"], str(ranks_), *shown, sent])
    is_met = worst <= tolerance
    counts = sorted({row["parameters"] for row in rows})
    lines = [
        f"Bytes per parameter of models with {' and '.join(f'{count:,}' for count in counts)} parameters:",
        "",
        *report.table(cells),
        "",
        f"largest deviation from a formula: {worst:.2%} ({'met' if is_met else 'missed'}: at most {tolerance:.2%})",
    ]
    return "\n".join(lines) + "\n", is_met


def _value(formula: str, size: int) -> float:
    whole, _, part = formula.partition(" + ") if " + " in formula else ("0", "", formula)
    number, _, divisor = part.partition(" / ")
    return float(whole) + float(number) / (size if divisor else 1)
