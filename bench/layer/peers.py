"""Layers of other packages, which are imported when the layer is built. They have the problem's weights unless noted.

Shape letters: T tokens, D width, E experts, K experts per token.
"""

import os
from collections.abc import Callable
from types import SimpleNamespace

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.layer.plain import Router
from bench.layer.problem import Problem


def hugging_face(implementation: str) -> Callable[[Problem], nn.Module]:
    """Return the builder of a layer with transformers' experts: Qwen3's, or Nemotron-H's if the shape is not gated."""

    class Layer(nn.Module):
        def __init__(self, problem: Problem):
            super().__init__()
            self.router = Router(problem)
            self.experts = _hugging_face_experts(problem, implementation)

        def forward(self, x_TD: Tensor) -> Tensor:
            expert_TK, weight_TK = self.router(x_TD)
            return self.experts(x_TD, expert_TK, weight_TK)

    return Layer


def _hugging_face_experts(problem: Problem, implementation: str) -> nn.Module:
    shape = problem.shape
    sizes = {"hidden_size": shape.d_model, "moe_intermediate_size": shape.d_hidden}
    if shape.gated:
        from transformers.models.qwen3_moe.modeling_qwen3_moe import Qwen3MoeExperts as Experts

        config = SimpleNamespace(num_experts=shape.num_experts, hidden_act="silu", **sizes)
    else:
        from transformers.models.nemotron_h.modeling_nemotron_h import NemotronHExperts as Experts

        config = SimpleNamespace(
            n_routed_experts=shape.num_experts, mlp_hidden_act="gelu", moe_latent_size=None, **sizes
        )
    config._experts_implementation = implementation
    with torch.device("meta"):
        experts = Experts(config)
    experts = experts.to(problem.dtype).to_empty(device=problem.device)
    with torch.no_grad():
        (experts.gate_up_proj if shape.gated else experts.up_proj).copy_(problem.w_in_EPD)
        experts.down_proj.copy_(problem.w_out_EDH)
    return experts


class _MegatronRouter(Router):
    """Given choices in megatron-core's form: probabilities and map, [T, E]."""

    def forward(self, hidden_TBD: Tensor, padding_mask: Tensor | None = None) -> tuple[Tensor, Tensor]:
        expert_TK, weight_TK = super().forward(hidden_TBD.flatten(0, 1))
        probs_TE = weight_TK.new_zeros(len(expert_TK), len(self.weight)).scatter(1, expert_TK, weight_TK)
        chosen_TE = torch.zeros_like(probs_TE, dtype=torch.bool).scatter(1, expert_TK, True)
        return probs_TE, chosen_TE


def megatron(problem: Problem) -> nn.Module:
    """Return megatron-core's MoELayer with SequentialMLP."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

    start_megatron()
    shape = problem.shape
    dtype = problem.dtype
    config = TransformerConfig(
        num_layers=1,
        hidden_size=shape.d_model,
        num_attention_heads=4,
        num_moe_experts=shape.num_experts,
        moe_router_topk=shape.top_k,
        ffn_hidden_size=shape.d_hidden,
        moe_ffn_hidden_size=shape.d_hidden,
        moe_router_load_balancing_type="none",
        moe_aux_loss_coeff=0.0,
        moe_token_dispatcher_type="allgather",
        moe_router_pre_softmax=shape.top_k == 1,
        add_bias_linear=False,
        gated_linear_unit=shape.gated,
        activation_func=F.silu if shape.gated else F.gelu,
        use_cpu_initialization=problem.device == "cpu",
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=shape.num_experts, moe_grouped_gemm=False)
    build = spec.submodules.mlp  # a function in newer versions
    layer = build(config=config) if callable(build) else build_module(build, config=config)
    with torch.no_grad():
        layer.router.weight.copy_(problem.router_ED)
        for expert, w_in, w_out in zip(layer.experts.local_experts, problem.w_in_EPD, problem.w_out_EDH, strict=True):
            expert.linear_fc1.weight.copy_(w_in)
            expert.linear_fc2.weight.copy_(w_out)
    if problem.skew is not None:
        layer.router = _MegatronRouter(problem)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x_TD: Tensor) -> Tensor:
            return self.layer(x_TD.unsqueeze(1))[0].squeeze(1)

    return Layer().to(problem.device)


def start_megatron() -> None:
    """Create the default process group and those of megatron-core, which `pretrain.start.process.stop` ends."""
    from megatron_patch import cpu

    cpu.install()  # patches less where there is a GPU
    from megatron.core import parallel_state

    start_process_group()
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel()


def start_process_group() -> None:
    """Create the default process group, of this process alone, unless it exists."""
    import torch.distributed as dist

    from pretrain.start import process

    if not dist.is_initialized():
        process.start()


def tutel(problem: Problem) -> nn.Module:
    """Return Tutel's layer with a capacity that follows the hottest expert; it draws its own weights."""
    from tutel import moe

    start_process_group()
    shape = problem.shape
    experts = {"num_experts_per_device": shape.num_experts, "hidden_size_per_expert": shape.d_hidden}
    if shape.gated:
        experts |= {"type": "llama_ffn", "activation_fn": F.silu}
    else:
        experts |= {"type": "ffn", "activation_fn": F.gelu, "has_fc1_bias": False, "has_fc2_bias": False}
    gate = {"type": "top", "k": shape.top_k, "capacity_factor": 0, "fp32_gate": True}
    layer = moe.moe_layer(gate_type=gate, model_dim=shape.d_model, experts=experts)
    layer.experts.to(problem.dtype)
    return layer


