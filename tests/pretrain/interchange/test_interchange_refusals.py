"""Which recipes and config.json each family supports; what it refuses is one line with the key and its value."""

import json
import re
from dataclasses import replace

import pytest

from fmoe.errors import UserError
from pretrain.config import ModelConfig, Recipe, load_recipe
from pretrain.config.model import full_name
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import FAMILIES, family_for, why_own
from pretrain.interchange.family import toml

LLAMA = {
    "norm": "rms",
    "activation": "silu",
    "gated": True,
    "moe.gate": "naive",
    "moe.top_k": 2,
    "moe.num_experts": 8,
    "moe.eval_capacity_factor": None,
}
SIGMOID = LLAMA | {
    "moe.gate": "sigmoid",
    "moe.top_k": 3,
    "moe.num_shared_experts": 1,
    "moe.layers": (2, 3, 4),
    "num_layers": 4,
    "dense_ffn_hidden_size": 40,
}
WIDTHS = {
    "attention.kv_lora_rank": 12,
    "attention.q_lora_rank": 18,
    "attention.qk_head_dim": 10,
    "attention.qk_rope_head_dim": 6,
    "attention.v_head_dim": 14,
}
LATENT = WIDTHS | {"norm_eps": 1e-6}
T5 = {
    "kind": "t5",
    "norm": "rms",
    "position.encoding": "relative",
    "attention.head_dim": 16,
    "tied_output_bias": False,
}
# A model of each family; the others differ from it.
MODELS = {
    "mixtral": LLAMA,
    "qwen3_moe": LLAMA | {"attention.qk_norm": True},
    "qwen2_moe": LLAMA | {"moe.num_shared_experts": 2, "moe.shared_expert_gate": True, "attention.qkv_bias": True},
    "olmoe": LLAMA | {"attention.qk_norm": True, "attention.qk_norm_over": "all"},
    "granitemoe": LLAMA | {"embedding_scale": 12.0, "attention.scale": 0.1},
    "phimoe": LLAMA | {"norm": "layer", "moe.gate": "sparsemixer"},
    "gpt_oss": LLAMA
    | {
        "num_layers": 3,
        "activation": "swiglu_oai",
        "attention.sinks": True,
        "attention.qkv_bias": True,
        "attention.output_bias": True,
        "attention.sliding_window": 16,
        "attention.sliding_layers": (1, 3),
        "moe.gate_options": {"bias": True},
        "moe.expert_options": {"bias": True},
    },
    "deepseek_moe": LLAMA | {"moe.num_shared_experts": 2, "moe.normalize": False},
    "deepseek_v2": SIGMOID | LATENT | {"moe.gate": "naive", "moe.normalize": False},
    "deepseek_v3": SIGMOID
    | LATENT
    | {
        "moe.gate_options": {"expert_groups": 4, "kept_groups": 2},
        "moe.routed_scale": 2.5,
        "mtp_layers": 2,
    },
    "glm4_moe": SIGMOID
    | {
        "attention.qkv_bias": True,
        "attention.qk_norm": True,
        "attention.num_query_groups": 2,
        "position.rotary_fraction": 0.5,
        "mtp_layers": 2,
    },
    "ernie4_5_moe": SIGMOID | {"moe.score": "softmax"},
    "switch_transformers": T5 | {"output_scale": True, "moe.eval_capacity_factor": None, "activation": "relu"},
    "t5": T5 | {"moe.num_experts": 0},
    "megatron-bert": {
        "kind": "bert",
        "moe.num_experts": 0,
        "position.encoding": "learned_absolute",
        "linear_bias": True,
        "segment_types": 2,
    },
}
# Further models of a family.
FITS = [
    *((family, {}) for family in MODELS),
    ("mixtral", {"moe.eval_capacity_factor": 4.0, "moe.capacity_factor": 1.0}),
    ("qwen3_moe", {"moe.layers": (1, 2), "moe.normalize": False}),
    ("qwen3_moe", {"moe.gate": "switch", "moe.jitter": 0.0}),
    ("olmoe", {"moe.normalize": False}),
    ("phimoe", {"moe.gate_options": {"margin": 0.5}, "output_bias": True}),
    ("qwen2_moe", {"moe.every": 2, "dense_ffn_hidden_size": 8}),
    ("gpt_oss", {"attention.sliding_layers": ()}),
    ("gpt_oss", {"attention.sliding_layers": (), "attention.sliding_window": None}),
    ("deepseek_v2", {"moe.gate": "switch", "moe.normalize": None, "moe.jitter": 0.0}),
    ("deepseek_v2", {"moe.layers": (), "dense_ffn_hidden_size": None}),
    ("deepseek_v2", {"moe.gate_options": {"expert_groups": 2, "kept_groups": 1}, "moe.top_k": 2}),
    ("deepseek_v3", {"moe.top_k": 1, "moe.routed_scale": 1.0}),
    ("deepseek_v3", {"moe.capacity_factor": 1.0, "moe.eval_capacity_factor": 3.0}),
    ("glm4_moe", {"attention.qkv_bias": False, "attention.qk_norm": False, "position.rotary_fraction": 1.0}),
    ("ernie4_5_moe", {"moe.layers": (), "moe.every": 2}),
    ("ernie4_5_moe", {"moe.num_shared_experts": 0, "moe.layers": (2,)}),
    ("switch_transformers", {"moe.gate": "naive", "moe.normalize": False, "moe.jitter": 0.0}),
    ("switch_transformers", {"moe.layers": (2, 4, 6, 8)}),
    ("switch_transformers", {"moe.layers": (2,), "moe.eval_capacity_factor": 8.0}),
    ("switch_transformers", {"num_layers": 3, "num_decoder_layers": 2, "moe.layers": (1, 2, 3, 5)}),
    ("switch_transformers", {"attention.scale": 1.0}),
    ("t5", {"gated": True, "moe.top_k": 2, "moe.gate": "naive"}),
    ("t5", {"tie_embeddings": False, "tied_output_bias": True}),
    ("t5", {"attention.head_dim": 32, "attention.scale": 1.0}),
]
# The first key is the one that the message names; ``words`` are in the rest of the message.
REFUSED = [
    # by --format, or by "auto" (in the nearest family)
    ("mixtral", "auto", {"norm": "layer"}, "mixtral, the nearest family: use model.norm=rms"),
    ("mixtral", "auto", {"activation": "gelu"}),
    ("mixtral", "auto", {"gated": False}),
    ("mixtral", "auto", {"position.encoding": "learned_absolute"}),
    ("mixtral", "mixtral", {"kind": "t5"}),
    ("mixtral", "auto", {"gated": True, "kind": "t5"}, "switch_transformers, the nearest"),
    ("mixtral", "qwen3_moe", {"kind": "bert"}),
    ("mixtral", "auto", {"moe.num_experts": 0}),
    ("mixtral", "mixtral", {"moe.num_shared_experts": 1}),
    ("mixtral", "mixtral", WIDTHS),
    ("mixtral", "auto", {"moe.gate": "sigmoid"}),
    ("mixtral", "auto", {"moe.gate": "gshard"}),
    ("qwen3_moe", "auto", {"moe.jitter": 0.01, "moe.gate": "switch"}),
    ("mixtral", "auto", {"moe.score": "sigmoid"}),
    ("mixtral", "auto", {"moe.routed_scale": 2.5}),
    ("mixtral", "auto", {"moe.gate_options": {"bias": True}}),
    ("mixtral", "auto", {"moe.expert": "swiglu"}),
    ("mixtral", "auto", {"moe.expert_options": {"bias": True}}),
    ("mixtral", "auto", {"mtp_layers": 1}),
    ("mixtral", "auto", {"moe.granularity": 2}),
    ("mixtral", "auto", {"moe.eval_capacity_factor": 3.9}, "--no-drops"),
    ("mixtral", "qwen3_moe", {"attention.qk_norm": False}, "attention.qk_norm=true"),
    ("qwen3_moe", "mixtral", {"attention.qk_norm": True}),
    ("mixtral", "auto", {"attention.qk_norm": False, "moe.layers": (2,)}, "qwen3_moe, the nearest .*=true"),
    ("mixtral", "auto", {"moe.every": 2}, "experts in every layer"),
    ("mixtral", "auto", {"moe.normalize": False}),
    ("mixtral", "mixtral", {"moe.gate": "switch", "moe.jitter": 0.0}),
    ("qwen2_moe", "qwen2_moe", {"moe.shared_expert_gate": False}, "=true"),
    ("qwen2_moe", "auto", {"attention.qk_norm": True}, "qwen2_moe, the nearest .*: use attention.qk_norm=false"),
    ("qwen3_moe", "olmoe", {"attention.qk_norm_over": "head"}, "=all"),
    ("olmoe", "olmoe", {"moe.every": 2}),
    ("olmoe", "olmoe", {"attention.head_dim": 64}),
    ("mixtral", "mixtral", {"embedding_scale": 2.0}, "=1.0"),
    ("granitemoe", "granitemoe", {"moe.normalize": False}),
    ("mixtral", "mixtral", {"attention.qkv_bias": True}),
    ("mixtral", "mixtral", {"moe.gate": "sparsemixer"}),
    ("mixtral", "mixtral", {"output_bias": True}, "=false"),
    ("phimoe", "phimoe", {"moe.gate": "naive"}, "sparsemixer"),
    ("phimoe", "phimoe", {"moe.top_k": 3}, "use 2"),
    ("phimoe", "phimoe", {"attention.output_bias": False, "attention.qkv_bias": True}, "qkv_bias"),
    ("phimoe", "phimoe", {"moe.gate_options": {"bias": True}}, "margin"),
    ("gpt_oss", "gpt_oss", {"attention.sinks": False}),
    ("gpt_oss", "gpt_oss", {"activation": "silu"}),
    ("gpt_oss", "gpt_oss", {"attention.output_bias": True, "attention.qkv_bias": False}),
    ("gpt_oss", "gpt_oss", {"moe.gate_options": {}}),
    ("gpt_oss", "gpt_oss", {"moe.expert_options": {}}),
    ("gpt_oss", "gpt_oss", {"moe.every": 2}),
    ("gpt_oss", "gpt_oss", {"moe.num_shared_experts": 1}),
    ("gpt_oss", "gpt_oss", {"moe.normalize": False}),
    ("deepseek_v3", "auto", {"norm_eps": 1e-5}, "deepseek_v.*=1e-06"),
    ("deepseek_v3", "deepseek_v3", dict.fromkeys(WIDTHS), "latent"),
    ("deepseek_v3", "auto", {"moe.num_shared_experts": 0}, "at least 1"),
    ("deepseek_v2", "auto", {"moe.layers": (1, 2)}, "all layers but the first"),
    ("deepseek_v2", "auto", {"moe.every": 2, "moe.layers": ()}, "all layers but the first"),
    ("deepseek_v2", "auto", {"moe.normalize": None}, "false"),
    ("deepseek_v2", "auto", {"mtp_layers": 1}, "0"),
    ("deepseek_v2", "deepseek_v2", {"hidden_size": 190}, "attention.num_heads"),
    ("deepseek_v3", "auto", {"moe.score": "softmax"}, "sigmoid"),
    ("deepseek_v3", "auto", {"moe.gate_options": {"expert_groups": 8, "kept_groups": 3}}, "groups of at least 2"),
    ("deepseek_v2", "auto", {"moe.gate_options": {"bias": True}}, "groups"),
    ("deepseek_v3", "auto", {"moe.eval_capacity_factor": 1.0}, "num_experts"),
    ("deepseek_v3", "auto", {"moe.granularity": 2}, "1"),
    ("glm4_moe", "glm4_moe", {"norm": "layer"}, "rms"),
    ("ernie4_5_moe", "ernie4_5_moe", {"moe.top_k": 1}, "at least 2"),
    ("ernie4_5_moe", "ernie4_5_moe", {"moe.layers": (1, 3, 4)}, "the multiples of a number"),
    ("ernie4_5_moe", "ernie4_5_moe", {"moe.gate_options": {"expert_groups": 2}}, "{}"),
    ("ernie4_5_moe", "ernie4_5_moe", {"moe.routed_scale": 2.0}, "1.0"),
    ("ernie4_5_moe", "ernie4_5_moe", {"moe.score": None}, "softmax"),
    ("switch_transformers", "auto", {"norm": "layer"}, "switch_"),
    ("t5", "auto", {"position.encoding": "rope"}, "t5, the nearest family"),
    ("switch_transformers", "auto", {"gated": True}, "model.gated=false"),
    ("switch_transformers", "auto", {"tied_output_bias": True}, "_bias=false"),
    ("t5", "auto", {"tied_output_bias": True}, "use false"),
    ("switch_transformers", "auto", {"output_scale": False}, "_scale=true"),
    ("switch_transformers", "auto", {"tie_embeddings": False, "tied_output_bias": True}, "=true"),
    ("switch_transformers", "auto", {"moe.top_k": 2}, "moe.top_k=1"),
    ("switch_transformers", "auto", {"moe.normalize": None, "moe.gate": "naive"}, "false"),
    ("switch_transformers", "auto", {"moe.gate": "gshard"}),
    ("switch_transformers", "auto", {"moe.eval_capacity_factor": 2.0}, "=none"),
    ("switch_transformers", "auto", {"moe.layers": (3, 7)}, "layer 2 and"),
    ("switch_transformers", "auto", {"moe.every": 3}, "layer 2 and"),
    ("switch_transformers", "auto", {"dense_ffn_hidden_size": 9, "moe.every": 2}),
    ("switch_transformers", "auto", {"moe.num_shared_experts": 1}),
    ("t5", "auto", {"activation": "swiglu_oai", "gated": True}, "gelu"),
    ("t5", "auto", {"attention.head_dim": 32}, "a power of 4"),
    ("t5", "auto", {"attention.scale": 0.5, "attention.head_dim": 32}, ".scale=1.0 or none"),
    ("t5", "auto", {"attention.num_query_groups": 6}),
    ("megatron-bert", "auto", {"moe.num_experts": 8, "linear_bias": False}, "megatron-bert, .*no BERT with experts"),
    ("megatron-bert", "auto", {"linear_bias": False}, "=true"),
    ("megatron-bert", "auto", {"position.encoding": "rope"}, "=learned_absolute"),
    ("megatron-bert", "auto", {"segment_types": 0}, "at least 1"),
    ("megatron-bert", "auto", {"norm": "rms"}, "norm=layer"),
    ("megatron-bert", "auto", {"activation": "gelu_tanh"}, "=gelu"),
    ("megatron-bert", "auto", {"tie_embeddings": False}, "=true"),
    ("megatron-bert", "auto", {"attention.head_dim": 64}, "hidden_size / num_heads"),
]
ROPE = "rope_parameters"
# The message names the first key and its value, or has ``words`` instead.
CONFIGS = [
    ("mixtral", {"model_type": "llama"}, "model_type=llama .* mixtral, qwen3_moe, qwen2_moe, olmoe, granitemoe"),
    ("mixtral", {"model_type": None}),
    ("mixtral", {"model_type": "deepseek"}, r"model_type=deepseek is not supported: ((?!deepseek_moe).)*$"),
    ("mixtral", {"model_type": "bert"}, "model_type=bert .*megatron-bert"),
    ("mixtral", {"fmoe_format": "other"}),
    ("mixtral", {"sliding_window": 0}),
    ("mixtral", {"rope_scaling": {"type": "linear", "factor": 2.0}}),
    ("mixtral", {ROPE: {"rope_type": "yarn", "rope_theta": 1e4}}, "factor is missing"),
    ("mixtral", {"partial_rotary_factor": 0.5}),
    ("mixtral", {"hidden_act": "gelu"}, "hidden_act=gelu .* must be silu"),
    ("mixtral", {"quantization_config": {"bits": 4}}),
    ("mixtral", {"hidden_size": "32"}, "hidden_size=32 must be a positive integer"),
    ("mixtral", {"num_hidden_layers": 0}),
    ("mixtral", {"hidden_size": None}, "hidden_size is missing"),
    ("mixtral", {"num_experts_per_tok": 9}, "moe.top_k=9 exceeds"),
    ("qwen3_moe", {"attention_bias": True}, "attention_bias=true .* must be false"),
    ("qwen3_moe", {"use_sliding_window": True}, "use_sliding_window=true .* must be false"),
    ("qwen3_moe", {"layer_types": ["sliding_attention"] * 4}),
    ("qwen3_moe", {"decoder_sparse_step": 9}, "no layer has experts"),
    ("qwen3_moe", {"mlp_only_layers": [70]}),
    ("qwen2_moe", {"use_sliding_window": True, "sliding_window": 8}),
    ("qwen2_moe", {"shared_expert_intermediate_size": None}, "shared_expert_intermediate_size is"),
    ("qwen2_moe", {"qkv_bias": 1}, "qkv_bias=1 must be true or false"),
    ("deepseek_moe", {"shared_expert_intermediate_size": 1409}),
    ("deepseek_moe", {"qkv_bias": False}),
    ("olmoe", {"clip_qkv": 8.0}),
    ("granitemoe", {"attention_bias": True}),
    ("granitemoe", {"logits_scaling": "6"}, "logits_scaling=6 must be a number"),
    ("phimoe", {"rope_scaling": {"type": "longrope", "short_factor": [1.0]}}),
    ("phimoe", {"sliding_window": 0}),
    ("phimoe", {"num_experts_per_tok": 1}),
    ("phimoe", {"router_jitter_noise": -0.5}),
    ("phimoe", {"router_jitter_noise": 10**400}),
    ("phimoe", {"attention_bias": "yes"}),
    ("gpt_oss", {"layer_types": ["full_attention"] * 2}, "layer_types=.* a list of 3 entries"),
    ("gpt_oss", {"layer_types": ["chunked_attention"] * 3}),
    ("gpt_oss", {"sliding_window": None}),
    ("gpt_oss", {"swiglu_limit": 8.0}),
    ("gpt_oss", {"swiglu_alpha": 1.0}),
    ("gpt_oss", {"attention_bias": 1}),
    ("gpt_oss", {"quantization_config": {"quant_method": "fp8"}}),
    ("deepseek_v3", {"rope_interleave": False}),
    ("deepseek_v3", {"attention_bias": True}),
    ("deepseek_v3", {"num_local_experts": 4}),
    ("deepseek_v3", {"rms_norm_eps": 1e-5}),
    ("deepseek_v3", {"rope_scaling": {"type": "longrope", "factor": 40}}),
    ("deepseek_v3", {"quantization_config": {"quant_method": "fp8"}}),
    ("deepseek_v3", {"topk_method": "greedy"}),
    ("deepseek_v3", {"scoring_func": "softmax"}),
    ("deepseek_v3", {"first_k_dense_replace": 4}),
    ("deepseek_v3", {"intermediate_size": 0}),
    ("deepseek_v3", {"num_experts_per_tok": 1}, "norm_topk_prob=true .* num_experts_per_tok=1"),
    ("deepseek_v3", {"norm_topk_prob": 1}),
    ("deepseek_v3", {"n_group": 0}),
    ("deepseek_v3", {"n_group": 3}, "n_group=3 .*expert_groups=3"),
    ("deepseek_v3", {"num_nextn_predict_layers": -1}),
    ("deepseek_v3", {"q_lora_rank": 0}),
    ("deepseek_v3", {"num_key_value_heads": 2}, "attention.num_query_groups=2"),
    ("deepseek_v3", {"moe_layer_freq": 2}),
    ("deepseek_v2", {"n_shared_experts": 0}),
    ("deepseek_v2", {"norm_topk_prob": True}),
    ("deepseek_v2", {"topk_method": "noaux_tc"}),
    ("deepseek_v2", {"mlp_bias": True}),
    ("glm4_moe", {ROPE: {"rope_type": "linear", "factor": 2.0}}),
    ("glm4_moe", {ROPE: {"partial_rotary_factor": 0.1}}, "position.rotary_fraction=0.1"),
    ("glm4_moe", {ROPE: {"partial_rotary_factor": "half"}}, "partial_rotary_factor=half"),
    ("glm4_moe", {"n_group": 3}),
    ("glm4_moe", {"hidden_act": "gelu"}),
    ("ernie4_5_moe", {"moe_k": 2, "num_experts_per_tok": 3}, "moe_k=2 and num_experts_per_tok=3"),
    ("ernie4_5_moe", {"rope_scaling": {"type": "default"}}, "differs from rope_parameters"),
    ("ernie4_5_moe", {"rms_norm_eps": 10**400}),
    ("ernie4_5_moe", {"moe_k": 1}),
    ("ernie4_5_moe", {"use_bias": True}),
    ("ernie4_5_moe", {"moe_layer_end_index": 4}),
    ("ernie4_5_moe", {"moe_layer_start_index": 2, "moe_layer_end_index": 1}),
    ("ernie4_5_moe", {"moe_norm_min": 0.1}),
    ("t5", {"relative_attention_num_buckets": 64}, "relative_attention_num_buckets=64 .* must be 32"),
    ("t5", {"is_encoder_decoder": False}, "is_encoder_decoder=false .* must be true"),
    ("t5", {"feed_forward_proj": "gated-tanh"}),
    ("t5", {"dense_act_fn": "silu"}, "dense_act_fn=silu contradicts feed_forward_proj="),
    ("switch_transformers", {"relative_attention_max_distance": 64}),
    ("switch_transformers", {"dense_act_fn": "tanh"}),
    ("switch_transformers", {"router_bias": True}, "router_bias=true .* must be false"),
    ("switch_transformers", {"router_dtype": "bfloat16"}),
    ("switch_transformers", {"tie_word_embeddings": False}),
    ("switch_transformers", {"encoder_sparse_step": 0, "decoder_sparse_step": 0}),
    ("switch_transformers", {"expert_capacity": 0}),
    ("megatron-bert", {"hidden_act": "gelu_new"}, "hidden_act=gelu_new .* must be gelu"),
    ("megatron-bert", {"tie_word_embeddings": False}, "tie_word_embeddings=false .* must be true"),
    ("megatron-bert", {"chunk_size_feed_forward": 5}, "chunk_size_feed_forward=5 .* must be 0"),
    ("megatron-bert", {"is_decoder": True}),
    ("megatron-bert", {"position_embedding_type": "relative_key"}),
]


