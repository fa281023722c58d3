"""A module that is a feed-forward block and nothing else: GPT-2, ViT, Swin, T5, DistilBERT, GPT-NeoX, timm."""

from torch import nn

from fmoe.adapters.block import Block, is_plain, linear_map
from fmoe.adapters.trace import read_block


def whole_module(module: nn.Module, num_linear: int) -> list[Block]:
    """The block that ``module`` is, if it holds ``num_linear`` linear maps, plain modules, and computes a block."""
    children = list(module.children())
    linear = [child for child in children if linear_map(child) is not None]
    if isinstance(module, nn.Sequential) or len(linear) != num_linear:
        return []
    if any(True for _ in module.parameters(recurse=False)):
        return []
    if not all(is_plain(child) for child in children if child not in linear):
        return []
    pieces = read_block(module, module)
    return [] if pieces is None else [Block(module=module, **pieces._asdict())]


def mlp(module: nn.Module) -> list[Block]:
    """Two linear maps with an activation between; or one whose output is gate and value (Phi-3), and the output map."""
    return whole_module(module, 2)
