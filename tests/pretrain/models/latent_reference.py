"""Multi-latent attention by the equations of DeepSeek-V2 (arXiv 2405.04434 section 2.1). Not a test."""

import math
from dataclasses import replace

import torch
from engines import RECIPE

from pretrain.config import ModelConfig, Recipe

HEADS = 3
CONTENT = 6
ROTARY = 4
VALUE = 5
RANK = 10
THETA = 100.0
EPS = 1e-3
SCALE = 1 / math.sqrt(CONTENT + ROTARY)
KEYS = {
    "attention.kv_lora_rank": RANK,
    "attention.qk_head_dim": CONTENT,
    "attention.qk_rope_head_dim": ROTARY,
    "attention.v_head_dim": VALUE,
}
MODEL = ModelConfig().with_values(
    {
        "num_layers": 2,
        "hidden_size": 16,
        "attention.num_heads": HEADS,
        **KEYS,
        "position.rope_theta": THETA,
        "norm": "rms",
        "norm_eps": EPS,
        "ffn_hidden_size": 24,
        "sequence_length": 8,
        "vocab_size": 32,
        "moe.num_experts": 4,
        "init_std": 0.5,
    }
)


def rotated(x, position):
    """Rotate the pairs (0, 1), (2, 3), ... of a vector, each as a complex number."""
    angles = position * THETA ** (-torch.arange(0, len(x), 2).double() / len(x))
    turned = torch.view_as_complex(x.reshape(-1, 2)) * torch.polar(torch.ones_like(angles), angles)
    return torch.view_as_real(turned).flatten()


def normalized(x, weight):
    return x / (x.square().mean() + EPS).sqrt() * weight


def reference(weights, hidden):
    """Map one sequence [s, h] to the output of attention, token by token and head by head."""
    down = weights["linear_kv_down_proj.weight"]
    up = weights["linear_kv_up_proj.weight"].view(HEADS, -1, RANK)
    queries = []
    keys = []
    values = []
    outputs = []
    for position, h in enumerate(hidden):
        if "linear_q_proj.weight" in weights:
            q = weights["linear_q_proj.weight"] @ h
        else:
            compressed = normalized(weights["linear_q_down_proj.weight"] @ h, weights["q_layernorm.weight"])
            q = weights["linear_q_up_proj.weight"] @ compressed
        latent = normalized(down[:RANK] @ h, weights["kv_layernorm.weight"])
        shared_key = rotated(down[RANK:] @ h, position)
        queries.append([torch.cat([x[:CONTENT], rotated(x[CONTENT:], position)]) for x in q.view(HEADS, -1)])
        keys.append([torch.cat([up[head, :CONTENT] @ latent, shared_key]) for head in range(HEADS)])
        values.append([up[head, CONTENT:] @ latent for head in range(HEADS)])
        heads = []
        for head in range(HEADS):
            scores = torch.stack([queries[position][head] @ key[head] for key in keys]) * SCALE
            heads.append(sum(p * value[head] for p, value in zip(scores.softmax(0), values, strict=True)))
        outputs.append(weights["linear_proj.weight"] @ torch.cat(heads))
    return torch.stack(outputs)


def both(rank):
    """(ours, the reference's): output and gradients of input and weights, of two sequences."""

    from megatron_patch import cpu
    from pretrain.engine import init_parallel
    from pretrain.engine.model import build_model

    cpu.install()
    recipe = Recipe(model=MODEL.with_values({"attention.q_lora_rank": rank}))
    recipe.check()
    init_parallel(recipe)
    attention = build_model(recipe).decoder.layers[1].self_attention
    torch.manual_seed(0)
    with torch.no_grad():
        for name, parameter in attention.named_parameters():
            if "layernorm" in name:
                parameter.uniform_(0.5, 1.5)
    hidden, d_out = torch.randn(2, 7, 2, 16)
    ours = hidden.clone().requires_grad_()
    out, _ = attention(ours, None)
    out.backward(d_out)
    weights = {name: p.detach().double().requires_grad_() for name, p in attention.named_parameters()}
    theirs = hidden.double().requires_grad_()
    expected = torch.stack([reference(weights, theirs[:, n]) for n in range(2)], dim=1)
    expected.backward(d_out.double())
    found = {"out": out.detach(), "hidden": ours.grad} | {n: p.grad for n, p in attention.named_parameters()}
    return found, {"out": expected.detach(), "hidden": theirs.grad} | {n: p.grad for n, p in weights.items()}


ENGINE = replace(
    RECIPE,
    model=RECIPE.model.with_values(
        {"norm": "rms", "attention.q_lora_rank": 12, "moe.num_shared_experts": 1, "position.rope_theta": THETA, **KEYS}
    ),
)
