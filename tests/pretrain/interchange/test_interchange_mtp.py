"""Multi-token prediction in a folder of DeepSeek-V3: the same tensors on return, the same losses in transformers."""

import pytest
import torch
import torch.nn.functional as F
from forks import only, values
from huggingface_folders import assert_same_weights, logits, random_run, saved_at, some_tokens, weights

from pretrain.checkpoint import open_checkpoint
from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, ParallelConfig, Recipe
from pretrain.interchange import export_checkpoint, import_folder

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=32,
    norm="rms",
    norm_eps=1e-6,
    activation="silu",
    gated=True,
    ffn_hidden_size=24,
    dense_ffn_hidden_size=40,
    sequence_length=32,
    vocab_size=96,
    tie_embeddings=False,
    init_std=0.2,
    mtp_layers=2,
    attention=AttentionConfig(
        num_heads=4, kv_lora_rank=12, q_lora_rank=18, qk_head_dim=10, qk_rope_head_dim=6, v_head_dim=14
    ),
    moe=MoEConfig(
        num_experts=8,
        num_shared_experts=1,
        layers=(2,),
        top_k=3,
        gate="sigmoid",
        gate_options={"expert_groups": 4, "kept_groups": 2},
        routed_scale=2.5,
        eval_capacity_factor=None,
        capacity_factor=None,
    ),
)


LATENT = [
    f"attention.{name}" for name in ("kv_lora_rank", "q_lora_rank", "qk_head_dim", "qk_rope_head_dim", "v_head_dim")
]
GLM = MODEL.with_values(
    {
        **dict.fromkeys(LATENT),
        "attention.num_query_groups": 2,
        "attention.qkv_bias": True,
        "attention.qk_norm": True,
        "position.rotary_fraction": 0.5,
    }
)


def made(folder, model):
    """Save a random model, and return its losses of further tokens."""
    from megatron_patch import mtp
    from pretrain.models.gpt import forward

    (chunk,) = random_run(folder, model).chunks
    tokens = some_tokens()
    chunk.train()
    forward(chunk, {"tokens": tokens[:, :-1], "labels": tokens[:, 1:]})
    return mtp.take_losses()


def further_losses(folder, tokens):
    """Return the mean loss of each depth by transformers' `MtpModel`, which has no labels of further tokens."""
    import transformers
    from transformers.modeling_layers import MtpModel

    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    depth = model.config.num_mtp_layers
    model._keys_to_ignore_on_load_unexpected = [r"model\.layers\.[23].*"]  # it knows those of 61 layers alone
    further = MtpModel.from_pretrained(model)
    inputs, labels, losses = tokens[:, :-1], tokens[:, 1:], []
    positions = torch.arange(inputs.shape[1]).unsqueeze(0)
    with torch.no_grad():
        hidden = model.model(inputs).last_hidden_state
        for k in range(depth):
            inputs, labels = F.pad(inputs[:, 1:], (0, 1)), F.pad(labels[:, 1:], (0, 1))
            hidden = further.forward_layer(k, hidden, positions, None, input_ids=inputs)
            kept = slice(0, inputs.shape[1] - k - 1)
            found = model.lm_head(hidden)[:, kept].flatten(0, 1)
            losses.append(F.cross_entropy(found, labels[:, kept].flatten()))
    return torch.stack(losses)


CASES = {
    "deepseek_v3, PP2": (MODEL, ParallelConfig(pipeline=2)),
    "glm4_moe, TP2": (GLM, ParallelConfig(tensor=2)),
}


@pytest.mark.by_default("deepseek_v3, PP2")
@pytest.mark.parametrize("case", CASES)
def test_layers_of_further_tokens_there_and_back(forks, tmp_path, case):
    model, parallel = CASES[case]
    ours = only(forks.run(1, made, tmp_path / "made", model))
    exported = export_checkpoint(tmp_path / "made", tmp_path / "out")
    assert case.startswith(exported.family.name) and exported.num_params == Recipe(model=model).num_params()
    assert torch.allclose(further_losses(tmp_path / "out", some_tokens()), ours, rtol=1e-5, atol=0)

    done = import_folder(tmp_path / "out", tmp_path / "run")
    assert done.recipe.model.mtp_layers == 2
    before, after = open_checkpoint(tmp_path / "made"), open_checkpoint(tmp_path / "run")
    names = {name for name in before.names() if name.startswith("model/")}
    assert names == set(after.names()) and any("mtp.layers.1" in name for name in names)
    for name in names:
        assert torch.equal(before.read(name), after.read(name)), name

    values(forks.run(2, saved_at, tmp_path / "run", tmp_path / "saved", parallel, "fp32"))
    export_checkpoint(tmp_path / "saved", tmp_path / "again")
    assert_same_weights(weights(tmp_path / "again"), weights(tmp_path / "out"))


def test_a_folder_without_layers_of_further_tokens(forks, tmp_path):
    """As transformers saves it: their number is in config.json, their tensors are not."""
    import transformers

    only(forks.run(1, made, tmp_path / "made", MODEL))
    export_checkpoint(tmp_path / "made", tmp_path / "out")
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    model.save_pretrained(tmp_path / "saved")
    assert '"num_nextn_predict_layers": 2' in (tmp_path / "saved/config.json").read_text()
    assert import_folder(tmp_path / "saved", tmp_path / "run").recipe.model.mtp_layers == 0
    export_checkpoint(tmp_path / "run", tmp_path / "again")
    assert torch.equal(logits(tmp_path / "again", some_tokens()), logits(tmp_path / "out", some_tokens()))
