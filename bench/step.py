"""``python -m bench step``: tokens a second of a whole training step of the quickstart model, in one process and split.

Contenders differ in the Mixture-of-Experts layer alone: ours, and megatron-core's own MoELayer with the same experts,
top-k and capacity. Everything around them (attention, schedule, DDP, optimizer) is megatron-core's for both. Splits of
several processes run on gloo, the machine's cores shared out; a round's time is that of the slowest rank.
"""

import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist

from bench import frame, options, ranks, report
from bench.samples import Tokens
from pretrain import process
from pretrain.config import Recipe, load_recipe
from pretrain.process import Processes

OURS, MEGATRON = "fmoe", "megatron-core MoELayer"
# Keys of [parallel]. TP2 has sequence parallelism, without which megatron-core's layer refuses to train.
SPLITS: dict[str, dict[str, int]] = {"1": {}, "EP2": {"expert": 2}, "TP2": {"tensor": 2}}


def main(argv: Sequence[str]) -> None:
    parser = options.parser("step", __doc__)
    parser.add_argument("--recipe", default="quickstart", help="whose model and batch to take")
    parser.add_argument("--splits", nargs="+", choices=list(SPLITS), default=list(SPLITS))
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16", "fp16"], default=["fp32", "bf16"])
    parser.add_argument(
        "--threads", type=int, default=None, help="of a process; by default the cores over the processes"
    )
    arguments = parser.parse_args(argv)
    rows = []
    for split in arguments.splits:
        size = _recipe(arguments.recipe, split).parallel.world_size
        rows += _alone(arguments) if size == 1 else _together(size, split, arguments)
    report.write(rows, arguments.out, "step")
    overall = frame.geometric_mean_of_ratios(rows, OURS)
    if overall is not None:
        print(f"geometric mean of {MEGATRON} time / {OURS} time: {overall}")


def _recipe(name: str, split: str) -> Recipe:
    recipe = load_recipe(name)
    return replace(recipe, parallel=replace(recipe.parallel, **{"expert": 1, "data": 1} | SPLITS[split]))


def _alone(arguments) -> list[frame.Measurement]:
    """In this process, on its GPU where it has one."""
    processes = process.start()
    try:
        return _measure_split("1", processes, arguments)
    finally:
        process.stop()


def _together(size: int, split: str, arguments) -> list[frame.Measurement]:
    return [frame.Measurement.from_json(row) for row in ranks.run(size, _on_a_rank, split, arguments)]


def _on_a_rank(split: str, arguments) -> list[dict[str, Any]]:
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    return [row.to_json() for row in _measure_split(split, processes, arguments)]


def _measure_split(split: str, processes: Processes, arguments) -> list[frame.Measurement]:
    """A row for each precision."""
    from megatron_patch import cpu

    cpu.install()
    for module in ("megatron", "torch"):  # what torch renames, megatron-core still calls by its old name
        warnings.filterwarnings("ignore", module=module)
    from pretrain.engine import init_parallel

    threads = arguments.threads or max(1, len(os.sched_getaffinity(0)) // processes.world_size)
    torch.set_num_threads(threads)
    recipe = _recipe(arguments.recipe, split)
    init_parallel(recipe, processes)
    rows = []
    for precision in arguments.precision:
        row = replace(recipe, train=replace(recipe.train, precision=precision))
        label = f"{split}, {precision}, {processes.world_size} x {threads} threads"
        rows.append(_measure(row, processes, label, arguments))
        if processes.is_main:
            print(f"{label}: {OURS} {rows[-1].ratio(OURS)} of {MEGATRON}", flush=True)
    return rows


def _measure(recipe: Recipe, processes: Processes, label: str, arguments) -> frame.Measurement:
    tokens = recipe.train.global_batch * recipe.model.sequence_length
    contenders = [
        frame.Contender(OURS, lambda: _stepper(recipe, processes, None), work=tokens),
        frame.Contender(MEGATRON, lambda: _stepper(recipe, processes, _megatron_moe), work=tokens),
    ]
    result = frame.measure(
        contenders,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        reference=MEGATRON,
        seed=arguments.seed,
        label=label,
        unit="tokens",
        line_up=dist.barrier if processes.world_size > 1 else None,
        agree=ranks.slowest if processes.world_size > 1 else None,
    )
    if result.failures and processes.world_size > 1:  # on this rank: the others cannot go on without it
        raise RuntimeError(f"{label}: {result.failures}")
    return result


def _stepper(recipe: Recipe, processes, build):
    """Training steps over random tokens, one a call."""
    from pretrain.engine import Engine

    engine = Engine(recipe, processes, **({} if build is None else {"build": build}))
    samples = Tokens(recipe)
    step = 0

    def run() -> float:
        nonlocal step
        result = engine.train_step(step, samples)
        engine.routing()
        step += 1
        return result.loss

    return run


def _megatron_moe(recipe: Recipe):
    """The GPT of the recipe with megatron-core's MoELayer."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from pretrain.models.config import transformer_config
    from pretrain.models.gpt import build_gpt

    model = recipe.model
    config = transformer_config(
        recipe,
        num_moe_experts=model.num_experts,
        moe_router_topk=model.top_k,
        moe_ffn_hidden_size=model.ffn_hidden_size,
        moe_expert_capacity_factor=model.capacity_factor,
        moe_router_load_balancing_type="aux_loss",
        moe_aux_loss_coeff=model.balance_loss,
        moe_z_loss_coeff=model.z_loss,
        moe_input_jitter_eps=model.jitter or None,
        moe_router_pre_softmax=True,  # as the switch gate has it, and the only way at top-1
        moe_router_dtype="fp32",
        moe_token_dispatcher_type="alltoall",
        expert_model_parallel_size=recipe.parallel.expert,
        expert_tensor_parallel_size=recipe.parallel.expert_tensor,
    )
    spec = get_gpt_layer_local_spec(num_experts=model.num_experts, moe_grouped_gemm=False)
    return build_gpt(recipe, config, spec)
