"""``python -m bench step``: tokens a second of a whole training step of the quickstart model.

Contenders differ in the Mixture-of-Experts layer alone: ours, and megatron-core's own MoELayer with the same experts,
top-k and capacity. Everything around them (attention, schedule, DDP, optimizer) is megatron-core's for both.
"""

import warnings
from collections.abc import Sequence
from dataclasses import replace

import numpy as np
import torch

from bench import frame, options, report
from pretrain import process
from pretrain.config import Recipe, load_recipe

OURS, MEGATRON = "fmoe", "megatron-core MoELayer"


def main(argv: Sequence[str]) -> None:
    parser = options.parser("step", __doc__)
    parser.add_argument("--recipe", default="quickstart", help="whose model and batch to take")
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32"])
    parser.add_argument("--threads", nargs="+", type=int, default=[torch.get_num_threads()])
    arguments = parser.parse_args(argv)
    from megatron_patch import cpu

    cpu.install()
    warnings.filterwarnings("ignore", module="megatron")
    from pretrain.engine import init_parallel

    processes = process.start()
    recipe = load_recipe(arguments.recipe)
    recipe = replace(recipe, parallel=replace(recipe.parallel, expert=1, data=1))
    init_parallel(recipe, processes)
    rows = []
    try:
        for precision in arguments.precision:
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                row = replace(recipe, train=replace(recipe.train, precision=precision))
                rows.append(_measure(row, processes, f"{precision}, threads {threads}", arguments))
    finally:
        process.stop()
    report.write(rows, arguments.out, "step")
    overall = frame.geometric_mean_of_ratios(rows, OURS)
    if overall is not None:
        print(f"geometric mean of {MEGATRON} time / {OURS} time: {overall}")


def _measure(recipe: Recipe, processes, label: str, arguments) -> frame.Measurement:
    tokens = recipe.train.global_batch * recipe.model.sequence_length
    contenders = [
        frame.Contender(OURS, lambda: _stepper(recipe, processes, None), work=tokens),
        frame.Contender(MEGATRON, lambda: _stepper(recipe, processes, _megatron_moe), work=tokens),
    ]
    return frame.measure(
        contenders,
        rounds=arguments.rounds,
        warmup=arguments.warmup,
        reference=MEGATRON,
        seed=arguments.seed,
        label=label,
        unit="tokens",
    )


def _stepper(recipe: Recipe, processes, build):
    """Training steps over random tokens, one a call."""
    from pretrain.engine import Engine

    engine = Engine(recipe, processes, **({} if build is None else {"build": build}))
    samples = _RandomTokens(recipe)
    step = 0

    def run() -> float:
        nonlocal step
        result = engine.train_step(step, samples)
        engine.routing()
        step += 1
        return result.loss

    return run


class _RandomTokens:
    """Samples of uniform tokens: the same for every contender."""

    def __init__(self, recipe: Recipe):
        self._shape, self._vocab = recipe.model.sequence_length + 1, recipe.model.vocab_size

    def __getitem__(self, n: int) -> np.ndarray:
        return np.random.default_rng(n).integers(0, self._vocab, self._shape)


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
    )
    spec = get_gpt_layer_local_spec(num_experts=model.num_experts, moe_grouped_gemm=False)
    return build_gpt(recipe, config, spec)
