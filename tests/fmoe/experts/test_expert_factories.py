"""Experts of one's own: their signatures decide which arguments they get, by name and by class alike."""

import functools

import pytest
import torch
from torch import nn

import fmoe
from fmoe.experts import EXPERTS, FFNExperts, register_expert


class Made(nn.Module):
    """An expert, or all experts of a rank, that keeps what it was made with."""

    def __init__(self, **arguments):
        super().__init__()
        self.arguments = arguments
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, rows, counts=None):
        return rows * self.weight


class Narrow(Made):
    def __init__(self, d_model):
        super().__init__(d_model=d_model)


class Wide(Made):
    def __init__(self, d_model, d_hidden):
        super().__init__(d_model=d_model, d_hidden=d_hidden)


class OtherNames(Made):
    def __init__(self, dim, inner, *, bias=True):
        super().__init__(dim=dim, inner=inner, bias=bias)


class Default(Made):
    def __init__(self, d_model, bias=True, d_hidden=7):
        super().__init__(d_model=d_model, d_hidden=d_hidden, bias=bias)


class Keywords(Made):
    def __init__(self, *, d_hidden, d_model):
        super().__init__(d_model=d_model, d_hidden=d_hidden)


class AllOfARank(Made):
    def __init__(self, num_experts, d_model, d_hidden, scale=1.0):
        super().__init__(num_experts=num_experts, d_model=d_model, d_hidden=d_hidden, scale=scale)


class AllSeeded(Made):
    def __init__(self, num_experts, d_model, d_hidden, *, first_expert, seed, **options):
        super().__init__(num_experts=num_experts, first_expert=first_expert, seed=seed, **options)


class PassesOn(OtherNames):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class PassesAllOn(AllOfARank):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


class NoArguments(nn.Module):
    """A module without a constructor of its own."""


SIZES = {"d_model": 8, "d_hidden": 12}
# factory, options, arguments with d_hidden=12, arguments without d_hidden (the layer's default is 32)
FACTORIES = {
    "width": (Narrow, {}, {"d_model": 8}, {"d_model": 8}),
    "widths": (Wide, {}, SIZES, {"d_model": 8, "d_hidden": 32}),
    "other names": (
        OtherNames,
        {"bias": False},
        {"dim": 8, "inner": 12, "bias": False},
        {"dim": 8, "inner": 32, "bias": False},
    ),
    "default": (
        Default,
        {"bias": 0},
        {**SIZES, "bias": 0},
        {"d_model": 8, "d_hidden": 7, "bias": 0},
    ),
    "keywords": (Keywords, {}, SIZES, {"d_model": 8, "d_hidden": 32}),
    "lambda": (lambda d: Narrow(d), {}, {"d_model": 8}, {"d_model": 8}),
    "positional": (lambda d, /, h: Wide(d, h), {}, SIZES, {"d_model": 8, "d_hidden": 32}),
    "any": (
        lambda *sizes: Default(sizes[0], d_hidden=sizes[-1]),
        {},
        {**SIZES, "bias": True},
        {"d_model": 8, "d_hidden": 8, "bias": True},
    ),
    "partial": (functools.partial(Default, d_hidden=5), {}, {"d_model": 8, "d_hidden": 5, "bias": True}, None),
    "all of a rank": (AllOfARank, {"scale": 2.0}, {"num_experts": 4, **SIZES, "scale": 2.0}, None),
    "passes on": (
        PassesOn,
        {"bias": False},
        {"dim": 8, "inner": 12, "bias": False},
        {"dim": 8, "inner": 32, "bias": False},
    ),
    "passes all on": (PassesAllOn, {"scale": 2.0}, {"num_experts": 4, **SIZES, "scale": 2.0}, None),
    "all, seeded": (AllSeeded, {"x": 1}, {"num_experts": 4, "first_expert": 0, "seed": 3, "x": 1}, None),
}


@pytest.fixture
def registered():
    before = dict(EXPERTS)
    yield register_expert
    EXPERTS.clear()
    EXPERTS.update(before)


def made_by(layer):
    experts = layer.experts if isinstance(layer.experts, Made) else layer.experts[0]
    assert layer(torch.randn(5, 8)).shape == (5, 8)
    return experts.arguments


@pytest.mark.parametrize("cls", [fmoe.MoE, fmoe.FMoE])
@pytest.mark.parametrize("is_named", [False, True], ids=["given", "registered"])
@pytest.mark.parametrize("case", FACTORIES)
def test_a_factory_gets_what_its_signature_takes(registered, case, is_named, cls):
    factory, options, expected, by_default = FACTORIES[case]
    registered("own", factory, stacked=False if case == "any" else None)
    layer = {"d_model": 8, "num_experts": 4, "seed": 3, "expert_options": options}
    layer["expert"] = "own" if is_named else factory
    assert made_by(cls.build(**layer, d_hidden=12)) == expected
    assert made_by(cls.build(**layer)) == (by_default or made_by(cls.build(**layer, d_hidden=32)))


def test_each_entry_of_a_list_has_the_same_contract():
    ready = Narrow(8)
    layer = fmoe.MoE.build(d_model=8, num_experts=3, d_hidden=12, expert=[Wide, Default, ready], seed=0)
    assert [e.arguments for e in layer.experts] == [SIZES, {**SIZES, "bias": True}, {"d_model": 8}]


class Heads(Made):
    def __init__(self, d_model, d_hidden, heads):
        super().__init__(d_model=d_model, d_hidden=d_hidden, heads=heads)


@pytest.mark.parametrize(
    ("expert", "options", "says"),
    [
        (Heads, {}, ["Heads(d_model, d_hidden, heads)", "'heads'", "expert_options"]),
        ([Heads] * 4, {}, ["Heads(d_model, d_hidden, heads)", "'heads'"]),
        ([AllOfARank] * 4, {}, ["AllOfARank(num_experts", "'num_experts'"]),
        (lambda: Narrow(8), {}, ["()", "(d_model)", "(num_experts, d_model, d_hidden)"]),
        (NoArguments, {}, ["NoArguments()", "(d_model)"]),
        (lambda d: 3, {}, ["int", "not a module"]),
        (Wide, {"bias": True}, ["expert_options.bias=True", "Wide"]),
        (Wide, {"d_hidden": 3}, ["expert_options.d_hidden=3", "Wide"]),
        (AllOfARank, {"seed": 3}, ["expert_options.seed=3", "AllOfARank"]),
        (Default, {"bias": None, "x": 2}, ["expert_options.x=2", "bias"]),
        ([Wide] * 4, {"bias": True}, ["expert_options", "bias"]),
        ([3] * 4, {}, ["expert=3"]),
        (Narrow(8), {}, ["one module", "Narrow"]),
    ],
)
def test_a_signature_that_does_not_fit_is_one_error(expert, options, says):
    with pytest.raises(fmoe.UserError) as error:
        fmoe.MoE.build(d_model=8, num_experts=4, d_hidden=12, expert=expert, expert_options=options, seed=0)
    text = str(error.value)
    assert all(word in text for word in says) and "\n" not in text, text


def test_registered_pass_through_makes_all_and_ambiguous_is_refused(registered):
    registered("passes", lambda *a, **k: FFNExperts(*a, **k))
    layer = fmoe.MoE.build(d_model=8, num_experts=4, d_hidden=12, expert="passes", seed=0)
    assert layer.experts.weight_in.shape == (4, 12, 8)
    for factory in (lambda n, d, h: 0, lambda n, *sizes: 0):
        with pytest.raises(fmoe.UserError, match="stacked="):
            registered("ambiguous", factory)
