"""Parameters and operations of a recipe's model, against the built model and by hand."""

from dataclasses import replace

import pytest
from forks import only

from pretrain.config import AttentionConfig, DataConfig, ModelConfig, MoEConfig, Recipe

TINY = {"num_layers": 3, "hidden_size": 32, "attention.num_heads": 4, "ffn_hidden_size": 24, "sequence_length": 16}
TINY |= {"vocab_size": 96, "moe.num_experts": 4, "moe.top_k": 2}
MODELS = {
    "moe": {},
    "dense": {"moe.num_experts": 0, "moe.top_k": 1},
    "gated": {"gated": True, "activation": "silu"},
    "learned positions": {"position.encoding": "learned_absolute"},
    "untied": {"tie_embeddings": False},
    "some layers": {"moe.layers": (1, 3)},
    "all of it": {"moe.layers": (2,), "gated": True, "tie_embeddings": False, "position.encoding": "learned_absolute"},
    "every expert active": {"moe.top_k": 4},
    "t5": {"kind": "t5"},
    "t5, more decoder": {"kind": "t5", "num_decoder_layers": 4, "moe.every": 2, "tie_embeddings": False, "gated": True},
    "t5, experts in the decoder": {"kind": "t5", "moe.layers": (5,), "position.encoding": "learned_absolute"},
    "t5, dense": {"kind": "t5", "moe.num_experts": 0, "moe.top_k": 1},
    "t5, longer decoder": {"kind": "t5", "num_decoder_layers": 1, "position.encoding": "learned_absolute"},
    "t5, the paper's output": {"kind": "t5", "tied_output_bias": False, "output_scale": True},
    "bert": {"kind": "bert"},
    "bert, dense with biases": {
        "kind": "bert",
        "moe.num_experts": 0,
        "moe.top_k": 1,
        "linear_bias": True,
        "segment_types": 2,
    },
    "transformer-xl": {
        "position.encoding": "transformer_xl",
        "attention.head_dim": 6,
        "attention.num_query_groups": 2,
        "position.memory_length": 8,
    },
    "rms": {"norm": "rms"},
    "grouped queries": {"attention.num_query_groups": 2},
    "wide heads": {"attention.head_dim": 14},
    "norms of heads": {"attention.qk_norm": True, "attention.head_dim": 6},
    "biases of queries, keys and values": {
        "attention.qkv_bias": True,
        "attention.num_query_groups": 2,
        "attention.head_dim": 6,
        "mtp_layers": 1,
    },
    "windows, sinks and all biases": {
        "attention.output_bias": True,
        "attention.sinks": True,
        "attention.sliding_window": 5,
        "attention.sliding_layers": (1, 3),
        "moe.gate": "naive",
        "moe.gate_options": {"bias": True},
        "moe.expert_options": {"bias": True},
        "activation": "swiglu_oai",
        "gated": True,
        "moe.every": 2,
    },
    "biases of attention and logits": {"attention.output_bias": True, "output_bias": True, "mtp_layers": 1},
    "biases of attention and logits, dense": {
        "attention.output_bias": True,
        "output_bias": True,
        "moe.num_experts": 0,
        "moe.top_k": 1,
        "tie_embeddings": False,
    },
    "norms of all heads": {
        "attention.qk_norm": True,
        "attention.qk_norm_over": "all",
        "norm": "rms",
        "attention.head_dim": 6,
        "attention.num_query_groups": 2,
    },
    "shared experts": {"moe.num_shared_experts": 3, "gated": True},
    "shared experts with biases": {"moe.num_shared_experts": 2, "moe.expert_options": {"bias": True, "gated": True}},
    "wide shared experts with a gate": {
        "moe.num_shared_experts": 2,
        "moe.shared_ffn_hidden_size": 20,
        "moe.shared_expert_gate": True,
        "gated": True,
        "moe.granularity": 2,
    },
    "some layers wide": {"moe.layers": (2, 3), "dense_ffn_hidden_size": 40},
    "modern": {
        "norm": "rms",
        "attention.num_query_groups": 1,
        "attention.head_dim": 6,
        "attention.qk_norm": True,
        "moe.num_shared_experts": 2,
        "moe.layers": (2, 3),
        "dense_ffn_hidden_size": 40,
        "gated": True,
        "activation": "silu",
        "tie_embeddings": False,
        "moe.gate": "sigmoid",
    },
    "latent attention": {
        "attention.kv_lora_rank": 10,
        "attention.qk_head_dim": 6,
        "attention.qk_rope_head_dim": 4,
        "attention.v_head_dim": 5,
    },
    "latent attention, compressed queries": {
        "attention.num_heads": 3,
        "attention.kv_lora_rank": 10,
        "attention.q_lora_rank": 12,
        "attention.qk_head_dim": 6,
        "attention.qk_rope_head_dim": 4,
        "attention.v_head_dim": 5,
        "norm": "rms",
        "tie_embeddings": False,
    },
    "latent attention, further tokens": {
        "mtp_layers": 1,
        "attention.kv_lora_rank": 10,
        "attention.qk_head_dim": 6,
        "attention.qk_rope_head_dim": 4,
        "attention.v_head_dim": 5,
    },
    "further tokens": {"mtp_layers": 2, "attention.num_query_groups": 2, "attention.qk_norm": True},
    "further tokens, last layer plain": {"mtp_layers": 1, "moe.layers": (1,), "norm": "rms", "tie_embeddings": False},
    "noisy": {"moe.gate": "noisy"},
    "random": {"moe.gate": "random"},
    "t5, modern": {
        "kind": "t5",
        "norm": "rms",
        "attention.head_dim": 10,
        "attention.qk_norm": True,
        "attention.qk_norm_over": "all",
        "moe.num_shared_experts": 1,
        "moe.every": 2,
        "dense_ffn_hidden_size": 40,
    },
    "bert, modern": {
        "kind": "bert",
        "norm": "rms",
        "attention.num_query_groups": 2,
        "attention.head_dim": 6,
        "attention.qk_norm": True,
        "attention.qkv_bias": True,
        "moe.num_shared_experts": 1,
    },
    "bert, untied": {"kind": "bert", "tie_embeddings": False, "moe.every": 2, "position.encoding": "learned_absolute"},
}
DATA = {"t5, longer decoder": {"noise_density": 0.7}}


