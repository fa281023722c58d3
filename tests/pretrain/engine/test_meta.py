"""Models on the meta device are those that are built for real."""

import time
from dataclasses import replace

import pytest
import torch
from forks import only

from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, ParallelConfig, Recipe

MODEL = ModelConfig(
    num_layers=4,
    hidden_size=32,
    norm="rms",
    ffn_hidden_size=24,
    dense_ffn_hidden_size=40,
    sequence_length=16,
    vocab_size=96,
    tie_embeddings=False,
    attention=AttentionConfig(num_heads=4, num_query_groups=2, head_dim=6, qk_norm=True),
    moe=MoEConfig(layers=(2, 3, 4), num_shared_experts=1, num_experts=8, gate="sigmoid"),
)
RECIPE = Recipe(model=MODEL)
KINDS = {
    "gpt": RECIPE,
    "latent attention": replace(
        RECIPE,
        model=MODEL.with_values(
            {
                "attention.num_query_groups": None,
                "attention.head_dim": None,
                "attention.qk_norm": False,
                "attention.kv_lora_rank": 10,
                "attention.q_lora_rank": 12,
                "attention.qk_head_dim": 6,
                "attention.qk_rope_head_dim": 4,
                "attention.v_head_dim": 5,
                "position.rope_scaling": "yarn",
                "position.rope_factor": 2.0,
                "position.rope_original_length": 8,
            }
        ),
    ),
    "windows and sinks": replace(
        RECIPE,
        model=MODEL.with_values(
            {
                "attention.qkv_bias": True,
                "attention.output_bias": True,
                "attention.sinks": True,
                "attention.sliding_window": 5,
                "attention.sliding_layers": (1, 3),
                "attention.sliding_stride": 3,
                "activation": "swiglu_oai",
                "gated": True,
            }
        ),
    ),
    "t5": replace(
        RECIPE,
        model=MODEL.with_values(
            {"kind": "t5", "attention.num_query_groups": None, "moe.gate": "switch", "tie_embeddings": True}
        ),
    ),
    "bert": replace(
        RECIPE, model=MODEL.with_values({"kind": "bert", "position.encoding": "learned_absolute", "moe.gate": "noisy"})
    ),
}


def shapes(module):
    return {name: tuple(value.shape) for name, value in module.state_dict().items() if torch.is_tensor(value)}


def on_both(recipe):
    """(shapes for real, on the meta device, devices of these)"""
    import torch.distributed as dist
    from megatron.core import parallel_state

    from megatron_patch import cpu
    from pretrain.engine import init_parallel
    from pretrain.engine.meta import build_on_meta
    from pretrain.engine.model import build_model

    cpu.install()
    init_parallel(recipe)
    real = shapes(build_model(recipe))
    with pytest.raises(RuntimeError, match="use a process without process groups"):
        build_on_meta(recipe)
    parallel_state.destroy_model_parallel()
    dist.destroy_process_group()
    return real, *alone(recipe)


def alone(recipe):
    from pretrain.engine.meta import build_on_meta

    model = build_on_meta(recipe)
    return shapes(model), {p.device.type for p in (*model.parameters(), *model.buffers())}


@pytest.mark.parametrize("kind", KINDS)
def test_shapes_are_those_of_the_built_model(forks, kind):
    real, meta, devices = only(forks.run(1, on_both, KINDS[kind]))
    assert meta == real and len(real) > 30
    assert devices == {"meta"}


def ranks(recipe, chosen):
    """Parameters and layers of each chosen rank's chunks, on the meta device; seconds for all of them."""
    import torch.distributed as dist

    from pretrain.engine.meta import build_rank_on_meta

    dist.destroy_process_group()
    begin = time.monotonic()
    held = []
    for rank in chosen:
        chunks = build_rank_on_meta(recipe, rank)
        held.append([(sum(p.numel() for p in c.parameters()), len(c.decoder.layers)) for c in chunks])
    assert not dist.is_initialized()
    return held, time.monotonic() - begin


