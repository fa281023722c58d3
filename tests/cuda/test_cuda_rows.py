"""Kernels that move rows, against fmoe.kernels.reference in float64 and its gradients."""

import random

import pytest
import torch
from compare import assert_close

from fmoe.kernels import reference
from fmoe.kernels.cuda import calls
from fmoe.kernels.cuda.calls import TokenTiles
from fmoe.kernels.cuda.instances import DTYPES
from fmoe.kernels.gates import memory_shape
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing, RoutingGroups

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
WIDTHS = [1, 3, 8, 24, 40, 63, 64, 200, 256, 1100]
BITS = {4: torch.int32, 2: torch.int16}


class Case:
    """Tokens and their plan, drawn from a seed; the fixture does not align those of every third one to 16 bytes."""

    def __init__(self, seed):
        self.draw = random.Random(seed)
        self.g = torch.Generator().manual_seed(seed)
        self.dtype = list(DTYPES)[seed // 3 % 3]
        self.tokens = self.draw.choice([0, 1, 6, 17, 40])
        self.experts = self.draw.choice([1, 2, 5, 16])
        self.top_k = self.experts if seed % 7 == 0 else self.draw.randint(1, min(4, self.experts))
        self.width = self.draw.choice(WIDTHS)
        expert_TK = torch.rand(self.tokens, self.experts, generator=self.g).argsort(1)[:, : self.top_k].clone()
        expert_TK[torch.rand(expert_TK.shape, generator=self.g) < self.draw.choice([0, 0, 0.3, 1.0])] = -1
        self.plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK.float()), self.experts)
        self.end = self.plan.count_E.cumsum(0).int()
        self.kept = int(self.plan.count_E.sum())
        # Rows of all assignments, of which the first are kept; or of the kept ones alone.
        self.limit, self.rows = (self.plan.count_E.sum().view(1), expert_TK.numel()) if seed % 2 else (None, self.kept)
        self.weight_TK = torch.rand(expert_TK.shape, generator=self.g)

    def normal(self, *shape):
        return torch.randn(*shape, generator=self.g).to(self.dtype)

    def close(self, found, expected, name):
        limit = TOLERANCE[found.dtype] if found.dtype == self.dtype else 1e-5
        assert_close(found, expected, limit, name)


@pytest.mark.parametrize("seed", range(54))
def test_gather(launch, seed):
    case = Case(seed)
    dtype = case.dtype if seed % 4 else case.draw.choice(list(DTYPES))
    x_TD = case.normal(case.tokens, case.width)
    scale = case.weight_TK if case.draw.random() < 0.4 else None
    out = launch(
        calls.gather, x_TD, case.plan.perm_N, case.top_k, case.rows, scale=scale, limit=case.limit, dtype=dtype
    )
    expected = reference.permute(x_TD.double(), case.plan.perm_N, case.plan.inverse_TK, case.kept)
    assert not out[case.kept :].any()  # the dropped tail
    if scale is None:
        assert torch.equal(out[: case.kept], expected.to(case.dtype).to(dtype))
    else:
        expected = expected * scale.double().reshape(-1, 1)[case.plan.perm_N[: case.kept]]
        assert_close(out[: case.kept], expected, max(TOLERANCE[case.dtype], TOLERANCE[dtype]), "rows")


