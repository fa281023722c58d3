"""Experts in a GPT of Megatron-core: process groups, model, conversion in one line, and a few steps; needs no GPU."""

import torch
from torch.nn import functional as F

from megatron_patch import cpu  # before megatron-core is used

cpu.install()

from megatron.core import parallel_state  # noqa: E402
from megatron.core.models.gpt import GPTModel  # noqa: E402
from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec  # noqa: E402
from megatron.core.tensor_parallel import model_parallel_cuda_manual_seed  # noqa: E402
from megatron.core.transformer import TransformerConfig  # noqa: E402

import fmoe  # noqa: E402

VOCABULARY, LENGTH = 128, 32


def make_gpt() -> GPTModel:
    """Return a dense GPT of four layers."""
    config = TransformerConfig(
        num_layers=4,
        hidden_size=64,
        num_attention_heads=4,
        attention_dropout=0.0,
        hidden_dropout=0.0,
        use_cpu_initialization=True,
        # Fusions that need apex or Transformer Engine.
        gradient_accumulation_fusion=False,
        bias_dropout_fusion=False,
        masked_softmax_fusion=False,
        persist_layer_norm=False,
    )
    return GPTModel(config, get_gpt_layer_local_spec(), vocab_size=VOCABULARY, max_sequence_length=LENGTH)


def main() -> list[float]:
    """Train the model to count; return the printed losses."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.distributed.init_process_group(store=torch.distributed.HashStore(), rank=0, world_size=1)
    parallel_state.initialize_model_parallel()
    model_parallel_cuda_manual_seed(1234)
    torch.manual_seed(1234)

    gpt_model = make_gpt().to(device)
    fmoe.fmoefy(gpt_model, num_experts=8, top_k=2, upcycle=False)  # new experts, before DDP and the optimizer

    optimizer = torch.optim.AdamW(gpt_model.parameters(), lr=3e-3)
    positions = torch.arange(LENGTH, device=device).expand(8, LENGTH)
    printed = []
    for step in range(41):
        text = (torch.randint(VOCABULARY, (8, 1), device=device) + torch.arange(LENGTH + 1, device=device)) % VOCABULARY
        logits = gpt_model(text[:, :-1], positions, attention_mask=None)
        loss = F.cross_entropy(logits.flatten(0, 1), text[:, 1:].flatten())
        optimizer.zero_grad()
        loss.backward()  # adds balance loss and z-loss
        optimizer.step()
        if step % 10 == 0:
            printed.append(float(loss))
            print(f"step {step:3d}  loss {printed[-1]:.4f}")
    torch.distributed.destroy_process_group()
    return printed


if __name__ == "__main__":
    main()
