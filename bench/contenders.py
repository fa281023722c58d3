"""Mixture-of-Experts layers to time against each other: the same sizes, top-k routing, no biases, no tokens dropped.

A contender's setup returns a step: forward (and backward) of one batch, after which gradients are let go, as an
optimizer with ``zero_grad(set_to_none=True)`` does. Shape letters: T tokens, D width, H hidden width, E experts, K.
"""

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn import functional as F


@dataclass(frozen=True)
class Shape:
    """A layer and its batch."""

    name: str
    tokens: int
    d_model: int
    d_hidden: int
    num_experts: int
    top_k: int
    gated: bool = False

    @property
    def rows(self) -> int:
        """Assignments: T * K."""
        return self.tokens * self.top_k

    @property
    def height(self) -> int:
        """Of the first weight matrix: H, twice that where it is gated."""
        return self.d_hidden * (1 + self.gated)

    def flops(self, backward: bool) -> float:
        """Of the experts' GEMMs, forward or forward and backward."""
        forward = 2.0 * self.rows * self.d_model * (self.height + self.d_hidden)
        return forward * (3 if backward else 1)

    def act(self, hidden: Tensor) -> Tensor:
        """GELU, or SwiGLU where the layer is gated."""
        if not self.gated:
            return F.gelu(hidden)
        gate, value = hidden.chunk(2, dim=-1)
        return F.silu(gate) * value

    def __str__(self) -> str:
        kind = "SwiGLU" if self.gated else "GELU"
        return f"{self.name} T{self.tokens} D{self.d_model} H{self.d_hidden} E{self.num_experts} K{self.top_k} {kind}"


SHAPES = {
    shape.name: shape
    for shape in (
        Shape("A", 2048, 512, 1024, 64, 2),
        Shape("B", 4096, 256, 1024, 8, 2),
        Shape("C", 2048, 1024, 4096, 8, 1),
        Shape("D", 4096, 512, 512, 128, 8, gated=True),
    )
}


class Router(nn.Module):
    """Softmax, top-k, renormalised: what every peer here does."""

    def __init__(self, shape: Shape, dtype: torch.dtype):
        super().__init__()
        self.weight = nn.Parameter(torch.randn(shape.num_experts, shape.d_model, dtype=dtype) * shape.d_model**-0.5)
        self.top_k = shape.top_k

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        probs_TE = F.linear(x_TD, self.weight).float().softmax(-1)
        weight_TK, expert_TK = probs_TE.topk(self.top_k, dim=-1)
        return expert_TK, (weight_TK / weight_TK.sum(-1, keepdim=True)).to(x_TD.dtype)


def _stacks(shape: Shape, dtype: torch.dtype) -> tuple[nn.Parameter, nn.Parameter]:
    w_in = torch.randn(shape.num_experts, shape.height, shape.d_model) * shape.d_model**-0.5
    w_out = torch.randn(shape.num_experts, shape.d_model, shape.d_hidden) * shape.d_hidden**-0.5
    return nn.Parameter(w_in.to(dtype)), nn.Parameter(w_out.to(dtype))


