"""Optimizers of rows against dense ones: rows with a gradient move as those, others not at all."""

import pytest
import torch

from fmoe import UserError
from fmoe.optim import RowAdagrad, RowAdam

ROWS, DIM = 11, 4


def gradients(steps):
    """Sparse gradients, with duplicates that are to be summed."""
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(ROWS - 3, (6,), generator=generator)
        values = torch.randn(6, DIM, generator=generator).double()
        yield torch.sparse_coo_tensor(rows[None], values, (ROWS, DIM), check_invariants=True)


def run(make):
    weight = torch.ones(ROWS, DIM, dtype=torch.float64, requires_grad=True)
    optimizer = make([weight])
    for gradient in gradients(5):
        weight.grad = gradient.clone()
        optimizer.step()
    return weight.detach(), optimizer.state[weight]


def test_adagrad_has_one_accumulator_per_row():
    weight, state = run(lambda weights: RowAdagrad(weights, lr=0.3, eps=1e-6))
    expected = torch.ones(ROWS, DIM, dtype=torch.float64)
    sums = [0.0] * ROWS
    for gradient in gradients(5):
        for row, g in enumerate(gradient.to_dense()):
            sums[row] += float(g.square().mean())
            expected[row] -= 0.3 * g / (sums[row] ** 0.5 + 1e-6)
    torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)
    torch.testing.assert_close(state["sum"], torch.tensor(sums, dtype=torch.float64), rtol=1e-12, atol=0)
    assert (weight[-3:] == 1).all() and state["sum"].shape == (ROWS,)


def test_adam_is_that_of_torch_with_a_state_from_the_start():
    weight, state = run(lambda weights: RowAdam(weights, lr=0.1))
    expected, _ = run(lambda weights: torch.optim.SparseAdam(weights, lr=0.1))
    torch.testing.assert_close(weight, expected, rtol=1e-12, atol=0)
    assert state["step"] == 5 and (state["exp_avg"][-3:] == 0).all()
    fresh = RowAdam([torch.ones(2, 3, requires_grad=True)])
    assert {key: value.shape for key, value in next(iter(fresh.state.values())).items()} == {
        "step": (),
        "exp_avg": (2, 3),
        "exp_avg_sq": (2, 3),
    }


@pytest.mark.parametrize("make", [RowAdagrad, RowAdam])
def test_a_state_continues(make):
    whole, _ = run(make)
    weight = torch.ones(ROWS, DIM, dtype=torch.float64, requires_grad=True)
    optimizer = make([weight])
    for step, gradient in enumerate(gradients(5)):
        if step == 3:
            state = optimizer.state_dict()
            optimizer = make([weight])
            optimizer.load_state_dict(state)
        weight.grad = gradient
        optimizer.step()
    assert torch.equal(weight.detach(), whole)


def test_accumulators_of_16_bit_tables_are_float32():
    """One that has grown still sees small gradients, also after a load."""
    weight = torch.ones(2, 4, dtype=torch.bfloat16, requires_grad=True)
    optimizer = RowAdagrad([weight])
    for step in range(300):
        if step == 150:
            state = optimizer.state_dict()
            optimizer = RowAdagrad([weight])
            optimizer.load_state_dict(state)
        values = torch.ones(1, 4, dtype=torch.bfloat16)
        weight.grad = torch.sparse_coo_tensor(torch.tensor([[1]]), values, (2, 4), check_invariants=True)
        optimizer.step()
    assert optimizer.state[weight]["sum"].tolist() == [0, 300]
    assert weight.dtype == torch.bfloat16 and (weight[0] == 1).all() and (weight[1] < 1).all()


def test_a_closure_computes_gradients():
    weight = torch.ones(ROWS, DIM, requires_grad=True)

    def closure():
        loss = torch.nn.functional.embedding(torch.tensor([1]), weight, sparse=True).sum()
        loss.backward()
        return loss

    assert RowAdagrad([weight], lr=0.5).step(closure).item() == DIM
    assert weight.detach()[1].tolist() == [0.5] * DIM


def test_a_step_without_gradients_changes_nothing():
    weight = torch.ones(2, 3, requires_grad=True)
    RowAdagrad([weight]).step()
    assert (weight == 1).all()


@pytest.mark.parametrize(("options", "text"), [({"lr": -1.0}, "lr=-1.0 "), ({"eps": -1.0}, "eps=-1.0 ")])
def test_wrong_options(options, text):
    with pytest.raises(UserError, match=text):
        RowAdagrad([torch.ones(1, 1, requires_grad=True)], **options)


def test_a_dense_gradient_is_refused():
    weight = torch.ones(2, 3, requires_grad=True)
    weight.sum().backward()
    with pytest.raises(RuntimeError, match="sparse"):
        RowAdagrad([weight]).step()