def recipe_of(name):
    return Recipe(model=ModelConfig().with_values(TINY | MODELS[name]), data=DataConfig(**DATA.get(name, {})))


def count(names):
    """(parameters, those of experts that a token does not meet) of each model as it is built."""
    from megatron.core.tensor_parallel.random import model_parallel_cuda_manual_seed

    from fmoe.parallel import is_expert
    from megatron_patch import cpu
    from pretrain.engine import init_parallel
    from pretrain.engine.model import build_model

    cpu.install()
    recipes = [recipe_of(name) for name in names]
    init_parallel(recipes[0])
    counts = []
    for recipe in recipes:
        model_parallel_cuda_manual_seed(1)
        parameters = list(build_model(recipe).parameters())
        idle = 0
        if recipe.model.moe.num_experts:
            experts = sum(p.numel() for p in parameters if is_expert(p))
            idle = experts // recipe.model.moe.num_experts * (recipe.model.moe.num_experts - recipe.model.moe.top_k)
        counts.append((sum(p.numel() for p in parameters), idle))
    return counts


def test_parameter_counts_are_those_of_the_built_model(forks):
    for name, (built, idle) in zip(MODELS, only(forks.run(1, count, list(MODELS))), strict=True):
        recipe = recipe_of(name)
        recipe.check()
        assert recipe.num_params() == built, name
        assert recipe.num_active_params() == built - idle, name
        assert (idle > 0) == ("dense" not in name and name != "every expert active"), name
    assert recipe_of("t5, longer decoder").decoder_length > TINY["sequence_length"]


def flops(model):
    return Recipe(model=model).flops_per_token()


def test_flops_per_token_by_hand():
    model = ModelConfig(
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=10,
        sequence_length=16,
        vocab_size=32,
        tie_embeddings=False,
        attention=AttentionConfig(num_heads=2),
        moe=MoEConfig(num_experts=4, top_k=2, layers=(2,)),
    )
    attention = 4 * 8 * 8  # query, key, value, output
    dense, expert, router = 2 * 8 * 10, 2 * 8 * 10, 4 * 8
    matrices = 2 * attention + dense + 2 * expert + router + 32 * 8  # the output layer; the embedding is looked up
    scores = 2 * (2 * 16 * 8) * 2  # 2 layers x (q k^T and probabilities x v) x multiply and add, forward
    by_hand = 3 * (2 * matrices + scores)  # backward is twice the forward
    assert flops(model) == by_hand, "norms and what is looked up are no matrices"
    assert flops(model.with_values({"position.encoding": "learned_absolute", "norm": "rms"})) == by_hand
    assert flops(model.with_values({"moe.expert_options": {"bias": True}})) == by_hand
    tied = replace(model, tie_embeddings=True)
    assert flops(tied) == flops(model), "tying changes parameters, not arithmetic"
    assert flops(model.with_values({"moe.top_k": 3})) - flops(model) == 6 * expert
    window = model.with_values(
        {"attention.sliding_window": 4, "attention.sliding_layers": (2,)}
    )  # 12 of 16 keys fewer in one of two layers
    assert flops(model) - flops(window) == 3 * scores / 2 * 12 / 16
    strided = window.with_values({"attention.sliding_stride": 4})  # sees 3 of the 12
    assert flops(model) - flops(strided) == 3 * scores / 2 * 9 / 16
    further = attention + 2 * expert + router + 2 * 8 * 8 + 32 * 8  # and the projection and the output layer once more
    assert flops(replace(model, mtp_layers=2)) - flops(model) == 2 * 3 * (2 * further + scores / 2)


