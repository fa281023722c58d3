"""Memory that a layer keeps for the backward pass, where each token's rows come back as one weighted sum."""

import pytest
import torch
import torch.distributed as dist
from compare import relative_error
from forks import values

import fmoe
from fmoe.kernels.native import loader as native

WIDTH, TOKENS, TOP_K = 32, 48, 4


def step(layer, x):
    """Gradients of a step, and the distinct tensors that its forward pass saves, as (shape, bytes)."""
    saved = {}

    def pack(tensor):
        saved[tensor.data_ptr()] = tuple(tensor.shape), tensor.untyped_storage().nbytes()
        return tensor

    x = x.clone().requires_grad_()
    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        y = layer(x)
    y.square().sum().backward()
    return [y, x.grad, *(p.grad for p in layer.parameters())], list(saved.values())


def both_ways():
    """Relative error between the one operation and the module with a hook, and what each saves."""
    layer = fmoe.FMoE(
        d_model=WIDTH, num_experts=8, d_hidden=16, top_k=TOP_K, gate="naive", exchange="all_gather",
        moe_group=dist.group.WORLD, backend="native", seed=3,
    )  # fmt: skip
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    fused, saved = step(layer, x)
    layer.zero_grad()
    layer.experts.register_forward_hook(lambda *_: None)  # it sees rows and outputs of experts
    plain, saved_by_module = step(layer, x)
    return max(relative_error(a, b) for a, b in zip(fused, plain, strict=True)), saved, saved_by_module


@pytest.mark.skipif(not native.load(), reason="no native backend")
def test_all_gather_saves_tokens_and_not_rows(two_ranks):
    """The module saves the rows of its experts and their outputs, K / W times as many as there are tokens each."""
    rows_of_all = 2 * TOKENS * TOP_K
    kept, given = 0, 0
    for error, saved, saved_by_module in values(two_ranks.run(both_ways)):
        assert error < 1e-5
        of_width, of_module = (
            sum(size for shape, size in found if shape[1:] == (WIDTH,) and shape[0] > TOKENS)
            for found in (saved, saved_by_module)
        )
        assert of_width == 4 * WIDTH * 2 * TOKENS  # the gathered tokens
        kept, given = kept + of_width, given + of_module
        assert sum(size for _, size in saved) < sum(size for _, size in saved_by_module)
    assert given == 2 * 4 * WIDTH * rows_of_all
