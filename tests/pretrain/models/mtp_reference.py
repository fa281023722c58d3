"""Multi-token prediction by DeepSeek-V3's equations 21 to 25, in float64. Not a test."""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close
from engines import Samples, engine_of
from forks import only

from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, OptimizerConfig, Recipe, TrainConfig

LENGTH = 16
VOCAB = 64
HIDDEN = 16
HEADS = 2
DEPTH = 2
BATCH = 4
PLAIN = Recipe(
    model=ModelConfig(
        num_layers=1,
        hidden_size=HIDDEN,
        ffn_hidden_size=24,
        sequence_length=LENGTH,
        vocab_size=VOCAB,
        norm="rms",
        init_std=0.3,
        mtp_layers=DEPTH,
        mtp_loss=0.7,
        attention=AttentionConfig(num_heads=HEADS),
        moe=MoEConfig(num_experts=0),
    ),
    optimizer=OptimizerConfig(warmup_steps=0),
    train=TrainConfig(steps=1, global_batch=BATCH, micro_batch=2),
)


def backward(recipe):
    """(loss, losses of the modules, parameters, their gradients) of a step."""
    engine = engine_of(recipe)
    loss = engine.backward(0, Samples())
    named = dict(engine.gpt.named_parameters())
    weights = {name: p.detach().clone() for name, p in named.items()}
    return float(loss), engine.mtp_losses, weights, {name: p.main_grad.clone() for name, p in named.items()}


def norm(x, weight):
    return weight * x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt()


def rotate(x):
    """Rotary positions of [batch, heads, sequence, width]."""
    half = x.shape[-1] // 2
    wavelengths = 10000.0 ** (-torch.arange(half, dtype=x.dtype, device="cpu") / half)
    angles = torch.arange(x.shape[-2], dtype=x.dtype, device="cpu").unsqueeze(1) * wavelengths
    a = x[..., :half]
    b = x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


def transformer_layer(x, w, prefix):
    fused = norm(x, w[f"{prefix}input_layernorm.weight"]) @ w[f"{prefix}self_attention.linear_qkv.weight"].t()
    q, k, v = fused.unflatten(-1, (HEADS, 3, HIDDEN // HEADS)).permute(3, 0, 2, 1, 4)
    scores = rotate(q) @ rotate(k).transpose(2, 3) / (HIDDEN // HEADS) ** 0.5
    later = torch.ones(x.shape[1], x.shape[1], dtype=torch.bool, device="cpu").triu(1)
    seen = scores.masked_fill(later, -torch.inf).softmax(-1) @ v
    x = x + seen.transpose(1, 2).flatten(2) @ w[f"{prefix}self_attention.linear_proj.weight"].t()
    hidden = F.gelu(norm(x, w[f"{prefix}pre_mlp_layernorm.weight"]) @ w[f"{prefix}mlp.linear_fc1.weight"].t())
    return x + hidden @ w[f"{prefix}mlp.linear_fc2.weight"].t()


def cross_entropy(hidden, embedding, targets):
    return F.cross_entropy((hidden @ embedding.t()).flatten(0, 1), targets.flatten())


def reference(w, tokens):
    """Mean losses of the next token and of the tokens after it, from ``tokens`` [b, t + 1], by slices as in the paper.

    Module k has the positions 1 ... t - k. The hidden state is that of which the output layer makes logits.
    """
    embedding = w["embedding.word_embeddings.weight"]
    length = tokens.shape[1] - 1
    hidden = transformer_layer(embedding[tokens[:, :-1]], w, "decoder.layers.0.")
    hidden = norm(hidden, w["decoder.final_layernorm.weight"])
    losses = [cross_entropy(hidden, embedding, tokens[:, 1:])]
    for k in range(1, DEPTH + 1):
        name = f"mtp.layers.{k - 1}."
        inner = next(n for n in ("transformer_layer.", "mtp_model_layer.") if any(x.startswith(name + n) for x in w))
        entering = torch.cat(  # equation 21; Megatron-core concatenates the embedding first
            [
                norm(embedding[tokens[:, k:length]], w[f"{name}enorm.weight"]),
                norm(hidden[:, : length - k], w[f"{name}hnorm.weight"]),
            ],
            -1,
        )
        hidden = transformer_layer(entering @ w[f"{name}eh_proj.weight"].t(), w, f"{name}{inner}")  # 22
        hidden = norm(hidden, w[f"{name}final_layernorm.weight"])
        losses.append(cross_entropy(hidden, embedding, tokens[:, k + 1 :]))  # 23 and 24
    return losses


def assert_losses_and_gradients(forks, recipe=PLAIN):
    """A step's losses and gradients are those of the equations."""
    loss, mtp_losses, weights, gradients = only(forks.run(1, backward, recipe))
    w = {name: value.double().requires_grad_() for name, value in weights.items()}
    tokens = torch.stack([torch.as_tensor(Samples()[n]) for n in range(BATCH)])
    expected, *further = reference(w, tokens)
    assert loss == pytest.approx(expected.item(), rel=1e-5)
    assert mtp_losses.tolist() == pytest.approx([x.item() for x in further], rel=1e-5)
    (expected + 0.7 * sum(further) / DEPTH).backward()  # 25
    assert w.keys() == gradients.keys()
    for name, value in w.items():
        assert value.grad.norm() > 0, name
        assert_close(gradients[name].double(), value.grad, 1e-5, name)
