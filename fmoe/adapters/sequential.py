"""``nn.Sequential(Linear, activation, [Dropout], Linear)``, alone or as a part of a longer one."""

from torch import nn

from fmoe.adapters.block import Block, is_plain, is_rowwise, linear_map


def sequential(module: nn.Module) -> list[Block]:
    """Every such run of items that leads back to the width it began with. The MoE layer goes where the run began, the
    rest become `nn.Identity`, so that the names of the other items stay."""
    if not isinstance(module, nn.Sequential) or type(module).forward is not nn.Sequential.forward:
        return []
    items = list(module.named_children())
    blocks, begin = [], 0
    while begin < len(items):
        length = next((n for n in (3, 4) if _is_block([item for _, item in items[begin : begin + n]], n)), None)
        if length is None:
            begin += 1
            continue
        names, parts = zip(*items[begin : begin + length], strict=True)
        blocks.append(
            Block(
                maps_in=(linear_map(parts[0]),),
                map_out=linear_map(parts[-1]),
                activation=parts[1],
                dropout=parts[2].p if length == 4 else 0.0,
                module=module,
                install=lambda moe, names=names: _install(module, names, moe),
                place=names[0],
            )
        )
        begin += length
    return blocks


def _is_block(parts: list[nn.Module], length: int) -> bool:
    if len(parts) < length:
        return False
    first, last = linear_map(parts[0]), linear_map(parts[-1])
    if first is None or last is None or first.weight.shape != last.weight.shape[::-1]:
        return False
    if length == 4 and type(parts[2]) is not nn.Dropout:
        return False
    activation, width = parts[1], first.weight.shape[0]
    noise = nn.modules.dropout._DropoutNd
    return not isinstance(activation, (nn.Identity, noise)) and is_plain(activation) and is_rowwise(activation, width)


def _install(module: nn.Sequential, names: tuple[str, ...], moe: nn.Module) -> None:
    for name in names:
        setattr(module, name, nn.Identity())
    setattr(module, names[0], moe)
