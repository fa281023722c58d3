"""Published scaling laws of mixtures of experts, and the sizes that they predict losses for.

``laws.toml`` has the equations and coefficients with their sources.
"""

import math
import tomllib
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NamedTuple


class Law(NamedTuple):
    """A law, its fitted range, and the models that it was fitted on.

    Attributes:
        source, equation: text for people.
        form: key of `FORMS`.
        fitted: lowest and highest value of figures in the experiments; `pretrain.planner.sizing.figures` names them.
        expansions: numbers of experts per layer to choose from, before the split by granularity.
        granularities: numbers of parts to choose from, into which an expert is split.
        attention, ffn: parameters of a layer's attention and of its feed-forward block, or of one expert before the
            split, relative to the square of the width.
        hidden: hidden width of such a block, relative to the width.
        every: every n-th layer has experts.
        vocabulary: rows of the embedding and of the output matrix; 0 if the law does not count them.
        router_flops: training FLOPs per token and parameter of a router.
        fixed_tokens: training tokens of all experiments; 0 if the law varies them.
        batch_tokens: tokens per step.
        recipe: recipe keys that do not depend on the size, by section.
    """

    source: str
    equation: str
    form: str
    coefficients: dict[str, float]
    fitted: dict[str, list[float]]
    expansions: list[int]
    granularities: list[int]
    attention: int
    ffn: int
    hidden: int
    every: int
    vocabulary: int
    router_flops: int
    fixed_tokens: float
    batch_tokens: int
    recipe: dict[str, dict[str, Any]]


_TABLES = tomllib.loads(Path(__file__).with_name("laws.toml").read_text("utf-8"))
OWN_STUDY: dict[str, Any] = _TABLES.pop("fmoe")
"""This project's study as an entry of `pretrain.planner.sizing.plan`. It varies experts only, so it gives no size."""
LAWS = {name: Law(**table) for name, table in _TABLES.items()}


class Size(NamedTuple):
    """A model that trains with a budget. Parameters and FLOPs are counted as the law counts them.

    Attributes:
        flops: budget of training FLOPs.
        expansion: routed experts per layer, before the split by granularity.
    """

    law: Law
    flops: float
    expansion: int
    granularity: int
    layers: int
    width: int

    @property
    def active(self) -> float:
        """Number of parameters that a token uses."""
        law = self.law
        layer = (law.attention + law.ffn) * self.width**2
        return self.layers * layer + 2 * law.vocabulary * self.width

    @property
    def total(self) -> float:
        """Number of parameters without routers and norms."""
        others = (self.expansion - 1) * self.law.ffn * self.width**2
        return self.active + self.layers / self.law.every * others

    @property
    def flops_per_token(self) -> float:
        """Training FLOPs per token, without attention's scores."""
        router = self.layers * self.width * self.expansion * self.granularity
        return 6 * self.active + self.law.router_flops * router

    @property
    def tokens(self) -> float:
        """Training tokens: all that the budget allows, or the number that the law fixes."""
        return self.law.fixed_tokens or self.flops / self.flops_per_token

    @property
    def loss(self) -> float:
        """Predicted loss in nats per token, on the text and with the tokenizer of the law's experiments."""
        return FORMS[self.law.form](self, SimpleNamespace(**self.law.coefficients))


def _clark(size: Size, k: Any) -> float:
    parameters = math.log10(size.active)
    experts = math.log10(_saturated(size, k))
    return 10 ** (k.a * parameters + k.b * experts + k.c * parameters * experts + k.d)


def _krajewski(size: Size, k: Any) -> float:
    model = k.g / size.granularity**k.gamma + k.a
    return k.c + model / size.total**k.alpha + k.b / size.tokens**k.beta


def _ludziejewski(size: Size, k: Any) -> float:
    experts = _saturated(size, k)
    model = experts**k.delta * size.active ** (k.alpha + k.gamma * math.log(experts))
    data = experts**k.omega * size.tokens ** (k.beta + k.zeta * math.log(experts))
    return k.a * model + k.b * data + k.c


def _saturated(size: Size, k: Any) -> float:
    """Return E' of arXiv 2202.01169, equation 1: ``e_start`` for one expert, and at most ``e_max``."""
    first = 1 / (1 / k.e_start - 1 / k.e_max)
    return 1 / (1 / (size.expansion - 1 + first) + 1 / k.e_max)


FORMS = {"clark": _clark, "krajewski": _krajewski, "ludziejewski": _ludziejewski}
"""Functions of a size and the coefficients that return the loss."""
