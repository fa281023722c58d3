"""Tiny models of Hugging Face with random weights, in folders, and what our model makes of a checkpoint. No test."""

from dataclasses import replace
from pathlib import Path

import torch
import torch.distributed as dist
from deepseek_cases import DEEPSEEK_CASES
from safetensors.torch import load_file
from torch import Tensor
from yarn_cases import YARN_CASES

from pretrain.checkpoint import open_checkpoint
from pretrain.config import DataConfig, ModelConfig, ParallelConfig, Recipe, RunConfig, TrainConfig
from pretrain.interchange.outgoing import recipe_of
from pretrain.start.resume import PUBLISHED

VOCAB, LENGTH = 96, 32
COMMON = {
    "vocab_size": VOCAB,
    "hidden_size": 32,
    "num_attention_heads": 4,
    "max_position_embeddings": LENGTH,
    "num_experts_per_tok": 2,
    "initializer_range": 0.2,
}
MIXTRAL = COMMON | {"num_hidden_layers": 2, "intermediate_size": 24, "num_local_experts": 4}
QWEN3_MOE = COMMON | {
    "num_hidden_layers": 4,
    "intermediate_size": 40,
    "moe_intermediate_size": 24,
    "num_experts": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
}
QWEN2_MOE = {key: value for key, value in QWEN3_MOE.items() if key != "head_dim"} | {
    "shared_expert_intermediate_size": 20
}
OLMOE = COMMON | {"num_hidden_layers": 2, "intermediate_size": 24, "num_experts": 4, "pad_token_id": None}
GPT_OSS = COMMON | {
    "num_hidden_layers": 3,
    "intermediate_size": 24,
    "num_local_experts": 4,
    "num_key_value_heads": 2,
    "head_dim": 12,
    "sliding_window": 5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 150000.0},
}
GRANITE_MOE = COMMON | {"num_hidden_layers": 2, "intermediate_size": 24, "num_local_experts": 4}
PHIMOE = COMMON | {"num_hidden_layers": 2, "intermediate_size": 24, "num_local_experts": 4, "num_key_value_heads": 2}
PHIMOE |= {"bos_token_id": None, "eos_token_id": None, "router_jitter_noise": 0.3}
# Name of a case: class of the configuration, its values, dtype, ``save_pretrained``'s options.
CASES = {
    "mixtral": (
        "MixtralConfig",
        MIXTRAL | {"num_key_value_heads": 2, "head_dim": 12, "rope_parameters": {"rope_theta": 500.0}},
        torch.float32,
        {},
    ),
    "mixtral, window": ("MixtralConfig", MIXTRAL | {"num_key_value_heads": 2, "sliding_window": 7}, torch.float32, {}),
    "mixtral tied, bf16": (
        "MixtralConfig",
        MIXTRAL | {"num_key_value_heads": 4, "tie_word_embeddings": True, "rms_norm_eps": 1e-3},
        torch.bfloat16,
        {"max_shard_size": "20KB"},
    ),
    "mixtral, one expert a token, experts in one tensor": (
        "MixtralConfig",
        MIXTRAL | {"num_key_value_heads": 1, "num_experts_per_tok": 1},
        torch.float32,
        {"save_original_format": False},
    ),
    "qwen3_moe": (
        "Qwen3MoeConfig",
        QWEN3_MOE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "norm_topk_prob": True},
        torch.float32,
        {"max_shard_size": "40KB"},
    ),
    "qwen3_moe, dense layers, weights as they are": (
        "Qwen3MoeConfig",
        QWEN3_MOE | {"mlp_only_layers": [0, 3], "norm_topk_prob": False, "tie_word_embeddings": True},
        torch.bfloat16,
        {},
    ),
    "qwen3_moe, every second layer, experts in one tensor": (
        "Qwen3MoeConfig",
        QWEN3_MOE | {"decoder_sparse_step": 2, "norm_topk_prob": True, "head_dim": 16, "num_experts_per_tok": 3},
        torch.float32,
        {"save_original_format": False},
    ),
    "qwen2_moe, dense layers": (
        "Qwen2MoeConfig",
        QWEN2_MOE | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}, "mlp_only_layers": [1]},
        torch.float32,
        {},
    ),
    "qwen2_moe, without biases, experts in one tensor": (
        "Qwen2MoeConfig",
        QWEN2_MOE | {"qkv_bias": False, "norm_topk_prob": True, "tie_word_embeddings": True},
        torch.bfloat16,
        {"save_original_format": False},
    ),
    "granitemoe": (
        "GraniteMoeConfig",
        GRANITE_MOE
        | {
            "embedding_multiplier": 12.0,
            "residual_multiplier": 0.22,
            "attention_multiplier": 0.1,
            "logits_scaling": 6.0,
        }
        | {"num_key_value_heads": 2, "tie_word_embeddings": True, "bos_token_id": None, "eos_token_id": None},
        torch.float32,
        {},
    ),
    "granitemoe, other names": (
        "GraniteMoeConfig",
        GRANITE_MOE | {"attention_multiplier": 8**-0.5, "residual_multiplier": 0.5, "num_experts_per_tok": 3},
        torch.bfloat16,
        {"save_original_format": False},
    ),
    "olmoe": ("OlmoeConfig", OLMOE | {"num_key_value_heads": 2}, torch.float32, {}),
    "olmoe tied, experts in one tensor": (
        "OlmoeConfig",
        OLMOE | {"norm_topk_prob": True, "tie_word_embeddings": True, "rope_parameters": {"rope_theta": 5e5}},
        torch.bfloat16,
        {"save_original_format": False},
    ),
    "gpt_oss": ("GptOssConfig", GPT_OSS, torch.float32, {}),
    "gpt_oss, other layers, bf16": (
        "GptOssConfig",
        GPT_OSS
        | {
            "layer_types": ["full_attention", "sliding_attention", "sliding_attention"],
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 150000.0,
                "factor": 32.0,
                "beta_fast": 32.0,
                "beta_slow": 1.0,
                "truncate": False,
                "original_max_position_embeddings": 8,
            },
            "attention_bias": False,
            "tie_word_embeddings": True,
            "num_experts_per_tok": 1,
        },
        torch.bfloat16,
        {"max_shard_size": "40KB"},
    ),
    "phimoe": (
        "PhimoeConfig",
        PHIMOE | {"attention_bias": True, "lm_head_bias": True, "rope_parameters": {"rope_theta": 500.0}},
        torch.float32,
        {},
    ),
    "phimoe, without biases, a window, tied, experts in one tensor": (
        "PhimoeConfig",
        PHIMOE | {"tie_word_embeddings": True, "head_dim": 12, "sliding_window": 5},
        torch.bfloat16,
        {"save_original_format": False},
    ),
    **DEEPSEEK_CASES,
    **YARN_CASES,
}


