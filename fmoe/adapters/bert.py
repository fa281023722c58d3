"""Blocks cut in two: BERT, RoBERTa, ELECTRA, BEiT, older ViT and Swin."""

from torch import nn

from fmoe.adapters.block import Block, is_plain, linear_map
from fmoe.adapters.trace import difference, find_activation, run


def bert(module: nn.Module) -> list[Block]:
    """``module.intermediate`` is a linear map and an activation, ``module.output.dense`` the map back, which is
    followed by dropout, residual and normalisation. The MoE layer takes the place of ``intermediate``, the map back
    becomes `nn.Identity`, all else stays."""
    intermediate, output = getattr(module, "intermediate", None), getattr(module, "output", None)
    if not isinstance(intermediate, nn.Module) or not isinstance(output, nn.Module):
        return []
    linear = [child for child in intermediate.children() if linear_map(child) is not None]
    map_out = linear_map(getattr(output, "dense", None))
    if len(linear) != 1 or map_out is None:
        return []
    map_in = linear_map(linear[0])
    if map_in.weight.shape != map_out.weight.shape[::-1]:
        return []
    if not all(is_plain(child) for child in intermediate.children() if child is not linear[0]):
        return []
    traced = run(intermediate, intermediate, map_in.weight.shape[1], map_in.weight)
    if traced is None:
        return []
    rows, result, calls = traced
    if [c.module for c in calls[:1]] != linear or difference(calls[0].input, rows) > 0:
        return []
    found = find_activation(intermediate, calls[1:], [[calls[0].value]], result)
    if found is None or any(isinstance(c.module, nn.Dropout) for c in calls):
        return []

    def install(moe: nn.Module) -> None:
        module.intermediate, output.dense = moe, nn.Identity()

    return [Block(maps_in=(map_in,), map_out=map_out, activation=found[0], module=module, install=install)]
