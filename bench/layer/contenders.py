"""Mixture-of-Experts layers to time against each other: the problem's weights, top-k routing, no biases.

A contender's step is forward (and backward) of one batch, after which gradients are freed, as
``zero_grad(set_to_none=True)`` of an optimizer does. Shape letters: T tokens, D width, H hidden width, E experts, K
experts per token, N assignments.
"""

import functools
from collections.abc import Callable
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from bench.layer.problem import Problem

OURS = ("fmoe native", "fmoe torch")  # the goals of a run apply to the first of these that it has
# Ours on a GPU: backend, implementation of its GEMMs, optional package.
OURS_ON_CUDA = {
    "fmoe cuda": ("cuda", "auto", None),
    "fmoe cuda, grouped": ("cuda", "grouped", None),
    "fmoe cuda, loop": ("cuda", "loop", None),
    "fmoe cuda, triton": ("cuda", "triton", "triton"),
    "fmoe te": ("te", "auto", "transformer_engine"),
    "fmoe sonicmoe": ("sonicmoe", "auto", "sonicmoe"),
    "fmoe torch": ("torch", "auto", None),
}
ALL_OURS = (*(name for name in OURS_ON_CUDA if name not in OURS), *OURS)
BRUTE_FORCE = "brute force"
TOKEN_LOOP = "token loop"


@dataclass(frozen=True)
class Layer:
    """A contender.

    Args:
        build: returns the layer of a problem, a module from [T, D] to [T, D].
        needs: optional package, if any.
        is_dropless: whether every assignment is computed. Other layers are shown, but do not count as peers.
        is_slow: whether its time grows with the square of the number of experts, or it calls an expert for every
            assignment: the layer gets 3 rounds, or none.
        takes_choices: whether it uses the given choices of a problem that has them.
    """

    build: Callable[[Problem], nn.Module]
    needs: str | None = None
    is_dropless: bool = True
    is_slow: bool = False
    takes_choices: bool = True

    def is_installed(self) -> bool:
        return self.needs is None or find_spec(self.needs) is not None


class Router(nn.Module):
    """Softmax, top-k, normalization, as in every peer here. Given choices of the problem replace the top-k ones."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.weight = nn.Parameter(problem.router_ED.clone())
        self.top_k, self.expert_TK = problem.shape.top_k, problem.expert_TK

    def forward(self, x_TD: Tensor) -> tuple[Tensor, Tensor]:
        probs_TE = F.linear(x_TD, self.weight).float().softmax(-1)
        if self.expert_TK is None:
            weight_TK, expert_TK = probs_TE.topk(self.top_k, dim=-1)
        else:
            weight_TK, expert_TK = probs_TE.gather(1, self.expert_TK), self.expert_TK
        return expert_TK, (weight_TK / weight_TK.sum(-1, keepdim=True)).to(x_TD.dtype)


class _Stacks(nn.Module):
    """A router and the experts' weights in two stacks."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.shape, self.router = problem.shape, Router(problem)
        self.w_in = nn.Parameter(problem.w_in_EPD.clone())
        self.w_out = nn.Parameter(problem.w_out_EDH.clone())