def save_random(folder: Path, case: str, **values) -> None:
    """The case's model, norms and biases random too, in a folder; ``values`` are further ones of its configuration."""
    import transformers

    kind, config, dtype, options = CASES[case]
    torch.manual_seed(len(case))
    model = transformers.AutoModelForCausalLM.from_config(getattr(transformers, kind)(**(config | values)))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if "norm" in name:
                parameter.uniform_(0.5, 1.5)
            if name.endswith("bias"):
                parameter.normal_(std=0.2)
    model.to(dtype)
    for name, buffer in (*model.named_buffers(), *model.named_parameters()):
        if name.endswith("e_score_correction_bias"):  # float32 in models of 16 bits, too
            buffer.data = torch.randn_like(buffer, dtype=torch.float32) / 4
    model.save_pretrained(folder, **options)


def logits(folder: Path, tokens: Tensor) -> Tensor:
    """Of transformers' model, in float32."""
    import transformers

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    with torch.no_grad():
        return model(tokens).logits


def weights(folder: Path) -> dict[str, Tensor]:
    """Every tensor of a folder's files."""
    return {name: value for file in sorted(folder.glob("*.safetensors")) for name, value in load_file(file).items()}


def our_engine(path: Path, parallel: ParallelConfig | None = None, precision: str = "fp32"):
    """An engine with a checkpoint's weights, at a split and in a precision of its own."""
    from megatron_patch import cpu
    from pretrain.engine import Engine, init_parallel, state
    from pretrain.start.process import Processes

    cpu.install()
    checkpoint = open_checkpoint(path)
    recipe = recipe_of(checkpoint)
    train = TrainConfig(precision=precision, global_batch=8, micro_batch=1, seed=recipe.train.seed + 1)
    recipe = replace(recipe, parallel=parallel or ParallelConfig(), train=train)
    recipe.check()
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    init_parallel(recipe, processes)
    engine = Engine(recipe, processes)
    state.load_weights(engine, checkpoint)
    return engine


