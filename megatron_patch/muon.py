"""The weight matrices of Megatron-core's models that `fmoe.optim.Muon` orthogonalizes."""

from collections.abc import Iterable
from typing import Any

from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.transformer.attention import CrossAttention, SelfAttention
from megatron.core.transformer.mlp import MLP
from megatron.core.transformer.moe import experts
from megatron.core.transformer.multi_token_prediction import MultiTokenPredictionLayer
from megatron.core.transformer.transformer_layer import TransformerLayer
from torch import Tensor, nn

from fmoe import UserError
from fmoe.optim import Matrices, hidden_matrices

_GROUPED: Any = getattr(experts, "GroupedMLP", ())  # megatron-core 0.17 removed it


def megatron_matrices(chunks: Iterable[nn.Module]) -> dict[Tensor, Matrices]:
    """Map the weights of a model's transformer layers to the matrices in them that Muon orthogonalizes.

    Gates are left out, as in `fmoe.optim.hidden_matrices`. So is everything outside transformer layers: embeddings,
    position embeddings, output layers, the heads of a BERT.

    Fused matrices count separately: query, key and value of ``linear_qkv``, key and value of ``linear_kv``, and the
    halves of a gated ``linear_fc1``. Each of these matrices has the rows of all heads or hidden units, over all tensor
    parallel ranks.

    Raises:
        UserError: the model has Megatron-core's GroupedMLP, whose weights are experts side by side.
    """
    modules = [module for chunk in chunks for module in chunk.modules()]
    found: dict[Tensor, Matrices] = {}
    for module in modules:
        if isinstance(module, _GROUPED):
            raise UserError(
                "Muon does not support Megatron-core's GroupedMLP: call convert_moe_layers before you wrap the model"
            )
        if isinstance(module, TransformerLayer | MultiTokenPredictionLayer):
            found |= hidden_matrices(module)
    for module in modules:
        if isinstance(module, ColumnParallelLinear | RowParallelLinear) and module.weight in found:
            axis = int(isinstance(module, RowParallelLinear))
            found[module.weight] = found[module.weight].split_over(module.tp_group, axis)
    for module in modules:
        for linear, rows in _fused(module):
            weight: Any = linear.weight
            if weight in found:
                found[weight] = found[weight].with_sections(*rows)
    return found


def check_slices(matrices: Matrices, parameter: Tensor, ranks: int) -> None:
    """Check that Muon can gather a parameter from the tensor parallel ranks.

    Args:
        ranks: number of ranks over which the parameter is split.

    Raises:
        UserError: the parameter is split, but ``matrices`` has no process group for it.
    """
    if ranks > 1 and matrices.group is None:
        raise UserError(
            f"Muon cannot gather a weight of shape {tuple(parameter.shape)}: it is split over {ranks} tensor parallel "
            "ranks by a module other than ColumnParallelLinear, RowParallelLinear and FFNExperts; use another optimizer"
        )


def _fused(module: nn.Module) -> Iterable[tuple[nn.Module, tuple[int, ...]]]:
    """Yield each fused linear layer that ``module`` holds, and the number of rows of each of its matrices."""
    # In self attention, these are the rows of one query group. In cross attention, they are those of one head.
    if isinstance(module, SelfAttention):
        head = module.hidden_size_per_attention_head
        queries = module.num_attention_heads_per_partition // module.num_query_groups_per_partition
        gate = queries * module.config.attention_output_gate
        yield module.linear_qkv, tuple(heads * head for heads in (queries, gate, 1, 1) if heads)
    elif isinstance(module, CrossAttention):
        yield module.linear_kv, (module.hidden_size_per_attention_head,) * 2
    elif isinstance(module, MLP) and module.config.gated_linear_unit:
        yield module.linear_fc1, (module.linear_fc1.weight.shape[0] // 2,) * 2
