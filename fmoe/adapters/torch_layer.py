"""`nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`, which hold the block's maps themselves."""

from torch import nn

from fmoe.adapters.block import Block
from fmoe.adapters.trace import read_block


def torch_layer(module: nn.Module) -> list[Block]:
    """The block of a layer, or of all layers of an `nn.TransformerEncoder`.

    The MoE layer takes the name ``linear1``. Both classes have a fused path for evaluation that reads the weights of
    ``linear1`` and ``linear2``; it is turned off where there are none.
    """
    if isinstance(module, nn.TransformerEncoder):
        return [block for layer in module.layers for block in _layer(layer, module)]
    return _layer(module, None)


def _layer(layer: nn.Module, stack: nn.TransformerEncoder | None) -> list[Block]:
    if not isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return []
    pieces = read_block(layer, layer._ff_block)
    if pieces is None:
        return []

    def install(moe: nn.Module) -> None:
        layer.linear1, layer.activation, layer.dropout, layer.linear2 = moe, *(nn.Identity() for _ in range(3))
        if hasattr(layer, "activation_relu_or_gelu"):
            layer.activation_relu_or_gelu = 0
        if stack is not None:
            stack.use_nested_tensor = False

    fields = pieces._asdict() | {"after": ()}  # the layer keeps its other dropouts
    return [Block(module=layer, install=install, sequence_first=not layer.self_attn.batch_first, **fields)]
