"""Blocks cut in two: BERT, RoBERTa, ELECTRA, BEiT, older ViT and Swin."""

import torch
from torch import nn

from fmoe.adapters.block import Block, addition, is_plain, linear_map
from fmoe.adapters.injection import Trial, is_same, wide_rows
from fmoe.adapters.trace import Pieces, keeps_output, read_block


def bert(module: nn.Module) -> list[Block]:
    """``module.intermediate`` is a linear map and an activation, ``module.output.dense`` the map back, which is
    followed by dropout, residual and normalisation. The MoE layer takes the place of ``intermediate``, the map back
    becomes `nn.Identity`, all else stays."""
    intermediate, output = getattr(module, "intermediate", None), getattr(module, "output", None)
    if not isinstance(intermediate, nn.Module) or not isinstance(output, nn.Module):
        return []
    children = list(intermediate.children())
    linear = [child for child in children if linear_map(child) is not None]
    last = getattr(output, "dense", None)
    if len(linear) != 1 or linear_map(last) is None or addition(intermediate) is not None:
        return []
    if not all(is_plain(child) and addition(child) is None for child in children if child is not linear[0]):
        return []
    pieces = read_block(module)
    if not isinstance(pieces, Pieces) or (pieces.first, pieces.last) != (tuple(linear), last):
        return []
    if pieces.dropout or not _is_all(intermediate, pieces):
        return []

    def install(moe: nn.Module) -> None:
        module.intermediate, output.dense = moe, nn.Identity()

    block = Block(module=module, install=install, **pieces.block)
    return [block] if keeps_output(pieces.trial, block) else []


def _is_all(intermediate: nn.Module, pieces: Pieces) -> bool:
    """Whether ``intermediate`` is the first map and what was seen between the maps, and no more."""
    (first,), (block,) = pieces.first, pieces.maps_in
    generator = torch.Generator().manual_seed(0)
    rows = torch.randn(2, 32, block.weight.shape[1], generator=generator, dtype=torch.float32, device="cpu")
    rows = rows.to(block.weight)
    for x in (rows, wide_rows(rows, is_multiplied=False)):
        seen = []

        def stand_in(value, seen=seen):
            seen.append(value.clone())
            return pieces.values.clone()

        _, result = Trial(intermediate, intermediate, (x,), {})(stand_ins={first: stand_in})
        if not is_same(seen[0], x) or not is_same(result, pieces.hidden):
            return False
    return True