class BruteForce(nn.Module):
    """A mask for every expert over stacked weights: the layer that FastMoE's authors compare with."""

    def __init__(self, shape: Shape, dtype: torch.dtype):
        super().__init__()
        self.shape, self.router = shape, Router(shape, dtype)
        self.w_in, self.w_out = _stacks(shape, dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        expert_TK, weight_TK = self.router(x_TD)
        rows_ND = x_TD.repeat_interleave(self.shape.top_k, 0)
        expert_N = expert_TK.reshape(-1)
        out_ND = torch.empty_like(rows_ND)
        for e in range(self.shape.num_experts):
            mine = expert_N == e
            out_ND[mine] = self.shape.act(rows_ND[mine] @ self.w_in[e].t()) @ self.w_out[e].t()
        return (out_ND.view(*expert_TK.shape, -1) * weight_TK.unsqueeze(-1)).sum(1)


class SortedSlices(nn.Module):
    """Sort, a GEMM a slice, scatter back: what one writes by hand."""

    def __init__(self, shape: Shape, dtype: torch.dtype):
        super().__init__()
        self.shape, self.router = shape, Router(shape, dtype)
        self.w_in, self.w_out = _stacks(shape, dtype)

    def forward(self, x_TD: Tensor) -> Tensor:
        shape = self.shape
        expert_TK, weight_TK = self.router(x_TD)
        expert_N = expert_TK.reshape(-1)
        order_N = expert_N.argsort(stable=True)
        counts = torch.bincount(expert_N, minlength=shape.num_experts).tolist()
        parts = x_TD.index_select(0, order_N // shape.top_k).split(counts)
        outs = [
            F.linear(shape.act(F.linear(part, w_in)), w_out)
            for part, w_in, w_out in zip(parts, self.w_in.unbind(0), self.w_out.unbind(0), strict=True)
        ]
        out_ND = torch.cat(outs) * weight_TK.reshape(-1)[order_N].unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, order_N // shape.top_k, out_ND)


def _ours(shape: Shape, dtype: torch.dtype) -> nn.Module:
    import fmoe

    layer = fmoe.FMoE(
        d_model=shape.d_model,
        num_experts=shape.num_experts,
        d_hidden=shape.d_hidden,
        top_k=shape.top_k,
        gate="naive",
        expert="swiglu" if shape.gated else "ffn",
        expert_options={"bias": False},
        seed=0,
    )
    return layer.to(dtype)


def _hugging_face(shape: Shape, dtype: torch.dtype) -> nn.Module:
    """transformers' experts with the grouped_mm implementation."""
    from types import SimpleNamespace

    from transformers.integrations.moe import use_experts_implementation

    class Experts(nn.Module):
        def __init__(self, config):
            super().__init__()
            self.num_experts = shape.num_experts
            w_in, w_out = _stacks(shape, dtype)
            setattr(self, "gate_up_proj" if shape.gated else "up_proj", w_in)
            self.down_proj, self.act_fn = w_out, F.silu if shape.gated else F.gelu

        def forward(self, hidden_states, top_k_index, top_k_weights):
            raise RuntimeError("replaced by the implementation")

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.router = Router(shape, dtype)
            wrapped = use_experts_implementation(Experts, has_gate=shape.gated)
            self.experts = wrapped(SimpleNamespace(_experts_implementation="grouped_mm"))

        def forward(self, x_TD):
            expert_TK, weight_TK = self.router(x_TD)
            return self.experts(x_TD, expert_TK, weight_TK)

    return Layer()


def _megatron(shape: Shape, dtype: torch.dtype) -> nn.Module:
    """megatron-core's MoELayer with SequentialMLP."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer.spec_utils import build_module
    from megatron.core.transformer.transformer_config import TransformerConfig

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
        use_cpu_initialization=True,
        perform_initialization=False,
        params_dtype=dtype,
        bf16=dtype == torch.bfloat16,
        bias_activation_fusion=False,
        gradient_accumulation_fusion=False,
    )
    spec = get_gpt_layer_local_spec(num_experts=shape.num_experts, moe_grouped_gemm=False)
    layer = build_module(spec.submodules.mlp, config=config)
    with torch.no_grad():
        for parameter in layer.parameters():
            parameter.normal_(0, parameter.shape[-1] ** -0.5)

    class Layer(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = layer

        def forward(self, x_TD):
            return self.layer(x_TD.unsqueeze(1))[0].squeeze(1)

    return Layer()


def layer_step(build: Callable[[Shape, torch.dtype], nn.Module], shape: Shape, dtype: torch.dtype, backward: bool):
    """Setup of a contender: forward, or forward and backward, over the same random batch."""
    torch.manual_seed(0)
    layer = build(shape, dtype).train()
    x_TD = torch.randn(shape.tokens, shape.d_model).to(dtype)
    grad_TD = torch.randn(shape.tokens, shape.d_model).to(dtype) * 0.01

    def step() -> None:
        if not backward:
            with torch.no_grad():
                layer(x_TD)
            return
        leaf = x_TD.detach().requires_grad_()
        layer(leaf).backward(grad_TD)
        layer.zero_grad(set_to_none=True)

    return step


def gemm_limit(shape: Shape, dtype: torch.dtype, backward: bool):
    """Setup of the limit: the experts' FLOPs as dense GEMMs of all rows, into memory that is there already."""
    n, d, h, up = shape.rows, shape.d_model, shape.d_hidden, shape.height
    new = functools.partial(torch.ones, dtype=dtype)
    x, hidden, act, y = new(n, d), new(n, up), new(n, h), new(n, d)
    w_in, w_out, d_w_in, d_w_out, d_act, d_x = new(up, d), new(d, h), new(up, d), new(d, h), new(n, h), new(n, d)
    for tensor in (x, hidden, act, y, w_in, w_out):
        tensor.normal_(0, 1 / math.sqrt(tensor.shape[1]))

    def step() -> None:
        torch.mm(x, w_in.t(), out=hidden)
        torch.mm(act, w_out.t(), out=y)
        if backward:
            torch.mm(y, w_out, out=d_act)
            torch.mm(y.t(), act, out=d_w_out)
            torch.mm(hidden, w_in, out=d_x)
            torch.mm(hidden.t(), x, out=d_w_in)

    return step


LAYERS: dict[str, Callable[[Shape, torch.dtype], nn.Module]] = {
    "fmoe": _ours,
    "HF grouped_mm": _hugging_face,
    "megatron-core SequentialMLP": _megatron,
    "sorted slices": SortedSlices,
    "brute force": BruteForce,
}