def built(family, changes=()):
    return ModelConfig().with_values(MODELS[family] | dict(changes))


def config_with(family, changes=()):
    config = config_of(FAMILIES[family], built(family), "float32")
    return json.loads(json.dumps(config)) | dict(changes)


def named(changes):
    """The first key with its value, as a regular expression."""
    name, value = next(iter(changes.items()))
    return re.escape(f"{full_name(name)}={toml(value)}")


def by_row(rows, size):
    """Parameters with readable ids; rows may leave out the last one, which is empty then."""
    filled = [row if len(row) == size else (*row, "") for row in rows]
    return [pytest.param(*row, id=" ".join([str(row[0]), *map(str, row[1:-1])])[:80]) for row in filled]


@pytest.mark.parametrize(("family", "changes"), [pytest.param(*row, id=f"{row[0]} {row[1]}"[:80]) for row in FITS])
def test_a_model_of_a_family_is_written_and_read(family, changes):
    model = built(family, changes)
    Recipe(model=model).check()
    assert family_for(model).name == family
    config = json.loads(json.dumps(config_of(FAMILIES[family], model, "float32")))
    again, read = model_of(config)
    assert again is FAMILIES[family]
    for name in ("layers_with_experts", "layers_with_window", "decoder_layers", "head_width", "dense_width"):
        assert getattr(read, name) == getattr(model, name), name
    converted = [key.ours for key in again.keys if key.value is None] + ["mtp_layers", "attention.q_lora_rank"]
    for name in {*converted, *again.fixed} - {"sequence_length"}:
        assert read.value(name) == model.value(name), name
    assert read.moe.gate_options == model.moe.gate_options


