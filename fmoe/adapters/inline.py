"""Blocks inside of larger modules, between other things: BART, Pegasus, OPT, ALBERT, BLOOM, XLNet, Funnel, ConvNeXt."""

import math

from torch import nn

from fmoe.adapters.block import Block, addition, is_plain, obstacle
from fmoe.adapters.trace import Pieces, Refusal, keeps_output, lookalikes, near, read_block


def inline(module: nn.Module) -> list[Block | Refusal]:
    """Two linear maps of ``module``, or of its children, with an activation between that can be taken out.

    The MoE layer takes the place of the first map; activation, dropout and second map become `nn.Identity`. All else
    that the module does stays, whatever it is.
    """
    if isinstance(module, nn.Sequential | nn.TransformerEncoderLayer | nn.TransformerDecoderLayer):
        return []
    pairs, names = lookalikes(module), near(module)
    if not pairs or type(module).forward is nn.Module.forward:
        return []
    few = [pair for pair, has_few_beside in pairs.items() if has_few_beside]
    for name in dict.fromkeys(name for pair in few for name in pair):
        if (why := obstacle(names[name])) is not None:
            return [Refusal(f"{name} {why}")]
    removable = any(is_plain(m) and not isinstance(m, nn.Dropout) for m in names.values())
    if not few and not removable and not any(map(callable, vars(module).values())):
        return []  # an attention, say: nothing between its maps could be taken out
    pieces = read_block(module)
    if isinstance(pieces, Refusal):
        return [pieces] if few else []
    slots = {m: _slots(module, m) for m in (*pieces.first, pieces.last, *pieces.between)}
    label = f"{slots[pieces.first[0]][0][1]} and {slots[pieces.last][0][1]}"
    if len(pieces.maps_in) > 1:
        return [Refusal(f"{label} are maps of a gated block, which has to be a module of its own")]
    if (added := next((addition(m) for m in pieces.between if addition(m) is not None), None)) is not None:
        return [Refusal(f"what lies between {label} {added}")]
    out = [*slots[pieces.last], *_activation_slots(module, pieces)]
    if len(out) == len(slots[pieces.last]):
        return [Refusal(f"the activation between {label} is called as a function: make it a module or an attribute")]
    dropouts = [m for m in pieces.between if isinstance(m, nn.Dropout)]
    if any(pieces.counts[m] > 1 + pieces.is_dropped for m in dropouts) or pieces.counts[pieces.activation] > 1:
        return [Refusal(f"what lies between {label} is also called elsewhere")]

    def install(moe: nn.Module) -> None:
        for holder, name in slots[pieces.first[0]]:
            setattr(holder, name, moe)
        for holder, name in out:
            setattr(holder, name, nn.Identity())
        for dropout in dropouts:
            # One that serves behind the block too is called there twice now: two of this rate are one of p.
            left = nn.Dropout(1 - math.sqrt(1 - dropout.p)) if pieces.is_dropped else nn.Identity()
            for holder, name in slots[dropout]:
                setattr(holder, name, left.train(dropout.training))
        if pieces.rate is not None:
            setattr(*pieces.rate, 0.0)

    place = next(name for name, m in near(module).items() if m is pieces.first[0])
    block = Block(module=module, install=install, place=place, **pieces.block)
    if not keeps_output(pieces.trial, block):
        return [Refusal(f"it computes something else once {label} and what lies between are taken out")]
    return [block]


def _slots(owner: nn.Module, wanted: nn.Module) -> list[tuple[nn.Module, str]]:
    """Where a module is in another: holders and names."""
    return [(m, name) for m in owner.modules() for name, child in m._modules.items() if child is wanted]


def _activation_slots(owner: nn.Module, pieces: Pieces) -> list[tuple[nn.Module, str]]:
    if isinstance(pieces.activation, nn.Module):
        return _slots(owner, pieces.activation)
    return [(m, name) for m in owner.modules() for name, value in vars(m).items() if value is pieces.activation]
