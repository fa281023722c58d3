"""`nn.TransformerEncoderLayer` and `nn.TransformerDecoderLayer`, which hold the block's maps themselves."""

from torch import nn

from fmoe.adapters.block import Block, addition, obstacle
from fmoe.adapters.injection import Trial, required
from fmoe.adapters.trace import Refusal, keeps_output, read_block


def torch_layer(module: nn.Module) -> list[Block | Refusal]:
    """The block of a layer, or of all layers of an `nn.TransformerEncoder`.

    The MoE layer takes the name ``linear1``. Both classes have a fused path for evaluation that reads the weights of
    ``linear1`` and ``linear2``; it is turned off where there are none.
    """
    if isinstance(module, nn.TransformerEncoder):
        results = [result for layer in module.layers for result in _layer(layer, module)]
        return [result for result in results if isinstance(result, Block)]  # a layer tells itself why it is refused
    return _layer(module, None)


def _layer(layer: nn.Module, stack: nn.TransformerEncoder | None) -> list[Block | Refusal]:
    if not isinstance(layer, (nn.TransformerEncoderLayer, nn.TransformerDecoderLayer)):
        return []
    for name in ("linear1", "linear2"):
        if (why := obstacle(getattr(layer, name))) is not None:
            return [Refusal(f"{name} {why}")]
    pieces = read_block(layer, layer._ff_block)
    if isinstance(pieces, Refusal):
        return [pieces]
    added = [addition(m) for m in (*pieces.between, layer.dropout) if addition(m) is not None]
    if added or not pieces.is_whole():
        return [Refusal(f"what lies between linear1 and linear2 {added[0]}" if added else "its block does more")]

    def install(moe: nn.Module) -> None:
        layer.linear1, layer.activation, layer.dropout, layer.linear2 = moe, *(nn.Identity() for _ in range(3))
        if hasattr(layer, "activation_relu_or_gelu"):
            layer.activation_relu_or_gelu = 0
        if stack is not None:
            stack.use_nested_tensor = False

    # The layer keeps its other dropouts.
    block = Block(module=layer, install=install, sequence_first=not layer.self_attn.batch_first, **pieces.block)
    rows = pieces.trial.args[0]
    whole = Trial(layer, layer, (rows,) * len(required(layer)), {})
    if not keeps_output(whole, block, stack):
        return [Refusal("it does more with linear1 and linear2 than torch's layer")]
    return [block]
