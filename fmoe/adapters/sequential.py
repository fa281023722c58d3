"""``nn.Sequential(Linear, activation, [Dropout], Linear)``, alone or as a part of a longer one."""

from collections import OrderedDict

from torch import nn

from fmoe.adapters.block import Block, addition, is_plain, linear_map, obstacle
from fmoe.adapters.trace import Refusal, is_there_and_back, keeps_output, read_block


def sequential(module: nn.Module) -> list[Block | Refusal]:
    """Every such run of items that leads back to the width it began with. The MoE layer goes where the run began, the
    rest become `nn.Identity`, so that the names of the other items stay."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return []
    if "forward" in vars(module):
        return []
    items = list(module.named_children())
    blocks, begin = [], 0
    while begin < len(items):
        length = next((n for n in (3, 4) if _has_form([item for _, item in items[begin : begin + n]], n)), None)
        if length is None:
            begin += 1
            continue
        names, parts = zip(*items[begin : begin + length], strict=True)
        begin += length
        blocks.append(_read(module, names, parts))
    return blocks


def _has_form(parts: list[nn.Module], length: int) -> bool:
    """Whether the items look like a block: two linear maps of whatever kind, and what has no parameters between."""
    if len(parts) < length or (length == 4 and type(parts[2]) is not nn.Dropout):
        return False
    if any(isinstance(part, nn.Conv1d) for part in parts) or not is_there_and_back(parts[0], parts[-1]):
        return False
    activation, noise = parts[1], nn.modules.dropout._DropoutNd
    return not isinstance(activation, (nn.Identity, nn.Linear, noise)) and is_plain(activation)


def _read(module: nn.Sequential, names: tuple[str, ...], parts: tuple[nn.Module, ...]) -> Block | Refusal:
    for name, part in ((names[0], parts[0]), (names[-1], parts[-1])):
        if (why := obstacle(part)) is not None:
            return Refusal(f"{name} {why}")
    for name, part in zip(names[1:-1], parts[1:-1], strict=True):
        if (why := addition(part)) is not None:
            return Refusal(f"{name} {why}")
    block = {"module": module, "install": lambda moe: _install(module, names, moe), "place": names[0]}
    if len({(p.dtype, p.device) for part in parts for p in part.parameters()}) > 1:  # `fmoefy` refuses it, by name
        return Block(maps_in=(linear_map(parts[0]),), map_out=linear_map(parts[-1]), activation=parts[1], **block)
    run = nn.Sequential(OrderedDict(zip(names, parts, strict=True)))
    pieces = read_block(run)
    if isinstance(pieces, Refusal):
        return pieces
    if not pieces.is_whole() or not keeps_output(pieces.trial, Block(module=run, **pieces.block)):
        return Refusal(f"{names[0]} to {names[-1]} compute more than a block")
    return Block(**block, **pieces.block)


def _install(module: nn.Sequential, names: tuple[str, ...], moe: nn.Module) -> None:
    for name in names:
        setattr(module, name, nn.Identity())
    setattr(module, names[0], moe)