def test_a_rank_of_thousands(forks):
    """A 61 B model on 2,048 ranks: what a rank of each stage holds, times the ranks of the stage, is all of it."""
    model = MODEL.with_values(
        {
            "num_layers": 8,
            "hidden_size": 4096,
            "attention.num_heads": 32,
            "attention.num_query_groups": 8,
            "attention.head_dim": 128,
            "ffn_hidden_size": 4096,
            "moe.num_experts": 256,
            "dense_ffn_hidden_size": 16384,
            "moe.layers": (2, 3, 4, 5, 6, 7, 8),
            "vocab_size": 32_000,
        }
    )
    parallel = ParallelConfig(tensor=8, pipeline=4, virtual_pipeline=2, expert=64, data=8)
    recipe = replace(RECIPE, model=model, parallel=parallel)
    assert parallel.world_size == 2048 and recipe.num_params() > 60e9
    held, seconds = only(forks.run(1, ranks, recipe, [0, 512, 1024, 1536]))
    assert [[layers for _, layers in chunks] for chunks in held] == [[1, 1]] * 4
    expert = 2 * 4096 * 4096 * 256 // 64  # of a layer, on one rank
    assert [chunks[1][0] - expert for chunks in held[:3]] == [held[0][1][0] - expert] * 3
    # Whatever is neither an expert, nor cut over tensor ranks (norms, router, shared expert), is on each of them.
    alike = 2 * 4096 + 2 * 128 + 256 * 4096 + 2 * 4096 * 4096
    layer = held[1][0][0]
    assert (layer - expert - alike) * 8 == 2 * 4096 * 128 * (32 + 8)
    assert seconds < 60


def parts(recipe):
    """Return the values of the recipe's keys in the built model."""
    import torch.distributed as dist

    from pretrain.engine.meta import build_on_meta

    dist.destroy_process_group()
    model = build_on_meta(recipe)
    norms = {type(m).__name__: m.eps for m in model.modules() if type(m).__name__ in ("RMSNorm", "LayerNorm")}
    stack = model.encoder if recipe.model.kind == "bert" else model.decoder
    attention = stack.layers[1].self_attention
    last = stack.layers[-1].mlp
    return {
        "norms": norms,
        "frequencies": model.rotary_pos_emb.inv_freq,
        "query norm": tuple(attention.q_layernorm.weight.shape),
        "qkv": tuple(attention.linear_qkv.weight.shape),
        "out": tuple(attention.linear_proj.weight.shape),
        "dense": tuple(stack.layers[0].mlp.linear_fc1.weight.shape),
        "expert": tuple(last.experts.weight_in.shape),
        "shared": tuple(last.shared.expert.weight_in.shape),
        "moe.gate": (last.gate.routed_scale, last.gate.normalize, last.gate.score),
    }


@pytest.mark.parametrize("kind", ["gpt", "t5", "bert"])
def test_every_key_is_where_it_belongs(forks, kind):
    model = KINDS[kind].model.with_values(
        {
            "position.encoding": "rope",
            "position.rope_theta": 5e5,
            "norm_eps": 1e-6,
            "moe.gate": "naive",
            "moe.normalize": False,
            "moe.score": "sigmoid",
            "moe.routed_scale": 2.5,
            "moe.layers": (2, 3, 4, *((6, 8) if kind == "t5" else ())),
        }
    )
    found = only(forks.run(1, parts, replace(RECIPE, model=model)))
    groups = 4 if kind == "t5" else 2
    expected = 1 / 5e5 ** (torch.arange(0, 6, 2) / 6)
    assert torch.allclose(found.pop("frequencies"), expected)
    assert found == {
        "norms": {"RMSNorm": 1e-6},
        "query norm": (6,),
        "qkv": (6 * (4 + 2 * groups), 32),
        "out": (32, 6 * 4),
        "dense": (40, 32),
        "expert": (8, 24, 32),
        "shared": (1, 24, 32),
        "moe.gate": (2.5, False, "sigmoid"),
    }
