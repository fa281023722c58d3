"""Memory that a layer keeps for the backward pass: no rows of outputs, where experts are one operation."""

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


def both_ways(exchange="all_gather", options=None, hooked=(0, 1)):
    """Relative error between the one operation and the module with a hook on some ranks, and what each saves."""
    layer = fmoe.FMoE(
        d_model=WIDTH, num_experts=8, d_hidden=16, top_k=TOP_K, gate="naive", exchange=exchange,
        exchange_options=options, moe_group=dist.group.WORLD, backend="native", seed=3,
    )  # fmt: skip
    x = torch.randn(TOKENS, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))
    fused, saved = step(layer, x)
    layer.zero_grad()
    if dist.get_rank() in hooked:
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


EXCHANGES = {
    "all_to_all": {},
    "all_to_all, chunks": {"chunks": 2},
    "padded": {"slots": TOKENS},
    "hierarchical": {"node_size": 1},
}


@pytest.mark.skipif(not native.load(), reason="no native backend")
@pytest.mark.parametrize("hooked", [(0, 1), (1,)], ids=["a hook on both", "a hook on one"])
@pytest.mark.parametrize("case", EXCHANGES)
def test_no_rows_that_came_back_are_saved(two_ranks, case, hooked):
    """Only the rows of a rank's experts; where a hook sees the outputs, also these, on that rank."""
    results = values(two_ranks.run(both_ways, case.split(",")[0], EXCHANGES[case], hooked))
    found = [
        [sum(size for shape, size in saved if shape[1:] == (WIDTH,) and shape[0] > TOKENS) for saved in both]
        for _error, *both in results
    ]
    assert max(error for error, *_ in results) < 1e-5
    assert [after for _, after in found] == [size * (1 + (rank in hooked)) for rank, (size, _) in enumerate(found)]
    rows_of_all = 2 * TOKENS * (8 if case == "padded" else TOP_K)
    assert sum(size for size, _ in found) == 4 * WIDTH * rows_of_all
