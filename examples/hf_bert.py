"""Turn a Hugging Face BERT into a Mixture of Experts with one line, and train it.

The model is tiny and randomly initialized, so that this needs no download and ends in seconds:

    pip install transformers
    python examples/hf_bert.py
"""

import torch
from transformers import BertConfig, BertForMaskedLM

import fmoe

MASK, FIRST_WORD = 1, 2


def batch(size: int = 16, length: int = 16, vocab_size: int = 32) -> dict[str, torch.Tensor]:
    """Return sentences of two alternating words, in which each word is masked with probability 1/7."""
    words = torch.randint(FIRST_WORD, vocab_size, (size, 2)).repeat(1, length // 2)
    masked = torch.rand(words.shape) < 1 / 7
    return {"input_ids": words.masked_fill(masked, MASK), "labels": words.masked_fill(~masked, -100)}


def main() -> None:
    torch.manual_seed(0)
    config = BertConfig(
        vocab_size=32,
        hidden_size=64,
        num_hidden_layers=4,
        num_attention_heads=4,
        intermediate_size=128,
        max_position_embeddings=32,
        hidden_dropout_prob=0.0,
        attention_probs_dropout_prob=0.0,
    )
    model = BertForMaskedLM(config)
    model.eval()
    sentences = batch()
    before = model(**sentences).logits

    fmoe.fmoefy(model, num_experts=8, top_k=2, layers=2)  # every second block becomes 8 experts

    change = (model(**sentences).logits - before).norm() / before.norm()
    print(f"{len(fmoe.metrics(model))} MoE layers; the output changed by {change:.1e}")

    model.train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    for step in range(61):
        loss = model(**batch()).loss  # the backward pass adds balance loss and z-loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step % 10 == 0:
            print(f"step {step:3d}  loss {loss.item():.3f}")
    for name, report in fmoe.metrics(model).items():
        print(f"{name}: load of the experts {', '.join(f'{share:.2f}' for share in report.load)}")


if __name__ == "__main__":
    main()