@pytest.mark.parametrize("seed", range(12))
def test_gather_as_reordering_and_padding(launch, seed):
    """A permutation; then positions without a row."""
    case = Case(seed)
    rows = case.draw.choice([1, 9, 50])
    x = case.normal(rows, case.width)
    index = torch.randperm(rows, generator=case.g)
    if seed % 2:
        index[torch.rand(rows, generator=case.g) < 0.4] = -1
    assert torch.equal(launch(calls.gather, x, index, 1, rows), torch.where(index.unsqueeze(1) < 0, 0, x[index]))
    assert torch.equal(launch(calls.gather, x, None, 1, rows), x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_keeps_all_bits(launch, dtype):
    """Infinities, NaN with its payload, denormals, -0."""
    bits = BITS[dtype.itemsize]
    limits = torch.iinfo(bits)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(limits.min, limits.max + 1, (8, 64), generator=g, dtype=bits).view(dtype)
    assert torch.equal(launch(calls.gather, x, None, 1, 8).view(bits), x.view(bits))


@pytest.mark.parametrize(("source", "target"), [(a, b) for a in DTYPES for b in DTYPES if a != b], ids=str)
def test_gather_converts_as_torch_does(launch, source, target):
    """Ties, overflow, denormals: what the wire dtype of an exchange rounds to."""
    g = torch.Generator().manual_seed(0)
    exponent = torch.randint(-30, 20, (16, 64), generator=g)
    x = (torch.randn(16, 64, generator=g) * 2.0**exponent).to(source)
    x[0, :4] = torch.tensor([torch.inf, -torch.inf, -0.0, 65520.0])
    if source == torch.float32:  # half way between two numbers of 10 and of 7 bits
        x[1] = 1 + (2 * torch.arange(64) + 1) * 2.0**-11
        x[2] = 1 + (2 * torch.arange(64) + 1) * 2.0**-8
        x[3] = (2 * torch.arange(64) + 1) * 2.0**-25
    out = launch(calls.gather, x, None, 1, 16, dtype=target)
    bits = BITS[target.itemsize]
    assert torch.equal(out.view(bits), x.to(target).view(bits))


@pytest.mark.parametrize("seed", range(45))
def test_combine(launch, seed):
    case = Case(seed)
    rows_MD = case.normal(case.rows, case.width)
    rows_MD[case.kept :] = torch.nan  # not to be read
    weight = case.weight_TK if seed % 4 else None
    bias = case.normal(case.experts, case.width) if case.limit is not None and seed % 3 else None
    end = None if bias is None else case.end
    out = launch(calls.combine, rows_MD, case.plan.inverse_TK, weight, case.limit, bias, end)
    weight = torch.ones_like(case.weight_TK) if weight is None else weight
    kept_MD = rows_MD[: case.kept].double()
    if bias is not None:
        kept_MD += bias.double().repeat_interleave(case.plan.count_E, 0)
    case.close(out, reference.combine(kept_MD, weight.double(), case.plan.inverse_TK), "out")


@pytest.mark.parametrize("seed", range(27))
def test_jitter(launch, seed):
    """The noise of the switch gate's plain path, however tokens lie in memory."""
    case = Case(seed)
    sequences = case.draw.choice([1, 2, 4]) if case.tokens == 40 else 1
    length = case.tokens // sequences
    size = case.draw.choice([None, 7])
    key = 12345678901234567 * (seed + 1)
    groups = RoutingGroups(sequences, length, size=size, sequence_first=True, first_group=seed, noise_key=lambda: key)
    by_sequence, length = memory_shape(groups)
    tiles = TokenTiles(case.tokens, groups.size, by_sequence, max(length, 1))
    noise_TD = 1 + 0.3 * (2 * groups.local_uniform16(case.width, "noise", torch.device("cpu")).double() - 1)
    x = case.normal(case.tokens, case.width)
    drawn = (groups.key_on_host("noise"), seed, 0.3, tiles)
    if seed % 2:
        addend = case.normal(case.tokens, case.width)
        case.close(launch(calls.jitter, x, *drawn, addend), x.double() * noise_TD + addend.double(), "out")
    else:
        change = torch.empty_like(x)
        out = launch(calls.jitter, x, *drawn, change_TD=change)
        case.close(out, x.double() * noise_TD, "out")
        case.close(change, x.double() * (noise_TD - 1), "change")


@pytest.mark.parametrize("seed", range(54))
def test_combine_backward(launch, seed):
    case = Case(seed)
    rows_MD = case.normal(case.rows, case.width)
    d_out = case.normal(case.tokens, case.width)
    weight = case.weight_TK if seed % 5 != 3 else None
    needs = {"needs_rows": seed % 5 != 1, "needs_weight": seed % 5 != 2}
    found = launch(calls.combine_backward, d_out, rows_MD, case.plan.inverse_TK, weight, case.limit, **needs)
    leaf = rows_MD.double().requires_grad_()
    weight = (torch.ones_like(case.weight_TK) if weight is None else weight).double().requires_grad_()
    reference.combine(leaf[: case.kept], weight, case.plan.inverse_TK).backward(d_out.double())
    for (name, is_needed), gradient, expected in zip(needs.items(), found, (leaf.grad, weight.grad), strict=True):
        assert is_needed == (gradient is not None)
        if is_needed:
            case.close(gradient, expected, name)


@pytest.mark.parametrize("seed", range(18))
def test_add_bias(launch, seed):
    case = Case(seed)
    x = case.normal(case.tokens * case.top_k, case.width)
    bias_ED = case.normal(case.experts, case.width)
    expected = torch.zeros_like(x).double()
    expected[: case.kept] = x[: case.kept].double() + bias_ED.double().repeat_interleave(case.plan.count_E, 0)
    launch(calls.add_bias, x, bias_ED, case.end)
    case.close(x, expected, "out")


@pytest.mark.parametrize("seed", range(54))
def test_bias_gradients(launch, seed):
    """Each gradient alone and with the others; of tokens, and of rows that came from other ranks."""
    case = Case(seed)
    plan = case.plan
    height = case.draw.choice([1, 31, 64, 72])
    rows = case.tokens * case.top_k
    of_tokens = seed % 5 != 0
    needs_in, needs_out, needs_x, needs_weight = (case.draw.random() < 0.6 for _ in range(4))
    needs_x = of_tokens and needs_x
    needs_weight = of_tokens and needs_weight
    weight = case.weight_TK if of_tokens and seed % 4 else None
    d_out = case.normal(case.tokens if of_tokens else case.kept, case.width)
    d_hidden = case.normal(rows, height)
    d_rows = case.normal(rows, case.width)
    bias = case.normal(case.experts, case.width)
    d_hidden[case.kept :] = d_rows[case.kept :] = torch.nan  # not to be read
    d_weight = torch.randn(case.tokens, case.top_k, generator=case.g)
    before = d_weight.double()
    d_bias_in, d_bias_out, d_x = launch(
        calls.bias_gradients,
        d_out,
        d_hidden,
        case.end,
        plan.perm_N if of_tokens else None,
        weight,
        needs_in=needs_in,
        needs_out=needs_out,
        inverse_TK=plan.inverse_TK if of_tokens else None,
        limit=plan.count_E.sum().view(1) if of_tokens else None,
        d_rows_MD=d_rows if needs_x else None,
        bias_out_LD=bias if needs_weight else None,
        d_weight_TK=d_weight if needs_weight else None,
    )
    index = plan.perm_N[: case.kept]
    weighted = d_out.double()[index // case.top_k] if of_tokens else d_out.double()
    if weight is not None:
        weighted = weighted * weight.double().reshape(-1, 1)[index]

    def by_expert(rows_MD):
        return torch.stack([part.sum(0) for part in rows_MD.split(plan.count_E.tolist())])

    ones_TK = torch.ones_like(case.weight_TK).double()
    expected = [
        by_expert(d_hidden[: case.kept].double()),
        by_expert(weighted),
        reference.combine(d_rows[: case.kept].double(), ones_TK, plan.inverse_TK),
    ]
    names = ("first bias", "second bias", "tokens")
    for name, is_needed, gradient, right in zip(
        names, (needs_in, needs_out, needs_x), (d_bias_in, d_bias_out, d_x), expected, strict=True
    ):
        assert is_needed == (gradient is not None)
        if is_needed:
            case.close(gradient, right, name)
    if needs_weight:
        expert_TK = torch.searchsorted(case.end.long(), plan.inverse_TK, right=True).clamp(max=case.experts - 1)
        dots_TE = d_out.double() @ bias.double().t()
        case.close(d_weight, before + torch.where(plan.kept_TK, dots_TE.gather(1, expert_TK), 0), "weights")