class SortedGroups(_Stacks):
    """Sort, and torch's grouped GEMM with offsets on the device: the usual hand-written layer for a GPU."""

    def forward(self, x_TD: Tensor) -> Tensor:
        shape = self.shape
        expert_TK, weight_TK = self.router(x_TD)
        sorted_N, order_N = expert_TK.reshape(-1).sort(stable=True)
        experts_E = torch.arange(shape.num_experts, device=x_TD.device)
        end_E = torch.searchsorted(sorted_N, experts_E, right=True).int()
        rows_ND = x_TD.index_select(0, order_N // shape.top_k)
        hidden = shape.act(F.grouped_mm(rows_ND, self.w_in.transpose(1, 2), offs=end_E))
        out_ND = F.grouped_mm(hidden, self.w_out.transpose(1, 2), offs=end_E)
        out_ND = out_ND * weight_TK.reshape(-1)[order_N].unsqueeze(-1)
        return torch.zeros_like(x_TD).index_add(0, order_N // shape.top_k, out_ND)


class BruteForce(_Stacks):
    """A mask for every expert over stacked weights: the layer that FastMoE's benchmark compares with."""

    def forward(self, x_TD: Tensor) -> Tensor:
        expert_TK, weight_TK = self.router(x_TD)
        rows_ND = x_TD.repeat_interleave(self.shape.top_k, 0)
        expert_N = expert_TK.reshape(-1)
        out_ND = torch.empty_like(rows_ND)
        for e in range(self.shape.num_experts):
            mine = expert_N == e
            out_ND[mine] = self.shape.act(rows_ND[mine] @ self.w_in[e].t()) @ self.w_out[e].t()
        return (out_ND.view(*expert_TK.shape, -1) * weight_TK.unsqueeze(-1)).sum(1)


class TokenLoop(nn.Module):
    """One call of an expert for every assignment, with a batch of one token: the reference in FastMoE's tests."""

    def __init__(self, problem: Problem):
        super().__init__()
        self.act, self.router = problem.shape.act, Router(problem)
        # A parameter per expert: an index into a stack would make a gradient of the whole stack for every token.
        self.w_in = nn.ParameterList(w.clone() for w in problem.w_in_EPD)
        self.w_out = nn.ParameterList(w.clone() for w in problem.w_out_EDH)

    def forward(self, x_TD: Tensor) -> Tensor:
        expert_TK, weight_TK = self.router(x_TD)
        out_T = []
        for x_D, experts, weight_K in zip(x_TD, expert_TK.tolist(), weight_TK, strict=True):
            out_K = [F.linear(self.act(F.linear(x_D, self.w_in[e])), self.w_out[e]) for e in experts]
            out_T.append(weight_K @ torch.stack(out_K))
        return torch.stack(out_T)


class SortedSlices(_Stacks):
    """Sort, one GEMM per slice, and scatter: the usual hand-written layer for a CPU."""

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


def ours(problem: Problem, gemm: str = "auto", **options) -> nn.Module:
    """Return `fmoe.FMoE` with the problem's weights, without auxiliary losses, which no peer adds either."""
    import fmoe

    shape = problem.shape
    gate = "naive" if problem.skew is None else Router(problem)
    with torch.device("meta"):  # no weights are drawn: those of a large layer would take minutes on a CPU
        layer = fmoe.FMoE(
            d_model=shape.d_model,
            num_experts=shape.num_experts,
            d_hidden=shape.d_hidden,
            top_k=shape.top_k,
            gate=gate,
            expert="swiglu" if shape.gated else "ffn",
            expert_options={"bias": False, "gemm": gemm},
            loss_weights={"balance": 0.0, "z": 0.0},
            seed=0,
            **options,
        )
    layer = layer.to(problem.dtype).to_empty(device=problem.device)
    with torch.no_grad():
        layer.gate.weight.copy_(problem.router_ED)
        layer.experts.weight_in.copy_(problem.w_in_EPD)
        layer.experts.weight_out.copy_(problem.w_out_EDH)
    return layer


def layers() -> dict[str, Layer]:
    """Return all contenders by name, whether they are installed or not."""
    from bench.layer import peers

    return {
        **{name: Layer(functools.partial(ours, backend=name.removeprefix("fmoe "))) for name in OURS},
        "HF grouped_mm": Layer(peers.hugging_face("grouped_mm"), "transformers"),
        "HF eager": Layer(peers.hugging_face("eager"), "transformers", is_slow=True),
        "megatron-core SequentialMLP": Layer(peers.megatron, "megatron"),
        "Tutel dropless": Layer(peers.tutel, "tutel", takes_choices=False),
        "DeepSpeed, capacity 1": Layer(peers.deepspeed, "deepspeed", is_dropless=False, takes_choices=False),
        "sorted slices": Layer(SortedSlices),
        BRUTE_FORCE: Layer(BruteForce, is_slow=True),
        TOKEN_LOOP: Layer(TokenLoop, is_slow=True),
    }


def layers_on_cuda() -> dict[str, Layer]:
    """Return all contenders on a GPU by name, whether they are installed or not."""
    from bench.layer import peers

    return {
        **{
            name: Layer(functools.partial(ours, backend=backend, gemm=gemm), needs)
            for name, (backend, gemm, needs) in OURS_ON_CUDA.items()
        },
        "HF grouped_mm": Layer(peers.hugging_face("grouped_mm"), "transformers"),
        "HF eager": Layer(peers.hugging_face("eager"), "transformers", is_slow=True),
        "megatron-core SequentialMLP": Layer(peers.megatron, "megatron"),
        "ScatterMoE": Layer(peers.scattermoe, "scattermoe"),
        "SonicMoE": Layer(peers.sonicmoe, "sonicmoe", takes_choices=False),
        "sorted grouped_mm": Layer(SortedGroups),
        "sorted slices": Layer(SortedSlices),
    }


def layer_step(layer: Layer, problem: Problem, backward: bool) -> Callable[[], None]:
    """Build a contender and return its step on the batch: forward without gradients, or forward and backward."""
    module = layer.build(problem).train()
    x_TD, grad_TD = problem.x_TD, problem.grad_TD

    def step() -> None:
        if not backward:
            with torch.no_grad():
                module(x_TD)
            return
        leaf = x_TD.detach().requires_grad_()
        module(leaf).backward(grad_TD)
        module.zero_grad(set_to_none=True)

    return step
