"""Megatron's gradient norm counts every parameter once, at every split of the experts."""

import pytest
from forks import values

# Tensor, expert and expert tensor parallel sizes, on two ranks.
LAYOUTS = {"TP2xEP2": (2, 2, 1), "TP2": (2, 1, 1), "EP2": (1, 2, 1), "TP2xETP2": (2, 1, 2), "ETP2": (1, 1, 2)}


def squared_norm(experts, layout, precision, distributed, is_marked=True):
    """Square of the norm that Megatron's optimizer computes from gradients of ones; parameters of this rank."""
    import torch
    from megatron.core import parallel_state
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.optimizer import OptimizerConfig, get_megatron_optimizer
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
    from megatron.core.transformer.module import Float16Module
    from tiny_gpt import EXPERTS, tiny_gpt

    from megatron_patch import cpu, fmoe_layer_spec

    cpu.install()
    tensor, expert, expert_tensor = LAYOUTS.get(layout, (1, 1, 1))
    parallel_state.initialize_model_parallel(
        tensor, expert_model_parallel_size=expert, expert_tensor_parallel_size=expert_tensor
    )
    model_parallel_cuda_manual_seed(11)
    options = {
        "tensor_model_parallel_size": tensor,
        "add_bias_linear": True,
        "params_dtype": getattr(torch, precision),
        "bf16": precision == "bfloat16",
    }
    if experts == "ours":
        spec = fmoe_layer_spec(get_gpt_layer_local_spec(), num_experts=EXPERTS, d_hidden=24, top_k=2)
    else:
        options |= {
            "expert_model_parallel_size": expert,
            "expert_tensor_parallel_size": expert_tensor,
            "num_moe_experts": EXPERTS,
            "moe_ffn_hidden_size": 24,
            "moe_token_dispatcher_type": "alltoall",
            "sequence_parallel": tensor > 1,
        }
        spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    gpt = tiny_gpt(spec, **options)
    if not is_marked:  # as Transformer Engine's experts are where the expert tensor parallel size is 1
        for parameter in gpt.parameters():
            if not getattr(parameter, "allreduce", True):
                parameter.tensor_model_parallel = False
    wrapped = Float16Module(gpt.config, gpt) if precision == "bfloat16" else gpt
    ddp = DistributedDataParallelConfig(use_distributed_optimizer=distributed, grad_reduce_in_fp32=True)
    model = DistributedDataParallel(gpt.config, ddp, wrapped)
    optimizer = get_megatron_optimizer(
        OptimizerConfig(optimizer="adam", lr=1e-3, bf16=precision == "bfloat16", use_distributed_optimizer=distributed),
        [model],
    )
    for parameter in gpt.parameters():
        parameter.main_grad.fill_(1.0)
    optimizer.prepare_grads()
    return float(optimizer.get_grad_norm()) ** 2, sum(parameter.numel() for parameter in gpt.parameters())


@pytest.mark.by_default(
    "ours-TP2xEP2-float32-whole", "ours-ETP2-bfloat16-distributed", "Megatron's-TP2xEP2-float32-whole"
)
@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "distributed"])
@pytest.mark.parametrize("precision", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("experts", "layout"), [*(("ours", layout) for layout in LAYOUTS), ("Megatron's", "TP2xEP2"), ("Megatron's", "EP2")]
)
def test_the_norm_counts_every_parameter_once(forks, experts, layout, precision, distributed):
    ((_, total),) = values(forks.run(1, squared_norm, experts, None, "float32", False))
    for square, _ in values(forks.run(2, squared_norm, experts, layout, precision, distributed)):
        assert square == pytest.approx(total, rel=1e-5)


@pytest.mark.by_default("distributed")
@pytest.mark.parametrize("distributed", [False, True], ids=["whole", "distributed"])
def test_experts_without_a_mark_are_counted_too(forks, distributed):
    ((_, total),) = values(forks.run(1, squared_norm, "Megatron's", None, "float32", False))
    seen = values(forks.run(2, squared_norm, "Megatron's", "TP2xEP2", "bfloat16", distributed, False))
    assert [square for square, _ in seen] == pytest.approx([total] * 2, rel=1e-5)
