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
OFFLOAD = "optimizer.cpu_offload=0.5 parallel.shard=optimizer train.precision=bf16 "
VALID = [
    XL,
    LATENT + YARN,
    RAMP,
    OFFLOAD,
    "model.kind=t5 model.tied_output_bias=false",
    "model.kind=bert moe.num_experts=0 parallel.expert=1 model.linear_bias=true model.segment_types=2",
    "train.precision=fp16 optimizer.loss_scale=0.125 optimizer.cpu_offload=0.25 parallel.shard=optimizer",
    "data.document_mask=true position.rope_theta=1e6 position.rotary_fraction=0.5 attention.qkv_bias=true "
    "attention.sinks=true attention.sliding_window=5 attention.sliding_layers=1,3 model.residual_scale=0.22",
    "attention.output_bias=true model.output_bias=true",
    "parallel.pipeline=2 parallel.virtual_pipeline=2",
    "parallel.tensor=2 parallel.pipeline=2 parallel.schedule=gpipe parallel.expert_tensor=2 parallel.sequence=false",
]

# Options of quickstart, and parts of the error.
INVALID = [
    # Values
    ("model.num_layers=four", "model.num_layers='four', int"),
    ("model.activation=gulu", "model.activation='gulu', gelu, relu, silu"),
    ("moe.layers=a", "moe.layers='a', int"),
    ("moe.capacity_factor=much", "moe.capacity_factor='much', number, none"),
    ("model.num_layers=0", "model.num_layers=0"),
    ("model.num_layers=-1", "model.num_layers=-1"),
    ("moe.layers=5", "moe.layers, 5, model.num_layers=4"),
    ("attention.num_heads=5", "attention.num_heads=5, model.hidden_size=192"),
    ("attention.num_heads=64", "attention.num_heads=64, model.hidden_size=192, position.encoding=rope"),
    ("attention.num_query_groups=4", "attention.num_query_groups=4, attention.num_heads=6"),
    ("attention.num_query_groups=0", "attention.num_query_groups=0"),
    ("attention.head_dim=33", "attention.head_dim=33, position.encoding=rope"),
    ("position.rope_theta=0.0", "position.rope_theta=0.0"),
    ("model.norm_eps=nan", "model.norm_eps=nan"),
    ("model.norm=batch", "model.norm='batch', layer, rms"),
    ("model.dense_ffn_hidden_size=512", "model.dense_ffn_hidden_size=512, without experts"),
    ("moe.num_shared_experts=-1", "moe.num_shared_experts=-1"),
    ("moe.shared_ffn_hidden_size=0", "moe.shared_ffn_hidden_size=0"),
    ("moe.routed_scale=-1.0", "moe.routed_scale=-1.0"),
    ("moe.bias_step=-1.0", "moe.bias_step=-1.0"),
    ("moe.score=tanh", "moe.score='tanh', softmax, sigmoid"),
    ("moe.top_k=17", "moe.top_k=17, moe.num_experts=16"),
    ("moe.capacity_factor=0.0", "moe.capacity_factor=0"),
    ("moe.capacity_factor=nan", "moe.capacity_factor=nan"),
    ("moe.jitter=1.0", "moe.jitter=1.0"),
    ("model.dropout=1.0", "model.dropout=1.0"),
    ("parallel.expert=3", "parallel.expert=3, moe.num_experts=16"),
    ("train.micro_batch=3", "train.micro_batch, 6, train.global_batch=16"),
    ("train.validation_sequences=17", "train.micro_batch, train.validation_sequences=17"),
    ("train.steps=30", "optimizer.warmup_steps=30, train.steps=30"),
    ("optimizer.decay_steps=20", "optimizer.warmup_steps=30, optimizer.decay_steps=20"),
    ("optimizer.lr=0.0", "optimizer.lr=0"),
    ("optimizer.lr=nan", "optimizer.lr=nan"),
    ("optimizer.min_lr=1.0", "optimizer.min_lr=1.0, optimizer.lr=0.002"),
    ("optimizer.min_lr=nan", "optimizer.min_lr=nan"),
    ("optimizer.beta1=1.0", "optimizer.beta1=1.0"),
    ("optimizer.clip_grad=-1.0", "optimizer.clip_grad=-1.0"),
    ("optimizer.clip_grad=nan", "optimizer.clip_grad=nan"),
    ("data.train=", "data.train"),
    ("checkpoint.keep=-1", "checkpoint.keep=-1"),
    ("train.seed=-1", "train.seed=-1"),
    ("model.segment_types=-1", "model.segment_types=-1, at least 0"),
    ("guard.spike_sigma=-inf", "guard.spike_sigma=-inf, at least 0"),
    ("moe.layers=2,1,2", "moe.layers"),
    ("moe.layers=0", "moe.layers"),
    # Keys that exclude each other
    (
        "model.kind=t5 attention.num_query_groups=2",
        "attention.num_query_groups=2, model.kind=t5, attention.num_heads=6",
    ),
    (
        "position.encoding=learned_absolute position.rotary_fraction=0.5",
        "position.rotary_fraction=0.5, learned_absolute",
    ),
    ("position.rotary_fraction=0.0", "position.rotary_fraction=0.0, more than 0"),
    ("position.rotary_fraction=1.5", "position.rotary_fraction=1.5, at most 1"),
    ("position.rotary_fraction=0.1 attention.head_dim=8", "position.rotary_fraction=0.1, 8 elements"),
    ("position.rotary_fraction=0.5 attention.head_dim=6", "position.rotary_fraction=0.5, even, 6 elements"),
    (
        "position.encoding=learned_absolute position.rope_theta=1000000.0",
        "position.rope_theta=1000000.0, learned_absolute",
    ),
    ("moe.num_experts=0 moe.num_shared_experts=1", "moe.num_shared_experts=1, moe.num_experts"),
    ("moe.shared_ffn_hidden_size=8", "moe.shared_ffn_hidden_size=8, moe.num_shared_experts"),
    ("moe.shared_expert_gate=true", "moe.shared_expert_gate=true, moe.num_shared_experts"),
    ("attention.qk_norm_over=all model.norm=rms", "attention.qk_norm_over=all, attention.qk_norm=true"),
    ("attention.scale=0.0", "attention.scale=0.0"),
    (LATENT + "attention.scale=1.0", "attention.scale=1.0, attention.kv_lora_rank=10"),
    ("model.embedding_scale=-1.0", "model.embedding_scale=-1.0"),
    ("model.residual_scale=0.5 model.kind=bert", "model.residual_scale=0.5, model.kind=gpt, bert"),
    ("model.logit_divisor=2.0 model.kind=t5", "model.logit_divisor=2.0, model.kind=gpt, t5"),
    ("model.kind=t5 attention.qkv_bias=true", "attention.qkv_bias=true, model.kind=t5"),
    ("model.kind=t5 attention.sinks=true", "attention.sinks=true, model.kind=gpt, t5"),
    ("model.kind=bert attention.sliding_window=4", "attention.sliding_window=4, model.kind=gpt, bert"),
    (LATENT + "attention.sinks=true", "attention.sinks=true, attention.kv_lora_rank=10"),
    ("attention.sliding_window=4 position.encoding=transformer_xl", "attention.sliding_window=4, transformer_xl"),
    ("attention.sliding_layers=1", "attention.sliding_layers=[1], attention.sliding_window"),
    ("attention.sliding_stride=4", "attention.sliding_stride=4, attention.sliding_window"),
    ("attention.sliding_window=0", "attention.sliding_window=0, at least 1"),
    (
        "attention.sliding_window=4 attention.sliding_layers=5",
        "attention.sliding_layers has layer 5, model.num_layers=4",
    ),
    ("attention.sliding_window=4 attention.sliding_layers=2,2", "attention.sliding_layers, 2 twice"),
    ("attention.sliding_window=4 model.mtp_layers=1", "attention.sliding_window=4, model.mtp_layers=1"),
    ("model.kind=bert attention.output_bias=true", "attention.output_bias=true, model.kind=gpt, bert"),
    (LATENT + "attention.output_bias=true", "attention.output_bias=true, attention.kv_lora_rank=10"),
    ("model.kind=t5 model.output_bias=true", "model.output_bias=true, model.kind=gpt, t5"),
    ("model.mtp_loss=0.1", "model.mtp_loss=0.1, model.mtp_layers"),
    ("model.mtp_layers=1 model.mtp_loss=0.0", "model.mtp_loss=0.0, more than 0"),
    ("model.mtp_layers=-1", "model.mtp_layers=-1"),
    ("model.mtp_layers=1 model.kind=t5", "model.mtp_layers=1, model.kind=gpt, t5"),
    ("model.mtp_layers=1 model.kind=bert", "model.mtp_layers=1, model.kind=gpt, bert"),
    ("model.mtp_layers=8 model.sequence_length=8", "model.mtp_layers=8, model.sequence_length=8"),
    ("model.mtp_layers=1 moe.layers=5", "moe.layers, 5, model.num_layers=4"),
    ("model.mtp_layers=1 data.document_mask=true", "data.document_mask=true, model.mtp_layers=1"),
    ("model.mtp_layers=1 data.chat=true", "data.chat=true, model.mtp_layers=1"),
    ("model.mtp_layers=1 parallel.context=2", "parallel.context=2, model.mtp_layers=1"),
    (
        "model.mtp_layers=1 parallel.pipeline=2 position.encoding=learned_absolute",
        "parallel.pipeline=2, position.encoding=learned_absolute, model.mtp_layers=1",
    ),
    (
        "attention.qk_norm_over=all attention.qk_norm=true model.norm=layer",
        "attention.qk_norm_over=all, model.norm=rms, layer",
    ),
    ("model.activation=swiglu_oai model.gated=false", "model.activation=swiglu_oai, model.gated=true"),
    # Splits of the quickstart: 4 layers, 6 heads, 16 experts of width 256, 256 tokens, vocabulary 2048, 16 sequences
    ("parallel.tensor=4", "parallel.tensor=4, attention.num_heads=6"),
    ("parallel.tensor=2 model.vocab_size=2049", "parallel.tensor=2, model.vocab_size=2049"),
    ("parallel.tensor=2 model.ffn_hidden_size=767 moe.layers=2", "parallel.tensor=2, model.ffn_hidden_size=767"),
    (
        "parallel.tensor=2 model.dense_ffn_hidden_size=767 moe.layers=2",
        "parallel.tensor=2, model.dense_ffn_hidden_size=767",
    ),
    ("parallel.tensor=2 attention.num_query_groups=3", "parallel.tensor=2, attention.num_query_groups=3"),
    ("parallel.tensor=2 model.sequence_length=255", "parallel.tensor=2, model.sequence_length=255"),
    ("parallel.tensor=2 model.kind=t5 model.sequence_length=200", "parallel.tensor=2, decoder tokens per sample=45"),
    (
        "parallel.pipeline=2 parallel.virtual_pipeline=2 model.kind=t5",
        "parallel.virtual_pipeline=2, model.kind=t5",
    ),
    ("parallel.pipeline=2 parallel.balance_stages=true model.kind=t5", "parallel.balance_stages, model.kind=t5"),
    (
        "parallel.pipeline=3 model.kind=t5 model.num_decoder_layers=3",
        "parallel.pipeline=3, model.num_layers + model.num_decoder_layers=7",
    ),
    (
        "parallel.pipeline=2 parallel.stage_layers=2,2 model.kind=t5",
        "parallel.stage_layers=[2, 2], model.num_layers + model.num_decoder_layers=8",
    ),
    (
        "parallel.pipeline=2 parallel.overlap_gradients=true model.kind=t5 position.encoding=relative",
        "parallel.pipeline=2, parallel.overlap_gradients, position.encoding=relative",
    ),
    ("parallel.sequence=true", "parallel.sequence=true, parallel.tensor > 1"),
    ("parallel.context=2 model.kind=t5", "parallel.context=2, model.kind=gpt, not t5"),
    ("parallel.context=2 model.kind=bert", "parallel.context=2, model.kind=gpt, not bert"),
    ("parallel.context=3", "parallel.context=3, model.sequence_length=256"),
    (
        "parallel.tensor=2 parallel.context=3 model.sequence_length=250",
        "parallel.tensor x parallel.context=6, model.sequence_length=250",
    ),
    ("parallel.context=4", "parallel.context=4, attention.num_heads=6"),
    ("parallel.tensor=2 parallel.context=2", "parallel.tensor x parallel.context=4, attention.num_heads=6"),
    ("parallel.context=2 parallel.expert=3 moe.num_experts=15", "parallel.context=2, parallel.expert=3, divide"),
    (
        "parallel.tensor=2 parallel.context=3 parallel.sequence=false model.sequence_length=240",
        "parallel.sequence=false, parallel.tensor=2, parallel.context=3",
    ),
    ("parallel.expert=2 parallel.exchange=deepep", "parallel.exchange=deepep, not fp32"),
    (
        "parallel.expert=2 parallel.exchange=deepep parallel.wire=fp32 train.precision=bf16",
        "parallel.exchange=deepep, not fp32",
    ),
    (
        "parallel.expert=2 parallel.exchange=deepep parallel.wire=bf16 model.hidden_size=204",
        "model.hidden_size=204, multiple of 16, parallel.exchange=deepep",
    ),
    (
        "parallel.expert=2 parallel.exchange=deepep parallel.wire=bf16 moe.num_experts=64 moe.top_k=33 moe.gate=naive",
        "moe.top_k=33, at most 32, parallel.exchange=deepep",
    ),
    ("parallel.pipeline=3", "parallel.pipeline=3, model.num_layers=4"),
    (
        "parallel.pipeline=2 parallel.virtual_pipeline=4",
        "parallel.pipeline x parallel.virtual_pipeline=8, model.num_layers=4",
    ),
    ("parallel.virtual_pipeline=2", "parallel.virtual_pipeline=2, parallel.pipeline > 1"),
    (
        "parallel.pipeline=2 parallel.virtual_pipeline=2 parallel.schedule=gpipe",
        "parallel.schedule=gpipe, parallel.virtual_pipeline=2",
    ),
    (
        "parallel.pipeline=2 parallel.virtual_pipeline=2 parallel.schedule=zero_bubble",
        "parallel.schedule=zero_bubble, parallel.virtual_pipeline=2",
    ),
    (
        "parallel.pipeline=2 parallel.schedule=zero_bubble parallel.recompute=full",
        "parallel.schedule=zero_bubble, parallel.recompute=full",
    ),
    (
        "parallel.pipeline=2 parallel.schedule=zero_bubble parallel.shard=parameters",
        "parallel.schedule=zero_bubble, parallel.shard=parameters",
    ),
    (
        "parallel.pipeline=2 parallel.schedule=zero_bubble parallel.shadow=1 parallel.overlap_gradients=true",
        "parallel.schedule=zero_bubble, parallel.shadow, parallel.overlap_gradients",
    ),
    (
        "parallel.pipeline=2 parallel.virtual_pipeline=2 train.global_batch=24",
        "train.global_batch=24, 3 micro batches, parallel.pipeline=2, parallel.virtual_pipeline=2",
    ),
    ("parallel.expert=2 moe.num_experts=0", "parallel.expert=2, moe.num_experts"),
    ("parallel.tensor=2 parallel.expert=3 moe.num_experts=15", "parallel.tensor, =2, parallel.expert, =3, divide"),
    ("parallel.tensor=1 parallel.expert_tensor=2", "parallel.expert_tensor=2, parallel.tensor=1"),
    (
        "parallel.tensor=2 parallel.expert_tensor=2 model.ffn_hidden_size=767",
        "parallel.expert_tensor=2, model.ffn_hidden_size=767",
    ),
    ("parallel.tensor=2 parallel.expert_tensor=2 parallel.shadow=1", "parallel.shadow=1, parallel.expert_tensor=1"),
    ("parallel.data=3", "train.micro_batch x parallel.data=24, train.global_batch=16"),
    (
        "parallel.tensor=2 parallel.expert=8",
        "train.micro_batch x parallel.expert x parallel.data / (parallel.tensor=2, =32, train.global_batch=16",
    ),
    ("parallel.overlap_parameters=true", "parallel.overlap_parameters, parallel.shard=optimizer"),
    ("train.activations=int8 parallel.recompute=full", "train.activations=int8, parallel.recompute=full"),
    ("train.activations=bf16 train.precision=bf16", "train.activations=bf16, train.precision=bf16"),
    ("parallel.stage_layers=2,2", "parallel.stage_layers, parallel.pipeline > 1"),
    ("parallel.pipeline=2 parallel.stage_layers=2,3", "parallel.stage_layers=[2, 3], model.num_layers=4"),
    ("parallel.pipeline=2 parallel.stage_layers=1,2,3", "parallel.stage_layers=[1, 2, 3], 2 numbers"),
    ("parallel.sync_every=3", "parallel.sync_every=3, train.validation_every=50"),
    ("parallel.sync_every=2 parallel.shard=optimizer", "parallel.sync_every=2, parallel.shard=none"),
    ("parallel.sync_outer=nesterov", "parallel.sync_outer=nesterov, parallel.sync_every > 1"),
    ("parallel.grad_compress=onebit", "parallel.grad_compress=onebit, optimizer.clip_grad=0.0"),
    ("parallel.grad_compress=dgc", "parallel.grad_compress=dgc, optimizer.name=sgd"),
    (
        "parallel.grad_compress=dgc parallel.shard=optimizer",
        "parallel.grad_compress=dgc, parallel.shard=none",
    ),
    ("parallel.grad_compress=onebit optimizer.name=muon", "parallel.grad_compress=onebit, optimizer.name=muon"),
    ("parallel.grad_compress=powersgd parallel.tensor=2", "parallel.grad_compress=powersgd, parallel.tensor=2"),
    ("parallel.shard=optimizer parallel.shard_size=1", "parallel.shard_size=1, parallel.shard=optimizer"),
    ("parallel.shard=parameters parallel.data=2 parallel.shard_size=3", "parallel.shard_size=3, parallel.data=2"),
    ("parallel.shard=parameters parallel.expert=4 parallel.shard_size=2", "parallel.shard_size=2, 2 copies"),
    ("parallel.shard=parameters parallel.shadow=1", "parallel.shadow=1, parallel.shard=parameters"),
    (
        "parallel.shard=gradients parallel.overlap_gradients=true",
        "parallel.overlap_gradients, parallel.shard=gradients",
    ),
    ("parallel.shard=gradients optimizer.cpu_offload=0.5", "optimizer.cpu_offload=0.5, 0 or 1"),
    (
        "parallel.shard=parameters optimizer.cpu_offload=1 parallel.tensor=2",
        "parallel.tensor=2, optimizer.cpu_offload=1",
    ),
    ("parallel.shard=all", "parallel.shard='all', none, optimizer, gradients, parameters"),
    ("parallel.tensor=0", "parallel.tensor=0"),
    # Optimizers
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
    (OFFLOAD + "parallel.shard=none", "optimizer.cpu_offload=0.5, parallel.shard=none"),
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
    (XL + "data.chat=true", "data.chat=true, position.memory_length=24"),
    (XL + "data.train=a,b data.weights=1.0,2.0", "data.weights=[1.0, 2.0], position.memory_length=24"),
    (XL + RAMP, "train.ramp_batch=4, position.memory_length=24"),
    (XL + "train.validation_sequences=24", "train.global_batch=16, train.validation_sequences=24"),
    # Kinds of models and their samples
    ("data.weights=1,2", "data.weights, 2, data.train, 1"),
    ("data.weights=0", "data.weights=[0.0], positive"),
    ("model.num_decoder_layers=2", "model.num_decoder_layers=2, model.kind=t5, not gpt"),
    ("model.kind=bert data.document_mask=true", "data.document_mask=true, model.kind=bert"),
    ("model.kind=t5 data.chat=true", "data.chat=true, model.kind=t5"),
    ("model.kind=t5 data.bos=true", "data.bos=true, model.kind=t5"),
    ("model.kind=t5 model.sequence_length=2", "model.sequence_length=2, data.noise_density"),
    ("model.kind=bert model.sequence_length=2", "model.sequence_length, 2"),
    ("model.output_scale=true", "model.kind=t5"),
    ("model.tied_output_bias=false", "model.kind=t5, not gpt"),
    ("model.tied_output_bias=false model.kind=t5 model.tie_embeddings=false", "model.tie_embeddings=true"),
    ("model.linear_bias=true", "model.kind=bert, not gpt"),
    ("model.segment_types=2 model.kind=t5", "model.kind=bert, not t5"),
    ("model.linear_bias=true model.kind=bert", "model.linear_bias=true, moe.num_experts=16"),
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
def test_valid_combinations(text):
    loaded(text)


@pytest.mark.parametrize(("text", "parts"), INVALID)
def test_keys_and_values_of_an_invalid_recipe_are_named(text, parts):
    with pytest.raises(UserError) as error:
        loaded(text)
    message = str(error.value)
    assert all(part in message for part in parts.split(", ")) and "\n" not in message, message
