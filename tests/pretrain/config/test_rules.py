"""Invalid recipes, by a key or by several that do not fit: the error has the keys with their values and limits."""

import pytest

from fmoe.errors import UserError
from pretrain.config import load_recipe

XL = "position.encoding=transformer_xl position.memory_length=24 "
LATENT = "attention.kv_lora_rank=10 attention.qk_head_dim=6 attention.qk_rope_head_dim=4 attention.v_head_dim=5 "
YARN = "position.rope_scaling=yarn position.rope_factor=4.0 position.rope_original_length=8 " + (
    "position.rope_beta_fast=2.0 position.rope_beta_slow=0.25 position.rope_mscale=2.0 "
    "position.rope_mscale_all_dim=0.7 position.rope_truncate=false "
)
RAMP = "train.micro_batch=1 train.ramp_batch=4 train.ramp_increment=4 train.ramp_samples=24 "
OFFLOAD = "optimizer.cpu_offload=0.5 optimizer.distributed=true train.precision=bf16 "
VALID = [XL, LATENT, YARN, RAMP, OFFLOAD]

# Options of quickstart, and parts of the error.
INVALID = [
    # Optimizers
    ("optimizer.name=adafactor optimizer.distributed=true", "optimizer.name=adafactor, optimizer.distributed=false"),
    ("optimizer.name=adamw8bit optimizer.distributed=true", "optimizer.name=adamw8bit, optimizer.distributed=false"),
    ("optimizer.name=adafactor parallel.tensor=2", "parallel.tensor=2, optimizer.name=adafactor"),
    ("optimizer.lr_scaling=sqrt", "optimizer.lr_scaling=sqrt, optimizer.base_batch"),
    ("optimizer.base_batch=8", "optimizer.base_batch=8, optimizer.lr_scaling=none"),
    ("optimizer.base_batch=0 optimizer.lr_scaling=sqrt", "optimizer.base_batch=0, at least 1"),
    ("optimizer.name=sgd optimizer.momentum=1.0", "optimizer.momentum=1.0, less than 1"),
    ("optimizer.name=muon optimizer.momentum=-0.5", "optimizer.momentum=-0.5, at least 0"),
    ("optimizer.name=muon optimizer.ns_steps=0", "optimizer.ns_steps=0, at least 1"),
    ("optimizer.name=lars optimizer.trust_coefficient=0.0", "optimizer.trust_coefficient=0.0, more than 0"),
    ("optimizer.name=lamb optimizer.max_trust=-1.0", "optimizer.max_trust=-1.0, more than 0"),
    ("optimizer.beta2_decay=0.8", "optimizer.beta2_decay=0.8, at most 0"),
    ("optimizer.update_clip=0.5", "optimizer.update_clip=0.5, at least 1"),
    ("optimizer.warmup_tokens=4000000", "optimizer.warmup_tokens=4000000, 977 steps, train.steps=300"),
    (OFFLOAD + "optimizer.name=muon", "optimizer.cpu_offload=0.5, optimizer.name=adamw, not muon"),
    (OFFLOAD + "optimizer.name=lamb", "optimizer.cpu_offload=0.5, optimizer.name=adamw, not lamb"),
    (OFFLOAD + "optimizer.cpu_offload=1.5", "optimizer.cpu_offload=1.5, at most 1"),
    (OFFLOAD + "optimizer.cpu_offload=-0.5", "optimizer.cpu_offload=-0.5, at least 0"),
    (OFFLOAD + "optimizer.distributed=false", "optimizer.cpu_offload=0.5, optimizer.distributed=true"),
    (OFFLOAD + "train.precision=fp32", "optimizer.cpu_offload=0.5, train.precision=fp32, bf16 or fp16"),
    # The loss scale
    ("optimizer.loss_scale=8.0", "optimizer.loss_scale=8.0, train.precision=fp16, not fp32"),
    ("optimizer.hysteresis=2 train.precision=bf16", "optimizer.hysteresis=2, train.precision=fp16, not bf16"),
    ("train.precision=fp16 optimizer.loss_scale=0.0", "optimizer.loss_scale=0.0, at least 1.17549e-38"),
    ("train.precision=fp16 optimizer.initial_loss_scale=nan", "optimizer.initial_loss_scale=nan, finite"),
    ("train.precision=fp16 optimizer.initial_loss_scale=inf", "optimizer.initial_loss_scale=inf, finite"),
    ("train.precision=fp16 optimizer.loss_scale_window=0", "optimizer.loss_scale_window=0, at least 1"),
    ("train.precision=fp16 optimizer.hysteresis=0", "optimizer.hysteresis=0, at least 1"),
    (
        "train.precision=fp16 optimizer.loss_scale=8.0 optimizer.initial_loss_scale=16.0",
        "optimizer.initial_loss_scale=16.0, optimizer.loss_scale=8.0",
    ),
    (
        "train.precision=fp16 optimizer.min_loss_scale=131072.0",
        "optimizer.min_loss_scale=131072.0, optimizer.initial_loss_scale=65536.0",
    ),
    # Batches that grow
    ("train.ramp_batch=4", "train.ramp_batch=4, train.ramp_increment"),
    ("train.ramp_samples=4", "train.ramp_samples=4, train.ramp_batch"),
    (RAMP + "train.ramp_batch=16", "train.ramp_batch=16, train.global_batch=16"),
    (RAMP + "train.ramp_increment=5", "train.ramp_increment=5, train.global_batch - train.ramp_batch=12"),
    (RAMP + "train.micro_batch=2 train.ramp_batch=1 train.ramp_increment=15", "train.ramp_batch=1"),
    (RAMP + "train.micro_batch=2 train.ramp_increment=3", "train.ramp_increment=3"),
    (RAMP + "train.ramp_samples=0", "train.ramp_samples=0, at least 1"),
    # Multi-latent attention
    (LATENT + "attention.kv_lora_rank=none", "attention.qk_head_dim=6, attention.kv_lora_rank"),
    (LATENT + "attention.v_head_dim=none", "attention.kv_lora_rank=10, attention.v_head_dim"),
    (LATENT + "attention.qk_rope_head_dim=3", "attention.qk_rope_head_dim=3, multiple of 2"),
    (LATENT + "attention.kv_lora_rank=0", "attention.kv_lora_rank=0"),
    (LATENT + "attention.q_lora_rank=-1", "attention.q_lora_rank=-1"),
    (LATENT + "model.kind=t5", "attention.kv_lora_rank=10, model.kind=gpt, t5"),
    (LATENT + "model.kind=bert", "attention.kv_lora_rank=10, model.kind=gpt, bert"),
    (LATENT + "position.encoding=learned_absolute", "attention.kv_lora_rank=10, learned_absolute"),
    (LATENT + "attention.num_query_groups=3", "attention.num_query_groups=3, attention.kv_lora_rank=10"),
    (LATENT + "attention.head_dim=4", "attention.head_dim=4, attention.kv_lora_rank=10"),
    (LATENT + "attention.qk_norm=true", "attention.qk_norm=true, attention.kv_lora_rank=10"),
    (LATENT + "attention.qkv_bias=true", "attention.qkv_bias=true, attention.kv_lora_rank=10"),
    (LATENT + "position.rotary_fraction=0.5", "position.rotary_fraction=0.5, attention.kv_lora_rank"),
    (LATENT + "parallel.context=2", "parallel.context=2, attention.kv_lora_rank=10"),
    (LATENT + "parallel.tensor=2 attention.kv_lora_rank=9", "parallel.tensor=2, attention.kv_lora_rank, =13"),
    (LATENT + "parallel.tensor=2 attention.q_lora_rank=9", "parallel.tensor=2, attention.q_lora_rank=9"),
    # YaRN
    (YARN + "position.rope_scaling=none", "position.rope_factor=4.0, position.rope_scaling=yarn"),
    (YARN + "position.rope_original_length=none", "position.rope_scaling=yarn, position.rope_original_length"),
    (YARN + "position.rope_original_length=0", "position.rope_original_length=0"),
    (YARN + "position.rope_original_length=1", "position.rope_original_length=1, 1.6"),
    (YARN + "position.rope_original_length=200000", "position.rope_original_length=200000, 125663"),
    (YARN + "position.rope_factor=0.5", "position.rope_factor=0.5, at least 1"),
    (YARN + "position.rope_factor=nan", "position.rope_factor=nan"),
    (YARN + "position.rope_factor=inf", "position.rope_factor=inf"),
    (YARN + "position.rope_beta_slow=3.0", "position.rope_beta_slow=3.0, position.rope_beta_fast=2.0"),
    (YARN + "position.rope_beta_slow=0.0", "position.rope_beta_slow=0.0, more than 0"),
    (YARN + "position.rope_mscale=0.0", "position.rope_mscale=0.0, more than 0"),
    (YARN + "position.rope_mscale_all_dim=0.0", "position.rope_mscale=2.0, position.rope_mscale_all_dim"),
    (YARN + "position.rope_mscale_all_dim=-1.0", "position.rope_mscale_all_dim=-1.0"),
    (YARN + "position.rope_theta=1.0", "position.rope_theta > 1, not 1.0"),
    (YARN + "position.encoding=learned_absolute", "position.rope_scaling=yarn, learned_absolute"),
    (YARN + "model.kind=t5", "position.rope_scaling=yarn, model.kind=gpt, t5"),
    (YARN + "model.kind=bert", "position.rope_scaling=yarn, model.kind=gpt, bert"),
    # Transformer-XL
    (XL + "position.encoding=rope", "position.memory_length=24, position.encoding=transformer_xl, rope"),
    (XL + "model.kind=t5", "position.encoding=transformer_xl, model.kind=gpt, t5"),
    (XL + "model.kind=bert", "position.encoding=transformer_xl, model.kind=gpt, bert"),
    (XL + "model.hidden_size=33 attention.head_dim=8", "model.hidden_size=33, even"),
    (XL + "model.mtp_layers=1", "model.mtp_layers=1, transformer_xl"),
    (XL + "position.memory_length=-1", "position.memory_length=-1"),
    (XL + "position.rope_theta=5.0", "position.rope_theta=5.0, transformer_xl"),
    (XL + "parallel.context=2", "parallel.context=2, transformer_xl"),
    (XL + "parallel.tensor=2 position.memory_length=7", "parallel.tensor=2, position.memory_length=7"),
    (
        XL + "parallel.pipeline=2 parallel.recompute=full",
        "parallel.recompute=full, parallel.pipeline=2, position.memory_length=24, selective",
    ),
    (XL + "data.document_mask=true", "data.document_mask=true, position.memory_length=24"),
    (XL + "data.train=a,b data.weights=1.0,2.0", "data.weights=[1.0, 2.0], position.memory_length=24"),
    (XL + RAMP, "train.ramp_batch=4, position.memory_length=24"),
    (XL + "train.validation_sequences=24", "train.global_batch=16, train.validation_sequences=24"),
    # Kinds of models and their samples
    ("data.weights=1,2", "data.weights, 2, data.train, 1"),
    ("data.weights=0", "data.weights=[0.0], positive"),
    ("model.num_decoder_layers=2", "model.num_decoder_layers=2, model.kind=t5, not gpt"),
    ("model.kind=bert data.document_mask=true", "data.document_mask=true, model.kind=bert"),
    ("model.kind=t5 data.bos=true", "data.bos=true, model.kind=t5"),
    ("model.kind=t5 model.sequence_length=2", "model.sequence_length=2, data.noise_density"),
    ("model.kind=bert model.sequence_length=2", "model.sequence_length, 2"),
    ("data.noise_density=1", "data.noise_density=1.0, 0.99"),
    ("data.mean_span=0.5", "data.mean_span=0.5, at least 1"),
    ("moe.every=5", "moe.every=5, 4"),
    ("model.kind=t5 moe.layers=9", "moe.layers, 9"),
    # Guards
    ("guard.spike_history=9 guard.spike_window=8", "guard.spike_history=9, guard.spike_window=8"),
    ("guard.hang_minutes=-1", "guard.hang_minutes=-1.0"),
    ("guard.max_skips=0", "guard.max_skips=0, at least 1"),
    ("guard.collapse_dead=1.5", "guard.collapse_dead=1.5, at most 1"),
]


def loaded(text):
    values = {"parallel.expert": "1"} | dict(word.split("=", 1) for word in text.split())
    options = []
    for key, value in values.items():
        options += [f"--{key}", *value.split(",")] if "," in value else [f"--{key}={value}"]
    return load_recipe("quickstart", options)


@pytest.mark.parametrize("text", VALID)
def test_the_bases_are_valid(text):
    loaded(text)


@pytest.mark.parametrize(("text", "parts"), INVALID)
def test_keys_and_values_of_an_invalid_recipe_are_named(text, parts):
    with pytest.raises(UserError) as error:
        loaded(text)
    message = str(error.value)
    assert all(part in message for part in parts.split(", ")) and "\n" not in message, message