def our_logits(path: Path, tokens: Tensor) -> Tensor:
    """Of our model with a checkpoint's weights, in float32: [b, s, V]; for a process of `forks`."""
    (chunk,) = our_engine(path).chunks
    return chunk_logits(chunk, tokens)


def chunk_logits(model, tokens: Tensor) -> Tensor:
    """Of a whole model, in evaluation."""
    model.eval()
    positions = torch.arange(tokens.shape[1]).expand_as(tokens)
    with torch.no_grad():
        return model(tokens, positions, None)


def random_run(folder: Path, model: ModelConfig):
    """Save a random model of ours, norms and biases of its choice random too, and return its engine; for a process of
    `forks`."""
    from dataclasses import asdict

    from megatron_patch import cpu
    from pretrain.checkpoint import save
    from pretrain.engine import Engine, init_parallel, state
    from pretrain.start.process import Processes

    cpu.install()
    train = TrainConfig(global_batch=1, micro_batch=1)
    recipe = Recipe(run=RunConfig(folder=str(folder)), model=model, data=DataConfig(tokenizer=""), train=train)
    recipe.check()
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    init_parallel(recipe, processes)
    engine = Engine(recipe, processes)
    torch.manual_seed(1)
    with torch.no_grad():
        for name, tensor in (*engine.chunks[0].named_parameters(), *engine.chunks[0].named_buffers()):
            if "norm" in name:
                tensor.uniform_(0.5, 1.5)
            if name.endswith(("expert_bias_E", ".bias", ".bias_in", ".bias_out", "softmax_offset")):
                tensor.normal_(std=0.25)
    save(folder, 1, state.pieces(engine), {"recipe": asdict(recipe)}, state.rank_state())
    return engine


def saved_random(folder: Path, model: ModelConfig, tokens: Tensor) -> Tensor:
    """Save a random model of ours, and return its logits, in float32: [b, s, V]; for a process of `forks`."""
    (chunk,) = random_run(folder, model).chunks
    return chunk_logits(chunk, tokens)


def saved_at(path: Path, folder: Path, parallel: ParallelConfig, precision: str) -> None:
    """Loads a checkpoint at a split and saves it there; for processes of `forks`."""
    from dataclasses import asdict

    from pretrain.checkpoint import save
    from pretrain.engine import state

    engine = our_engine(path, parallel, precision)
    run_state = {"recipe": asdict(engine.recipe), "optimizer": state.optimizer_state(engine)}
    run_state["schedule"] = state.schedule_state(engine)
    run_state["data"] = {"next_sample": 0, "samples_per_epoch": 1, "corpora": []}
    run_state[PUBLISHED] = open_checkpoint(path).state.get(PUBLISHED, {})  # as `Trainer` does
    save(folder, 1, state.pieces(engine), run_state, state.rank_state())


def some_tokens() -> Tensor:
    return torch.randint(0, VOCAB, (3, LENGTH), generator=torch.Generator().manual_seed(7))
