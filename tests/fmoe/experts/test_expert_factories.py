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


@pytest.mark.parametrize("make", [fmoe.SoftMoE, fmoe.MMoE])
def test_dense_layers_have_the_same_contract(make):
    assert make(8, 4, 2, 12, expert=Wide).experts[0].arguments == SIZES
    assert make(8, 4, 2, expert=Default, expert_options={"bias": 0}).experts[0].arguments["d_hidden"] == 7
    assert make(8, 4, 2, 12, expert=AllOfARank).experts.arguments["num_experts"] == 4


def test_each_entry_of_a_list_has_the_same_contract():
    ready = Narrow(8)
    layer = fmoe.MoE.build(d_model=8, num_experts=3, d_hidden=12, expert=[Wide, Default, ready], seed=0)
    assert [e.arguments for e in layer.experts] == [SIZES, {**SIZES, "bias": True}, {"d_model": 8}]


def test_stacked_overrides_the_signature(registered):
    registered("all", lambda n, width, inner, **_: AllOfARank(n, width, inner), stacked=True)
    registered("one", lambda *sizes: Wide(*sizes), stacked=False)
    registered("ffn too", lambda *sizes, **options: FFNExperts(*sizes, **options), stacked=True)
    build = functools.partial(fmoe.MoE.build, d_model=8, num_experts=4, d_hidden=12, seed=0)
    assert made_by(build(expert="all")) == {"num_experts": 4, **SIZES, "scale": 1.0}
    assert made_by(build(expert="one")) == SIZES
    assert build(expert="ffn too", expert_options={"bias": False}).experts.weight_in.shape == (4, 12, 8)
    gated = build(expert=functools.partial(FFNExperts, gated=True)).experts
    assert gated.gated and gated.num_experts == 4


class Heads(Made):
    def __init__(self, d_model, d_hidden, heads):
        super().__init__(d_model=d_model, d_hidden=d_hidden, heads=heads)


def test_other_arguments_are_options():
    build = functools.partial(fmoe.MoE.build, d_model=8, num_experts=4, d_hidden=12, seed=0, expert=Heads)
    assert made_by(build(expert_options={"heads": 2})) == {**SIZES, "heads": 2}


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


@pytest.mark.parametrize("factory", [3, Narrow(8)], ids=["number", "module"])
def test_only_classes_and_functions_are_registered(registered, factory):
    with pytest.raises(fmoe.UserError, match="expert="):
        registered("own", factory)
    assert "own" not in EXPERTS


def test_errors_of_the_constructor_are_its_own():
    def broken(d_model, d_hidden):
        raise TypeError("of the constructor")

    with pytest.raises(TypeError, match="of the constructor"):
        fmoe.MoE.build(d_model=8, num_experts=4, expert=broken, seed=0)


def test_args_take_sizes_after_named_parameters():
    build = functools.partial(fmoe.MoE.build, d_model=8, num_experts=4, d_hidden=12, seed=0)
    assert made_by(build(expert=lambda d_model, *args, **kw: Made(d=d_model, args=args))) == {"d": 8, "args": (12,)}
    assert made_by(build(expert=lambda dim, bias=1, *args: Made(d=(dim, bias, *args)))) == {"d": (8, 1, 12)}


def test_registered_pass_through_makes_all_and_ambiguous_is_refused(registered):
    registered("passes", lambda *a, **k: FFNExperts(*a, **k))
    layer = fmoe.MoE.build(d_model=8, num_experts=4, d_hidden=12, expert="passes", seed=0)
    assert layer.experts.weight_in.shape == (4, 12, 8)
    for factory in (lambda n, d, h: 0, lambda n, *sizes: 0):
        with pytest.raises(fmoe.UserError, match="stacked="):
            registered("ambiguous", factory)


class Ignores(nn.Identity):
    def __init__(self, *args, **kwargs):
        super().__init__()


class Refused(nn.Module):
    def __init__(self, *args, **kwargs):
        super().__init__(*args, **kwargs)


def test_classes_may_ignore_arguments_but_not_pass_them_to_module():
    for expert in (nn.Identity, Ignores):
        fmoe.MoE.build(d_model=8, num_experts=4, expert=expert, seed=0)
    with pytest.raises(fmoe.UserError, match="Refused"):
        fmoe.MoE.build(d_model=8, num_experts=4, expert=Refused, seed=0)