@pytest.mark.parametrize(("base", "form", "changes", "words"), by_row(REFUSED, 4))
def test_recipes_that_are_refused(base, form, changes, words):
    model = built(base, changes)
    if form == "auto" and model.kind == "gpt":  # our own family supports it, unless its values exclude each other
        line = why_own(model)
    else:
        with pytest.raises(UserError) as error:
            family_for(model, form)
        line = str(error.value)
    assert re.search(rf"{named(changes)} is not supported by .*{words}", line) and "\n" not in line, line
    assert form == "auto" or f"supported by {form}:" in line


def test_an_unknown_family():
    with pytest.raises(UserError, match="--format llama is invalid: use auto, mixtral, qwen3_moe, qwen2_moe, olmoe"):
        family_for(built("mixtral"), "llama")


@pytest.mark.parametrize(("family", "changes", "words"), by_row(CONFIGS, 3))
def test_configurations_that_are_refused(family, changes, words):
    config = config_with(family)
    Recipe(model=model_of(config)[1]).check()
    with pytest.raises(UserError) as error:
        Recipe(model=model_of(config | changes)[1]).check()
    expected = words or named(changes).removeprefix("model\\.")
    assert re.search(expected, str(error.value)) and "\n" not in str(error.value), str(error.value)


@pytest.mark.parametrize("name", ["switch-base", "switch-large", "switch-c"])
def test_recipes_are_exported_without_drops(name):
    recipe = load_recipe(name)
    with pytest.raises(UserError, match=r"moe.eval_capacity_factor=2\.0 .* --no-drops"):
        family_for(recipe.model)
    recipe = replace(recipe, model=recipe.model.with_values({"moe.eval_capacity_factor": None}))
    family = family_for(recipe.model)
    assert family.name == "switch_transformers"
    again = Recipe(model=model_of(config_of(family, recipe.model, "bfloat16"))[1])
    assert again.num_params() == recipe.num_params()


def test_a_rotary_factor_of_null_is_one():
    """As in transformers, whose default of one half is for a missing key."""
    config = config_with("glm4_moe", {"rope_scaling": None, ROPE: {"rope_type": "default", "rope_theta": 1e4}})
    del config["partial_rotary_factor"]
    assert model_of(config)[1].position.rotary_fraction == 0.5
    assert model_of(config | {"partial_rotary_factor": None})[1].position.rotary_fraction == 1.0
