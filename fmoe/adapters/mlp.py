"""A module that is a feed-forward block and nothing else: GPT-2, ViT, Swin, T5, DistilBERT, GPT-NeoX, timm."""

import inspect

from torch import nn

from fmoe.adapters.block import Block, addition, is_plain, linear_map
from fmoe.adapters.injection import required
from fmoe.adapters.inline import inline
from fmoe.adapters.trace import Pieces, Refusal, keeps_output, read_block


def whole_module(module: nn.Module, num_linear: int) -> list[Block]:
    """The block that ``module`` is, if it holds ``num_linear`` linear maps, plain modules, and computes a block."""
    children = list(module.children())
    linear = [child for child in children if linear_map(child) is not None]
    if isinstance(module, nn.Sequential) or len(linear) != num_linear or addition(module) is not None:
        return []
    if any(True for _ in module.parameters(recurse=False)):
        return []
    if not all(is_plain(child) and addition(child) is None for child in children if child not in linear):
        return []
    if len(required(module)) != 1:
        return []
    pieces = read_block(module)
    if not isinstance(pieces, Pieces) or not pieces.is_whole():
        return []
    if len(inspect.signature(module.forward).parameters) > 1 and len(pieces.maps_in) == 1:
        return []  # callers may pass more, which an MoE layer does not take: its maps are replaced inside of the module
    block = Block(module=module, after=pieces.after, **pieces.block)
    return [block] if keeps_output(pieces.trial, block) else []


def mlp(module: nn.Module) -> list[Block | Refusal]:
    """Two linear maps with an activation between, or one whose output is gate and value (Phi-3) and the output map: as
    a module of their own, or inside of a larger one."""
    return whole_module(module, 2) or inline(module)