def deepspeed(problem: Problem) -> nn.Module:
    """Return DeepSpeed's layer at capacity factor 1, beyond which it drops assignments; it draws its own weights."""
    os.environ.setdefault("DS_ACCELERATOR", "cpu")
    start_process_group()
    import deepspeed
    from deepspeed.moe.layer import MoE

    if not deepspeed.comm.is_initialized():
        deepspeed.comm.init_distributed("gloo", verbose=False)
    shape = problem.shape

    class Expert(nn.Module):
        def __init__(self):
            super().__init__()
            self.w_in = nn.Linear(shape.d_model, shape.height, bias=False, dtype=problem.dtype)
            self.w_out = nn.Linear(shape.d_hidden, shape.d_model, bias=False, dtype=problem.dtype)

        def forward(self, x: Tensor) -> Tensor:
            return self.w_out(shape.act(self.w_in(x)))

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = MoE(
                hidden_size=shape.d_model,
                expert=Expert(),
                num_experts=shape.num_experts,
                k=shape.top_k,
                capacity_factor=1.0,
                drop_tokens=True,
                use_rts=False,
                min_capacity=4,
            )
            self.layer.set_deepspeed_parallelism()

        def forward(self, x_TD: Tensor) -> Tensor:
            return self.layer(x_TD)[0]

    return Layer()


def scattermoe(problem: Problem) -> nn.Module:
    """Return ScatterMoE's experts behind the problem's router; the experts draw their own weights."""
    from scattermoe.mlp import GLUMLP, MLP

    shape = problem.shape
    sizes = {
        "input_size": shape.d_model,
        "hidden_size": shape.d_hidden,
        "num_experts": shape.num_experts,
        "top_k": shape.top_k,
    }
    with torch.device(problem.device):
        experts = GLUMLP(**sizes, activation=nn.SiLU()) if shape.gated else MLP(**sizes, activation=nn.GELU())
    return _behind_router(problem, experts, lambda x_TD, expert_TK, weight_TK: experts(x_TD, weight_TK, expert_TK))


def sonicmoe(problem: Problem) -> nn.Module:
    """Return SonicMoE's layer; it draws its own weights."""
    from sonicmoe import KernelBackendMoE, MoE
    from sonicmoe.enums import ActivationType

    shape = problem.shape
    activation = ActivationType.SWIGLU if shape.gated else ActivationType.GELU
    with torch.device(problem.device):
        layer = MoE(
            num_experts=shape.num_experts,
            num_experts_per_tok=shape.top_k,
            hidden_size=shape.d_model,
            intermediate_size=shape.d_hidden,
            activation_function=activation,
            add_bias=False,
            std=0.02,
        ).to(problem.dtype)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x_TD: Tensor) -> Tensor:
            return self.layer(x_TD, kernel_backend_moe=KernelBackendMoE.sonicmoe)[0]

    return Layer()


def _behind_router(problem: Problem, experts: nn.Module, call: Callable[..., Tensor]) -> nn.Module:
    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = Router(problem)
            self.experts = experts.to(problem.device, problem.dtype)

        def forward(self, x_TD: Tensor) -> Tensor:
            expert_TK, weight_TK = self.router(x_TD)
            return call(x_TD, expert_TK, weight_TK)

    return Layer()
