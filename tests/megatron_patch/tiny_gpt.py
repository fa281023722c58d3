"""A tiny Megatron-core GPT, on the CPU runtime, in processes of the `forks` fixture. Not a test itself."""

import torch
import torch.distributed as dist
import torch.nn.functional as F
from megatron.core import parallel_state
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
from megatron.core.models.gpt.gpt_model import GPTModel
from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed
from megatron.core.transformer.transformer_config import TransformerConfig

from megatron_patch import cpu

LAYERS = 2
WIDTH = 32
HEADS = 2
LENGTH = 16
VOCAB = 96
EXPERTS = 4
MOE = {
    "num_experts": EXPERTS,
    "d_hidden": 24,
    "top_k": 2,
    "gate": "gshard",
    "gate_options": {"capacity_factor": 1.0},
    "seed": 5,
}


def start(expert_parallel: int = 1, tensor: int = 1) -> None:
    """The CPU runtime and Megatron's groups over all ranks."""
    assert cpu.install()
    parallel_state.initialize_model_parallel(
        tensor, expert_model_parallel_size=expert_parallel, expert_tensor_parallel_size=1
    )
    model_parallel_cuda_manual_seed(11)


def tiny_config(**options) -> TransformerConfig:
    options = {"add_bias_linear": False, "activation_func": F.gelu} | options
    return TransformerConfig(
        num_layers=LAYERS,
        hidden_size=WIDTH,
        num_attention_heads=HEADS,
        ffn_hidden_size=48,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        bias_activation_fusion=False,
        masked_softmax_fusion=False,
        apply_rope_fusion=False,
        persist_layer_norm=False,
        **options,
    )


def tiny_gpt(spec=None, **options) -> GPTModel:
    """Dense unless the layer's spec says otherwise; the same weights every time."""
    torch.manual_seed(0)
    return GPTModel(
        tiny_config(**options),
        spec or get_gpt_layer_local_spec(),
        vocab_size=VOCAB,
        max_sequence_length=LENGTH,
        share_embeddings_and_output_weights=True,
        position_embedding_type="rope",
    )


def batch(first: int = 0, count: int = 4) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Tokens, positions and labels of sequences ``first ... first + count - 1``: counting up by 1, 2 or 3, so that
    there is something to learn."""
    index = torch.arange(first, first + count).unsqueeze(1)
    tokens = (7 * index + torch.arange(LENGTH + 1) * (1 + index % 3)) % VOCAB
    return tokens[:, :-1].contiguous(), torch.arange(LENGTH).expand(count, -1), tokens[:, 1:].contiguous()


def gather_experts(value: torch.Tensor) -> torch.Tensor:
    """The experts of all expert parallel ranks of a stacked expert parameter."""
    group = parallel_state.get_expert_model_parallel_group()
    parts = [torch.empty_like(value) for _ in range(group.size())]
    dist.all_gather(parts, value.detach().contiguous(), group=group)
    return torch.cat(parts)
