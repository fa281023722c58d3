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
from torch import nn

from bench.layer import peers
from bench.layer.plain import BruteForce, Router, SortedGroups, SortedSlices, TokenLoop
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
    x_TD = problem.x_TD
    grad_TD = problem.grad_TD

    def step() -> None:
        if not backward:
            with torch.no_grad():
                module(x_TD)
            return
        leaf = x_TD.detach().requires_grad_()
        module(leaf).backward(grad_TD)
        module.zero_grad(set_to_none=True)

    return step
