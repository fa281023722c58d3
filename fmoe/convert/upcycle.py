"""Sparse upcycling: a dense feed-forward block becomes experts (arXiv 2212.05055), and the output is unchanged.

Every expert starts as the dense block f, so that a token whose experts have weights w_k gets ``(sum_k w_k) f(x)``. The
sum depends on the gate: 1 for softmax over the chosen experts, a probability for Switch, less where assignments are
dropped. `plan_upcycling` works for any gate, because it runs the layer on a small block and measures the sum.

A sum that is the same for all tokens is divided out of the experts' output maps. If the sum differs between tokens,
``exact=False`` divides out its median. With ``exact=True``, the router then starts with logits near zero. If the sum
still differs, an error is raised.

**Granularity m** makes experts of H / m hidden units (virtual groups, arXiv 2410.07524): expert e holds slice
``e mod m`` of the hidden units. The m experts of a group have the same router weights, so a token's K choices are K / m
whole groups, each of which adds up to the dense block.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from fmoe import random
from fmoe.convert.blocks import Block, LinearMap, is_elementwise
from fmoe.errors import UserError
from fmoe.moe import MoE

# Router logits of this size make all probabilities 1 / E, up to the tolerance of the comparison (1e-5 in float32), but
# still rank the experts.
_QUIET_LOGIT = 1e-6
_QUIET_LOGIT_16_BIT = 1e-3
_TOLERANCE = 1e-5


@dataclass(frozen=True)
class Upcycling:
    """Settings with which `upcycle_` makes experts from a dense block.

    Attributes:
        scale: factor of the experts' output maps (weight and bias).
        is_quiet: whether the router starts with logits near zero, so that its probabilities are 1 / E.
        granularity: number of experts that one copy of the block is split into.
        noise: standard deviation of Gaussian noise on the weights, relative to their root mean square.
    """

    scale: float = 1.0
    is_quiet: bool = False
    granularity: int = 1
    noise: float = 0.0


@torch.no_grad()
def upcycle_(layer: MoE, block: Block, how: Upcycling) -> None:
    """Fill the experts of ``layer`` from ``block``.

    The router's weight changes too if ``how.is_quiet`` is True or ``how.granularity`` is above 1. The experts are
    `fmoe.experts.FFNExperts` of hidden width ``block.d_hidden / how.granularity``. Like initial weights, noise depends
    on (seed of the layer, global expert id, name of the parameter).
    """
    experts = layer.experts
    granularity = how.granularity
    width = block.d_hidden // granularity
    for local in range(experts.weight_in.shape[0]):
        expert = layer.first_expert + local
        part = slice(expert % granularity * width, (expert % granularity + 1) * width)
        output = block.map_out
        values = {
            "weight_in": torch.cat([m.weight[part] for m in block.maps_in]),
            "weight_out": output.weight[:, part] * how.scale,
        }
        if block.has_bias:
            values["bias_in"] = torch.cat(
                [m.weight.new_zeros(width) if m.bias is None else m.bias[part] for m in block.maps_in]
            )
            bias_out = output.weight.new_zeros(block.d_model) if output.bias is None else output.bias
            values["bias_out"] = bias_out * (how.scale / granularity)
        for name, value in values.items():
            if how.noise and name.startswith("weight"):
                with random.keyed("upcycling noise", layer.seed, expert, name):
                    noise = torch.randn(value.shape, dtype=torch.float32, device="cpu")
                size = how.noise * value.float().square().mean().sqrt()
                value = value + (noise.to(value.device) * size).to(value.dtype)
            getattr(experts, name)[local].copy_(value)
    router = _router(layer)
    if how.is_quiet and router is not None:
        bound = _QUIET_LOGIT_16_BIT if torch.finfo(router.dtype).bits == 16 else _QUIET_LOGIT
        router.mul_(bound / router.float().square().sum(1).mean().sqrt().clamp(min=1e-30))
    if granularity > 1 and router is not None:
        router.copy_(router[::granularity].repeat_interleave(granularity, 0))


def plan_upcycling(
    build: Callable[[Block], MoE],
    block: Block,
    *,
    granularity: int = 1,
    exact: bool = True,
    noise: float = 0.0,
    gate: str | None = None,
) -> Upcycling:
    """Find, by trials on small layers, settings that leave the model's output unchanged except for ``noise``.

    Args:
        build: returns an MoE for a block, with all options of the final layers.
        block: one of the model's blocks.
        exact: False accepts a changed output, for example because the gate drops tokens, or because the sum of the
            combine weights differs between tokens. The experts are then scaled so that the median token gets the
            block's output.
        gate: name of the gate in messages; None for its class.

    Raises:
        UserError: ``exact`` is True, but the output would change; ``exact`` is False, but the block's output is lost
            (no token gets a multiple of it, or most tokens get zero); ``noise`` is negative; the gate does not support
            ``granularity``.
    """
    if noise < 0:
        raise UserError(f"noise={noise} must be at least 0")
    trial = _trial_block(block, granularity)
    layer = build(trial)
    gate = gate or type(layer.gate).__name__
    if granularity > 1:
        _check_granularity(layer.gate, granularity, _router(layer), gate)
    share_T = _shares(layer, trial, Upcycling(granularity=granularity))
    if layer.shared is not None and share_T.isnan().all():
        raise UserError(
            "shared_expert is not supported with upcycle=True: its output would be added to that of the dense block; "
            "omit shared_expert, or pass upcycle=False"
        )
    if not exact:
        share = share_T.nanmedian().item()
        if not abs(share) > 1e-6:
            what = "no token gets a multiple of" if math.isnan(share) else "most tokens get none of"
            raise UserError(f"gate={gate} is not supported with upcycle=True: {what} the output of the dense block")
        return Upcycling(_factor(share), False, granularity, noise)
    scale = _constant(share_T)
    if scale is not None:
        return Upcycling(scale, False, granularity, noise)
    reasons = _what_drops(layer.gate)
    if not reasons and granularity == 1 and _router(layer) is not None:
        scale = _constant(_shares(build(trial), trial, Upcycling(is_quiet=True)))
        if scale is not None:
            return Upcycling(scale, True, granularity, noise)
    if reasons:
        options = {name: value for _, changes in reasons for name, value in changes.items()}
        raise UserError(
            f"upcycle=True cannot keep the model's output with gate={gate}: {' and '.join(t for t, _ in reasons)}; "
            f"pass gate_options={options}, or exact=False to accept a changed output"
        )
    raise UserError(
        f"upcycle=True cannot keep the model's output with gate={gate}"
        + (f" and granularity={granularity}" if granularity > 1 else "")
        + f": {_spread(share_T)}, which no constant factor corrects; pass a gate whose weights sum to one "
        "(gate='naive'), or exact=False to accept a changed output"
    )


def check_block(block: Block, name: str, granularity: int) -> None:
    """Raise a UserError that names the block if its weights or its activation do not allow upcycling."""
    if any(t.is_meta for t in block.tensors):
        raise UserError(f"upcycle=True needs the weights of {name}, which is on the meta device: load them first")
    if block.d_hidden % granularity:
        raise UserError(f"granularity={granularity} does not divide the {block.d_hidden} hidden units of {name}")
    if granularity > 1 and not is_elementwise(block.activation):
        raise UserError(
            f"granularity={granularity} needs an elementwise activation, and that of {name} combines values of a row: "
            "use granularity=1"
        )


def _check_granularity(gate: nn.Module, granularity: int, router: Tensor | None, name: str) -> None:
    if router is None:
        raise UserError(f"granularity={granularity} needs a gate with a router `weight` [E, D], not gate={name}")
    for key, value in (("num_experts", router.shape[0]), ("top_k", getattr(gate, "top_k", granularity))):
        if value % granularity:
            raise UserError(
                f"{key}={value} is not divisible by granularity={granularity}, the number of experts that form a copy "
                "of the dense block: a token must get all of them"
            )


def _router(layer: MoE) -> Tensor | None:
    weight = getattr(layer.gate, "weight", None)
    return weight if torch.is_tensor(weight) and weight.shape == (layer.num_experts, layer.layout.d_model) else None


def _trial_block(block: Block, granularity: int) -> Block:
    """Return a block of the same width and few hidden units, on the CPU in float32."""
    like: dict[str, Any] = {"generator": torch.Generator().manual_seed(0), "dtype": torch.float32, "device": "cpu"}
    width = block.d_model
    hidden = 4 * granularity
    weight_in = torch.randn(hidden, width, **like) / width**0.5
    weight_out = torch.randn(width, hidden, **like) / hidden**0.5
    maps = (LinearMap(weight_in),), LinearMap(weight_out, torch.randn(width, **like))
    return Block(*maps, activation=F.relu, module=nn.Identity(), sequence_first=block.sequence_first)


@torch.no_grad()
def _shares(layer: MoE, block: Block, how: Upcycling) -> Tensor:
    """Return, for some tokens, the factor between the outputs of ``layer`` and ``block``; NaN without a factor."""
    # First in training, then in evaluation mode.
    # Half of the tokens are equal, so that they crowd the same experts. The others are random, and every second of them
    # has nearly equal router logits for two copies of the block.
    upcycle_(layer, block, how)
    mode = layer.training
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(2, 64, block.d_model, generator=generator, dtype=torch.float32, device="cpu")
    x[1] = x[1, :1]
    router = _router(layer)
    if router is not None and len(router) > how.granularity:
        ranked = (x[0, ::2] @ router.T).topk(how.granularity + 1).indices
        best, other = router[ranked[:, [0, -1]]].unbind(1)
        apart = F.normalize(best - other, dim=1)
        x[0, ::2] -= 0.999 * (x[0, ::2] * apart).sum(1, keepdim=True) * apart
    x = x.transpose(0, 1).contiguous() if block.sequence_first else x
    dense = block(x).double()
    shares = []
    for training in (True, False):
        layer.train(training)
        with random.keyed("upcycling trial", layer.seed):
            y = layer(x).to(dense)
        share = (y * dense).sum(-1) / dense.square().sum(-1)
        off = (y - share.unsqueeze(-1) * dense).norm(dim=-1) > _TOLERANCE * dense.norm(dim=-1)
        shares.append(share.masked_fill(off, torch.nan).flatten())
    layer.train(mode)
    return torch.cat(shares)


def _constant(share_T: Tensor) -> float | None:
    """Return the factor that turns every share into 1, up to rounding; None if there is no such factor."""
    mean = share_T.mean()
    if not mean.abs() > 1e-6 or not (share_T - mean).abs().max() <= _TOLERANCE * mean.abs():
        return None
    return _factor(mean.item())


def _factor(share: float) -> float:
    return 1.0 if abs(share - 1) < 1e-6 else 1 / share


def _spread(share_T: Tensor) -> str:
    if share_T.isnan().any():
        return "some tokens get a value that is not a multiple of the dense block's output"
    return f"tokens get {share_T.min():.3g} to {share_T.max():.3g} times the dense block's output"


def _what_drops(gate: nn.Module) -> list[tuple[str, dict]]:
    """Return the reasons why a gate drops tokens, as far as its attributes show them.

    Each reason comes with the gate options that prevent these drops.
    """
    reasons = []
    never = getattr(gate, "num_experts", 0) / max(getattr(gate, "top_k", 1) or 1, 1)  # no expert can be full then
    factors = {n: getattr(gate, n, None) for n in ("capacity_factor", "eval_capacity_factor")}
    limits = {n: f for n, f in factors.items() if isinstance(f, int | float) and f < never}
    if limits:
        text = ", ".join(f"{name}={value}" for name, value in limits.items())
        reasons.append((f"it drops tokens over capacity ({text})", dict.fromkeys(limits)))
    if getattr(gate, "random_routing", False) and getattr(gate, "top_k", 1) > 1:
        reasons.append(("it drops second experts at random in training", {"random_routing": False}))
    return reasons