def test_flops_of_a_modern_gpt_by_hand():
    model = ModelConfig(
        num_layers=2,
        hidden_size=8,
        norm="rms",
        ffn_hidden_size=10,
        dense_ffn_hidden_size=14,
        gated=True,
        sequence_length=16,
        vocab_size=32,
        attention=AttentionConfig(num_heads=4, num_query_groups=2, head_dim=6, qk_norm=True),
        moe=MoEConfig(num_experts=4, num_shared_experts=1, top_k=2, layers=(2,)),
    )
    attention = 8 * 4 * 6 + 2 * 8 * 2 * 6 + 4 * 6 * 8  # queries, keys and values, output
    experts = (2 + 1) * 3 * 8 * 10 + 4 * 8
    matrices = 2 * attention + 3 * 8 * 14 + experts + 32 * 8
    scores = 2 * (2 * 16 * 4 * 6) * 2
    assert flops(model) == 3 * (2 * matrices + scores)
    wide = model.with_values(
        {
            "moe.shared_ffn_hidden_size": 12,
            "moe.shared_expert_gate": True,
            "attention.qkv_bias": True,
            "output_bias": True,
        }
    )
    assert flops(wide) - flops(model) == 6 * (3 * 8 * 2 + 8)


def test_flops_of_latent_attention_by_hand():
    model = ModelConfig(
        num_layers=2,
        hidden_size=8,
        ffn_hidden_size=10,
        sequence_length=16,
        vocab_size=32,
        attention=AttentionConfig(num_heads=4, kv_lora_rank=7, qk_head_dim=6, qk_rope_head_dim=2, v_head_dim=5),
        moe=MoEConfig(num_experts=0),
    )
    keys_and_values = 8 * (7 + 2) + 7 * 4 * (6 + 5)  # compressed with the rotary key, then of each head
    queries, output = 8 * 4 * (6 + 2), 4 * 5 * 8
    matrices = 2 * (queries + keys_and_values + output + 2 * 8 * 10) + 32 * 8
    scores = 2 * 16 * 4 * ((6 + 2) + 5) * 2  # 2 layers x (q k^T, then probabilities x v) x multiply and add
    assert flops(model) == 3 * (2 * matrices + scores)
    compressed = model.with_values({"attention.q_lora_rank": 3})
    assert flops(compressed) - flops(model) == 6 * 2 * (3 * (8 + 4 * (6 + 2)) - queries)


def test_flops_of_a_t5_by_hand():
    sizes = {
        "hidden_size": 64,
        "attention.num_heads": 2,
        "ffn_hidden_size": 256,
        "vocab_size": 512,
        "sequence_length": 64,
    }
    model = ModelConfig().with_values(
        {
            "kind": "t5",
            "num_layers": 1,
            "num_decoder_layers": 2,
            "moe.num_experts": 4,
            "moe.top_k": 2,
            "moe.layers": (3,),
            **sizes,
        }
    )
    recipe = Recipe(model=model)
    s, t, h = 64, recipe.decoder_length, 64
    assert (recipe.spans.block, t, recipe.tokens_per_sequence) == (70, 14, 78)
    ffn, router = 2 * h * 256, 4 * h
    encoder = s * (4 * h * h + ffn)
    # Self attention, queries and output of the other one, ffn; its keys and values are of the encoder's tokens.
    decoder = t * (2 * 4 * h * h + 2 * 2 * h * h + 3 * ffn + router + 512 * h) + 2 * s * 2 * h * h
    scores = 2 * h * (s * s + 2 * t * t + 2 * t * s)  # q k^T, and probabilities x v
    assert recipe.flops_per_token() == pytest.approx(3 * 2 * (encoder + decoder + scores) / (s + t))
