"""Kernels that move rows, against fmoe.kernels.reference in float64 and its gradients."""

import random

import geometry
import pytest
import torch
from compare import assert_close
from emulator import InOut, Output
from kernel_list import NAMES

from fmoe.kernels import reference
from fmoe.kernels.gates import memory_shape
from fmoe.kernels.rows import DispatchPlan
from fmoe.routing import Routing, RoutingGroups

TOLERANCE = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}
DTYPES = list(NAMES)
WIDTHS = [1, 3, 8, 24, 40, 63, 64, 200, 256, 1100]


class Case:
    """Tokens and their plan, drawn from a seed; every third is kept from 16-byte alignment by the fixture."""

    def __init__(self, seed):
        self.draw, self.g = random.Random(seed), torch.Generator().manual_seed(seed)
        self.dtype = DTYPES[seed // 3 % 3]
        self.tokens, self.experts = self.draw.choice([0, 1, 6, 17, 40]), self.draw.choice([1, 2, 5, 16])
        self.top_k = self.experts if seed % 7 == 0 else self.draw.randint(1, min(4, self.experts))
        self.width = self.draw.choice(WIDTHS)
        expert_TK = torch.rand(self.tokens, self.experts, generator=self.g).argsort(1)[:, : self.top_k].clone()
        expert_TK[torch.rand(expert_TK.shape, generator=self.g) < self.draw.choice([0, 0, 0.3, 1.0])] = -1
        self.plan = DispatchPlan.from_routing(Routing(expert_TK, expert_TK.float()), self.experts)
        self.kept = int(self.plan.count_E.sum())
        self.limit = self.plan.count_E.sum().view(1)
        self.weight_TK = torch.rand(expert_TK.shape, generator=self.g)
        self.name = NAMES[self.dtype]
        self.at_once = 16 // self.dtype.itemsize

    def normal(self, *shape, dtype=None):
        return torch.randn(*shape, generator=self.g).to(dtype or self.dtype)

    def end(self):
        return self.plan.count_E.cumsum(0).int()


@pytest.mark.parametrize("seed", range(54))
def test_gather(launch, seed):
    case = Case(seed)
    out_dtype = case.dtype if seed % 2 else case.draw.choice(DTYPES)
    n, total = 16 // min(case.dtype.itemsize, out_dtype.itemsize), case.tokens * case.top_k
    x_TD = case.normal(case.tokens, case.width)
    scale = case.weight_TK if case.draw.random() < 0.4 else None
    limit, rows = (case.limit, total) if seed % 5 else (None, case.kept)
    (out,) = launch(
        f"fmoe::gather<{case.name}, {NAMES[out_dtype]}>", geometry.rows(rows, case.width, n),
        x_TD, case.plan.perm_N, case.top_k, scale, limit, rows, case.width, Output((rows, case.width), out_dtype),
    )  # fmt: skip
    expected = reference.permute(x_TD.double(), case.plan.perm_N, case.plan.inverse_TK, case.kept)
    if scale is not None:
        expected = expected * scale.double().reshape(-1, 1)[case.plan.perm_N[: case.kept]]
    assert not out[case.kept :].any()  # the dropped tail
    if scale is None:
        assert torch.equal(out[: case.kept], expected.to(case.dtype).to(out_dtype))
    else:
        assert_close(out[: case.kept], expected, max(TOLERANCE[case.dtype], TOLERANCE[out_dtype]), "rows")


@pytest.mark.parametrize("seed", range(12))
def test_gather_as_reordering_and_padding(launch, seed):
    """A permutation; then places that nothing is at."""
    case = Case(seed)
    rows = case.draw.choice([1, 9, 50])
    x = case.normal(rows, case.width)
    index = torch.randperm(rows, generator=case.g)
    if seed % 2:
        index[torch.rand(rows, generator=case.g) < 0.4] = -1
    kernel, shape = f"fmoe::gather<{case.name}, {case.name}>", geometry.rows(rows, case.width, case.at_once)
    (out,) = launch(kernel, shape, x, index, 1, None, None, rows, case.width, Output(x.shape, x.dtype))
    assert torch.equal(out, torch.where(index.unsqueeze(1) < 0, 0, x[index]))
    (out,) = launch(kernel, shape, x, None, 1, None, None, rows, case.width, Output(x.shape, x.dtype))
    assert torch.equal(out, x)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gather_keeps_all_bits(launch, dtype):
    """Infinities, NaN with its payload, denormals, -0."""
    bits = {4: torch.int32, 2: torch.int16}[dtype.itemsize]
    limits = torch.iinfo(bits)
    g = torch.Generator().manual_seed(0)
    x = torch.randint(limits.min, limits.max + 1, (8, 64), generator=g, dtype=bits).view(dtype)
    (out,) = launch(
        f"fmoe::gather<{NAMES[dtype]}, {NAMES[dtype]}>", geometry.rows(8, 64, 16 // dtype.itemsize),
        x, None, 1, None, None, 8, 64, Output(x.shape, dtype),
    )  # fmt: skip
    assert torch.equal(out.view(bits), x.view(bits))


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
    (out,) = launch(
        f"fmoe::gather<{NAMES[source]}, {NAMES[target]}>", geometry.rows(16, 64, 8),
        x, None, 1, None, None, 16, 64, Output(x.shape, target),
    )  # fmt: skip
    bits = {4: torch.int32, 2: torch.int16}[target.itemsize]
    assert torch.equal(out.view(bits), x.to(target).view(bits))


@pytest.mark.parametrize("seed", range(45))
def test_combine(launch, seed):
    case = Case(seed)
    total = case.tokens * case.top_k
    limit, rows = (case.limit, total) if seed % 2 else (None, case.kept)
    rows_MD = case.normal(rows, case.width)
    rows_MD[case.kept :] = torch.nan  # not to be read
    weight = case.weight_TK if seed % 4 else None
    bias = case.normal(case.experts, case.width) if limit is not None and seed % 3 else None
    end = None if bias is None else case.end()
    (out,) = launch(
        f"fmoe::combine<{case.name}>", geometry.rows(case.tokens, case.width, case.at_once), rows_MD,
        case.plan.inverse_TK, weight, limit, bias, end, case.experts, case.tokens, case.top_k, rows, case.width,
        Output((case.tokens, case.width), case.dtype),
    )  # fmt: skip
    weight = torch.ones_like(case.weight_TK) if weight is None else weight
    kept_MD = rows_MD[: case.kept].double()
    if bias is not None:
        kept_MD += bias.double().repeat_interleave(case.plan.count_E, 0)
    expected = reference.combine(kept_MD, weight.double(), case.plan.inverse_TK)
    assert_close(out, expected, TOLERANCE[case.dtype], "out")


@pytest.mark.parametrize("seed", range(27))
def test_jitter(launch, seed):
    """The noise of the switch gate's plain path, however tokens lie in memory."""
    case = Case(seed)
    sequences = case.draw.choice([1, 2, 4]) if case.tokens == 40 else 1
    groups = RoutingGroups(
        sequences, case.tokens // sequences, size=case.draw.choice([None, 7]), sequence_first=True, first_group=seed,
        noise_key=lambda: 12345678901234567 * (seed + 1),
    )  # fmt: skip
    noise_TD = 1 + 0.3 * (2 * groups.local_uniform16(case.width, "noise", torch.device("cpu")).double() - 1)
    x, addend = case.normal(case.tokens, case.width), case.normal(case.tokens, case.width) if seed % 2 else None
    shape = (groups.size, memory_shape(groups)[0], max(memory_shape(groups)[1], 1))
    outputs = [Output(x.shape, x.dtype) if is_wanted else None for is_wanted in (seed % 5 != 1, seed % 5 != 2)]
    found = launch(
        f"fmoe::jitter<{case.name}>", geometry.rows(case.tokens, case.width, case.at_once), x, addend,
        groups.key_on_host("noise"), seed, 0.3, case.tokens, case.width, *shape, *outputs,
    )  # fmt: skip
    out = x.double() * noise_TD + (0 if addend is None else addend.double())
    expected = [value for value, output in zip((out, x.double() * (noise_TD - 1)), outputs, strict=True) if output]
    for value, wanted in zip(found, expected, strict=True):
        assert_close(value, wanted, TOLERANCE[case.dtype], "jitter")


@pytest.mark.parametrize("seed", range(54))
def test_combine_backward(launch, seed):
    case = Case(seed)
    total = case.tokens * case.top_k
    limit, rows = (case.limit, total) if seed % 2 else (None, case.kept)
    rows_MD, d_out = case.normal(rows, case.width), case.normal(case.tokens, case.width)
    wants_rows, wants_weight = seed % 5 != 1, seed % 5 != 2
    has_weight = seed % 5 != 3
    found = launch(
        f"fmoe::combine_backward<{case.name}>", geometry.rows(case.tokens, case.width, case.at_once, 4), d_out,
        rows_MD if wants_weight else None, case.plan.inverse_TK, case.weight_TK if has_weight else None, limit,
        case.tokens, case.top_k, rows, case.width,
        Output((rows, case.width), case.dtype) if wants_rows else None,
        Output((case.tokens, case.top_k), torch.float32) if wants_weight else None,
    )  # fmt: skip
    leaf = rows_MD.double().requires_grad_()
    weight = (case.weight_TK if has_weight else torch.ones_like(case.weight_TK)).double().requires_grad_()
    reference.combine(leaf[: case.kept], weight, case.plan.inverse_TK).backward(d_out.double())
    if wants_weight:
        assert_close(found.pop(), weight.grad, 1e-5, "d_weight")  # from the same 16-bit numbers, in float
    if wants_rows:
        assert_close(found.pop(), leaf.grad, TOLERANCE[case.dtype], "d_rows")


@pytest.mark.parametrize("seed", range(18))
def test_add_bias(launch, seed):
    case = Case(seed)
    rows = case.tokens * case.top_k
    x, bias_ED = case.normal(rows, case.width), case.normal(case.experts, case.width)
    in_place = InOut(x)
    (out,) = launch(
        f"fmoe::add_bias<{case.name}>", geometry.rows(rows, case.width, case.at_once), in_place if seed % 2 else x,
        bias_ED, case.end(), case.experts, rows, case.width, in_place if seed % 2 else Output(x.shape, case.dtype),
    )  # fmt: skip
    expected = torch.zeros_like(x).double()
    expected[: case.kept] = x[: case.kept].double() + bias_ED.double().repeat_interleave(case.plan.count_E, 0)
    assert_close(out, expected, TOLERANCE[case.dtype], "out")


@pytest.mark.parametrize("seed", range(54))
def test_bias_gradients(launch, seed):
    """Each gradient alone and with the others; of tokens, and of rows that came from other ranks."""
    case = Case(seed)
    plan, end, height, rows = case.plan, case.end(), case.draw.choice([1, 31, 64, 72]), case.tokens * case.top_k
    of_tokens, has_weight = seed % 5 != 0, seed % 4 != 0
    wants = [case.draw.random() < 0.6 for _ in range(4)]  # first bias, second bias, tokens, weights
    wants = wants if of_tokens else [*wants[:2], False, False]
    per, rows_of_grad = (case.top_k, case.tokens) if of_tokens else (1, case.kept)
    d_out, d_hidden = case.normal(rows_of_grad, case.width), case.normal(rows, height)
    d_rows, bias = case.normal(rows, case.width), case.normal(case.experts, case.width)
    d_hidden[case.kept :], d_rows[case.kept :] = torch.nan, torch.nan  # not to be read
    order, weight = (plan.perm_N, case.weight_TK if has_weight else None) if of_tokens else (None, None)
    before = torch.randn(case.tokens, case.top_k, generator=case.g)
    shapes = ((case.experts, height), (case.experts, case.width), (case.tokens, case.width))
    d_bias_in, d_bias_out, d_x = (
        Output(shape, case.dtype) if want else None for shape, want in zip(shapes, wants[:3], strict=True)
    )
    columns = [n for n, want in zip((height, case.width), wants[:2], strict=True) if want]
    tokens = case.tokens if of_tokens else 0
    found = launch(
        f"fmoe::bias_gradients<{case.name}>",
        geometry.bias_gradients(columns, case.experts, tokens, case.width, case.at_once), d_out, order, weight,
        d_hidden, end, case.experts, case.width, height, d_bias_in, d_bias_out, plan.inverse_TK if of_tokens else None,
        case.limit if of_tokens else None, tokens, per, rows, d_rows if wants[2] else None, d_x,
        bias if wants[3] else None, InOut(before) if wants[3] else None,
    )  # fmt: skip
    index = plan.perm_N[: case.kept]
    weighted = d_out.double()[index // per] if of_tokens else d_out.double()
    if weight is not None:
        weighted = weighted * weight.double().reshape(-1, 1)[index]
    sums = [
        [part.sum(0) for part in t.split(plan.count_E.tolist())] for t in (d_hidden[: case.kept].double(), weighted)
    ]
    ones_TK, kept_MD = torch.ones_like(case.weight_TK).double(), d_rows[: case.kept].double()
    expected = [*map(torch.stack, sums), reference.combine(kept_MD, ones_TK, plan.inverse_TK), before.double()]
    if of_tokens:
        expert_TK = torch.searchsorted(end.long(), plan.inverse_TK, right=True).clamp(max=case.experts - 1)
        dots_TE = d_out.double() @ bias.double().t()
        expected[3] += torch.where(plan.kept_TK, dots_TE.gather(1, expert_TK), 0)
    names, limits = ("first bias", "second bias", "tokens", "weights"), [TOLERANCE[case.dtype]] * 3 + [1e-5]
    wanted = [given for given in zip(expected, limits, names, wants, strict=True) if given[-1]]
    for value, (right, limit, name, _) in zip(found, wanted, strict=True):
        assert_close(value, right, limit, name)
