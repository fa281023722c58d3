"""What cannot be exported or imported is one line that names the key, and nothing is written."""

import errno
import json
import re
import shutil

import pytest
import torch
from huggingface_folders import save_random
from safetensors.torch import load_file, save_file
from tiny_models import VOCAB

from fmoe.errors import UserError
from pretrain.checkpoint import TensorPiece, open_checkpoint, save_parts
from pretrain.config import ModelConfig
from pretrain.data.tokenizers import train_tokenizer
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.families import family_for, why_own
from pretrain.interchange.folder import CONFIG, INDEX, WEIGHTS

# What both families hold.
GOOD = {
    "norm": "rms",
    "activation": "silu",
    "gated": True,
    "moe.gate": "naive",
    "moe.top_k": 2,
    "moe.num_experts": 8,
    "moe.eval_capacity_factor": None,
}

PHIMOE = {"norm": "layer", "moe.gate": "sparsemixer"}
QWEN2 = {"moe.num_shared_experts": 2, "moe.shared_expert_gate": True, "attention.qkv_bias": True}
ALL_HEADS = {"attention.qk_norm": True, "attention.qk_norm_over": "all"}

REFUSED = {
    "LayerNorm": ({"norm": "layer"}, "auto", "model.norm=layer is not supported by mixtral, .* nearest .*: use .*=rms"),
    "gelu": ({"activation": "gelu"}, "auto", "model.activation=gelu"),
    "not gated": ({"gated": False}, "auto", "model.gated=false"),
    "learned positions": ({"position.encoding": "learned_absolute"}, "auto", "position.encoding=learned_absolute"),
    "t5": ({"kind": "t5"}, "mixtral", "model.kind=t5"),
    "t5, nearer to its own families": ({"kind": "t5"}, "auto", "model.gated=true .* switch_transformers, the nearest"),
    "bert": ({"kind": "bert"}, "qwen3_moe", "model.kind=bert"),
    "dense": ({"moe.num_experts": 0}, "auto", "moe.num_experts=0"),
    "shared experts": ({"moe.num_shared_experts": 1}, "mixtral", "moe.num_shared_experts=1"),
    "latent attention": (
        {
            "attention.kv_lora_rank": 16,
            "attention.qk_head_dim": 8,
            "attention.qk_rope_head_dim": 4,
            "attention.v_head_dim": 8,
        },
        "mixtral",
        "attention.kv_lora_rank=16",
    ),
    "sigmoid gate": ({"moe.gate": "sigmoid"}, "auto", "moe.gate=sigmoid"),
    "gshard": ({"moe.gate": "gshard"}, "auto", "moe.gate=gshard"),
    "moe.jitter": ({"moe.gate": "switch", "moe.jitter": 0.01, "attention.qk_norm": True}, "auto", "moe.jitter=0.01"),
    "sigmoid scores": ({"moe.score": "sigmoid"}, "auto", "moe.score=sigmoid"),
    "scaled weights": ({"moe.routed_scale": 2.5}, "auto", "moe.routed_scale=2.5"),
    "options of a gate": ({"moe.gate_options": {"bias": True}}, "auto", "moe.gate_options={'bias': True}"),
    "other experts": ({"moe.expert": "swiglu"}, "auto", "moe.expert=swiglu"),
    "options of experts": ({"moe.expert_options": {"bias": True}}, "auto", "moe.expert_options={'bias': True}"),
    "further tokens": ({"mtp_layers": 1}, "auto", "model.mtp_layers=1"),
    "finer experts": ({"moe.granularity": 2}, "auto", "moe.granularity=2"),
    "drops in evaluation": ({"moe.eval_capacity_factor": 3.9}, "auto", "moe.eval_capacity_factor=3.9"),
    "no qk_norm": (
        {},
        "qwen3_moe",
        "attention.qk_norm=false is not supported by qwen3_moe: use attention.qk_norm=true",
    ),
    "attention.qk_norm": ({"attention.qk_norm": True}, "mixtral", "attention.qk_norm=true"),
    "dense layers": ({"moe.layers": (2,)}, "auto", "attention.qk_norm=false .* qwen3_moe, the nearest .*: use .*=true"),
    "every second": ({"moe.every": 2}, "auto", "moe.every=2 .* experts in every layer"),
    "weights as they are": ({"moe.normalize": False}, "auto", "moe.normalize=false"),
    "switch": ({"moe.gate": "switch", "moe.jitter": 0.0}, "mixtral", "moe.gate=switch"),
    "unknown": ({}, "llama", "--format llama is invalid: use auto, mixtral, qwen3_moe, qwen2_moe, olmoe, granitemoe"),
    "a shared expert without a gate": (
        QWEN2 | {"moe.shared_expert_gate": False},
        "qwen2_moe",
        "moe.shared_expert_gate=false",
    ),
    "norms of each head": ({"attention.qk_norm": True}, "olmoe", "attention.qk_norm_over=head .* use .*=all"),
    "norms of all heads": (ALL_HEADS | {"moe.every": 2}, "olmoe", "moe.every=2"),
    "norms of all wide heads": (ALL_HEADS | {"attention.head_dim": 64}, "olmoe", "attention.head_dim=64"),
    "scaled embeddings": ({"embedding_scale": 2.0}, "mixtral", "model.embedding_scale=2.0 .* use .*=1.0"),
    "scaled, weights as they are": (
        {"residual_scale": 2.0, "moe.normalize": False},
        "granitemoe",
        "moe.normalize=false",
    ),
    "no shared expert": ({"attention.qkv_bias": True}, "qwen2_moe", "moe.shared_expert_gate=false .* use .*=true"),
    "biases": ({"attention.qkv_bias": True}, "mixtral", "attention.qkv_bias=true"),
    "a gate of another family": ({"moe.gate": "sparsemixer"}, "mixtral", "moe.gate=sparsemixer"),
    "an output bias": ({"output_bias": True}, "mixtral", "model.output_bias=true .* use .*=false"),
    "another gate": (PHIMOE | {"moe.gate": "naive"}, "phimoe", "moe.gate=naive .* use sparsemixer"),
    "three experts a token": (PHIMOE | {"moe.top_k": 3}, "phimoe", "moe.top_k=3 .* use 2"),
    "biases of inputs alone": (
        PHIMOE | {"attention.qkv_bias": True},
        "phimoe",
        "attention.output_bias=false .*qkv_bias",
    ),
    "a biased router": (PHIMOE | {"moe.gate_options": {"bias": True}}, "phimoe", "moe.gate_options={'bias': True}"),
    "a gated shared expert": (
        QWEN2 | {"attention.qk_norm": True},
        "auto",
        "attention.qk_norm=true .* qwen2_moe, the nearest .*: use attention.qk_norm=false",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_no_family_holds(case):
    values, form, message = REFUSED[case]
    model = ModelConfig().with_values(GOOD | values)
    if form == "auto" and model.kind == "gpt":  # our own family holds it
        assert family_for(model).name == "fmoe"
        line = why_own(model)
    else:
        with pytest.raises(UserError) as raised:
            family_for(model, form)
        line = str(raised.value)
    assert re.search(message, line) and "\n" not in line


@pytest.mark.parametrize(
    ("values", "form"),
    [
        ({}, "mixtral"),
        ({"moe.eval_capacity_factor": 4.0, "moe.capacity_factor": 1.0}, "mixtral"),
        ({"attention.qk_norm": True, "moe.layers": (1, 2), "moe.normalize": False}, "qwen3_moe"),
        ({"attention.qk_norm": True, "moe.gate": "switch", "moe.jitter": 0.0}, "qwen3_moe"),
        (ALL_HEADS | {"moe.normalize": False}, "olmoe"),
        ({"embedding_scale": 12.0, "attention.scale": 0.1}, "granitemoe"),
        (PHIMOE | {"moe.gate_options": {"margin": 0.5}, "output_bias": True}, "phimoe"),
        (QWEN2 | {"moe.every": 2, "dense_ffn_hidden_size": 8}, "qwen2_moe"),
    ],
)
def test_what_a_family_holds(values, form):
    assert family_for(ModelConfig().with_values(GOOD | values)).name == form


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "mixtral"
    save_random(folder, "mixtral")
    return folder


@pytest.fixture(scope="module")
def qwen(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "qwen"
    save_random(folder, "qwen3_moe")
    return folder


@pytest.fixture(scope="module")
def qwen2(tmp_path_factory):
    folder = tmp_path_factory.mktemp("models") / "qwen2"
    save_random(folder, "qwen2_moe, dense layers")
    return folder


CONFIGS = {
    "another family": (
        "mixtral",
        {"model_type": "llama"},
        "model_type=llama is not supported: it must be one of mixtral, qwen3_moe, qwen2_moe, olmoe, granitemoe",
    ),
    "no family": ("mixtral", {"model_type": None}, "model_type=none"),
    "published DeepSeekMoE": (
        "mixtral",
        {"model_type": "deepseek"},
        r"model_type=deepseek is not supported: it must be one of ((?!deepseek_moe).)*$",
    ),
    "another format": ("mixtral", {"fmoe_format": "other"}, "fmoe_format=other is not supported"),
    "no sliding window": (
        "mixtral",
        {"sliding_window": 0},
        "sliding_window=0 must be an integer of at least 1",
    ),
    "sliding window that is used": ("qwen", {"use_sliding_window": True}, "use_sliding_window=true .* must be false"),
    "sliding layers": ("qwen", {"layer_types": ["sliding_attention"] * 4}, "layer_types="),
    "sliding window of a Qwen2": (
        "qwen2",
        {"use_sliding_window": True, "sliding_window": 8},
        "use_sliding_window=true",
    ),
    "no width of the shared expert": (
        "qwen2",
        {"shared_expert_intermediate_size": None},
        "shared_expert_intermediate_size is",
    ),
    "another width of the shared expert": (
        "qwen2",
        {"shared_expert_intermediate_size": 21},
        r"has shape \[20, 32\], but",
    ),
    "biases that are not expected": (
        "qwen2",
        {"qkv_bias": False},
        "has the tensor .*proj.bias, which is not part of this qwen2",
    ),
    "attention bias": ("qwen", {"attention_bias": True}, "attention_bias=true is not supported: it must be false"),
    "scaled positions": ("mixtral", {"rope_scaling": {"type": "linear", "factor": 2.0}}, "rope_scaling="),
    "yarn": ("mixtral", {"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "factor is missing"),
    "part of a head turns": ("mixtral", {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "gelu": ("mixtral", {"hidden_act": "gelu"}, "hidden_act=gelu is not supported: it must be silu"),
    "quantized": ("mixtral", {"quantization_config": {"bits": 4}}, "quantization_config="),
    "text for a number": ("mixtral", {"hidden_size": "32"}, "hidden_size=32 must be a positive integer"),
    "no layers": ("mixtral", {"num_hidden_layers": 0}, "num_hidden_layers=0"),
    "no width": ("mixtral", {"hidden_size": None}, "hidden_size is missing"),
    "no experts in any layer": ("qwen", {"decoder_sparse_step": 9}, "no layer has experts"),
    "dense layers that are not there": ("qwen", {"mlp_only_layers": [7]}, r"mlp_only_layers=\[7\]"),
    "more choices than experts": ("mixtral", {"num_experts_per_tok": 5}, "moe.top_k=5 exceeds"),
    "another shape": (
        "mixtral",
        {"intermediate_size": 23},
        r"has shape \[24, 32\], but config.json implies \[23, 32\]",
    ),
    "fewer layers": ("mixtral", {"num_hidden_layers": 1}, "has the tensor model.layers.1.*not part of this mixtral"),
    "more layers": ("mixtral", {"num_hidden_layers": 3}, "has no tensor model.layers.2"),
    "tied, with another output": ("mixtral", {"tie_word_embeddings": True}, "lm_head.weight differs"),
}


@pytest.mark.parametrize("case", CONFIGS)
def test_models_that_are_others(request, tmp_path, case):
    model, values, message = CONFIGS[case]
    folder = shutil.copytree(request.getfixturevalue(model), tmp_path / "theirs")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))
    refused(folder, tmp_path / "run", message)


def refused(folder, out, message, **options):
    with pytest.raises(UserError, match=message) as raised:
        import_folder(folder, out, **options)
    assert "\n" not in str(raised.value)
    left = [path.name for path in out.parent.iterdir()]
    assert left == [folder.name], left


def spoiled(folder, name, change):
    """Changes a tensor of a folder with one file of weights."""
    tensors = load_file(folder / WEIGHTS)
    change(tensors)
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


def put(value):
    def change(tensors):
        tensors[Q_PROJ][3, 5] = value

    return change


SPOILED = {
    "nan": (put(float("nan")), f"{Q_PROJ} has non-finite values"),
    "infinity": (put(float("inf")), f"{Q_PROJ} has non-finite values"),
    "missing": (lambda tensors: tensors.pop(Q_PROJ), f"has no tensor {Q_PROJ}"),
    "one more": (
        lambda tensors: tensors.update({"model.layers.0.self_attn.q_proj.bias": torch.zeros(48)}),
        "has the tensor model.layers.0.self_attn.q_proj.bias, which is not part of this mixtral",
    ),
    "integers": (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].to(torch.int8)}), "has dtype int8"),
    "8 bits with scales": (
        lambda tensors: tensors.update(
            {Q_PROJ: tensors[Q_PROJ].to(torch.float8_e4m3fn), f"{Q_PROJ}_scale_inv": torch.ones(1, 1)}
        ),
        f"{Q_PROJ} has dtype float8_e4m3fn, .*convert the weights to one of .*bfloat16",
    ),
    "transposed": (lambda tensors: tensors.update({Q_PROJ: tensors[Q_PROJ].T.contiguous()}), r"has shape \[32, 48\]"),
}


@pytest.mark.parametrize("case", SPOILED)
def test_tensors_that_are_others(mixtral, tmp_path, case):
    change, message = SPOILED[case]
    refused(spoiled(shutil.copytree(mixtral, tmp_path / "theirs"), Q_PROJ, change), tmp_path / "run", message)


def test_folders_that_are_none(mixtral, qwen, tmp_path):
    out = tmp_path / "out" / "run"
    (tmp_path / "out" / "theirs").mkdir(parents=True)
    folder = tmp_path / "out" / "theirs"
    with pytest.raises(UserError, match="is not a folder"):
        import_folder(tmp_path / "nowhere", out)
    refused(folder, out, "it has no config.json")
    shutil.copy(mixtral / CONFIG, folder / CONFIG)
    refused(folder, out, "has no weights: neither model.safetensors nor")
    (folder / "pytorch_model.bin").write_bytes(b"\x80\x04")
    refused(folder, out, r"has pickled weights \(pytorch_model.bin\), which can run code and are not read")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "../../elsewhere.safetensors"}}))
    refused(folder, out, "names '../../elsewhere.safetensors', which must be a file name of letters")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"a": "model-1.safetensors"}}))
    refused(folder, out, "model-1.safetensors is missing; model.safetensors.index.json names it")
    (folder / INDEX).unlink()
    (folder / WEIGHTS).write_bytes((mixtral / WEIGHTS).read_bytes()[:-100])
    refused(folder, out, "model.safetensors cannot be read")
    config = {"model_type": "deepseek_v3", "num_hidden_layers": 2}  # the number of layers depends on the weights
    (folder / CONFIG).write_text(json.dumps(config))
    refused(folder, out, f"^{folder}/model.safetensors cannot be read")
    (folder / CONFIG).write_text("{")
    refused(folder, out, "config.json cannot be read")


def test_something_is_at_the_output(mixtral, tmp_path):
    (tmp_path / "file").write_text("mine")
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "mine").write_text("mine")
    for name, message in (("file", "is a file or a symbolic link"), ("full", "is not empty")):
        with pytest.raises(UserError, match=message):
            import_folder(mixtral, tmp_path / name)
        with pytest.raises(UserError, match=message):
            export_checkpoint(tmp_path / "anything", tmp_path / name)
    assert (tmp_path / "full" / "mine").read_text() == (tmp_path / "file").read_text() == "mine"
    (tmp_path / "empty").mkdir()
    import_folder(mixtral, tmp_path / "empty")
    assert open_checkpoint(tmp_path / "empty").step == 0


def changed(run, folder, change):
    """A checkpoint like a run's, with a tensor changed."""
    checkpoint = open_checkpoint(run)
    tensors = {name: checkpoint.read(name) for name in checkpoint.names()}
    change(tensors)
    pieces = [TensorPiece(name, tuple(t.shape), (0,) * t.dim(), tuple(t.shape), t) for name, t in tensors.items()]
    save_parts(folder, 0, pieces, checkpoint.state, nbytes=1 << 20)


FINAL = "model/decoder.final_layernorm.weight"
CHECKPOINTS = {
    "nan": (lambda tensors: tensors[FINAL].fill_(float("nan")), f"{FINAL} has non-finite values"),
    "one more": (
        lambda tensors: tensors.update({"model/x.bias": torch.zeros(2)}),
        "has the tensor model/x.bias, which",
    ),
    "missing": (lambda tensors: tensors.pop(FINAL), f"has no tensor {FINAL}"),
    "another shape": (lambda tensors: tensors.update({FINAL: torch.ones(31)}), f"shape of {FINAL} is"),
    "mixed": (lambda tensors: tensors.update({FINAL: tensors[FINAL].bfloat16()}), "weights of bfloat16 and float32"),
}


@pytest.mark.parametrize("case", CHECKPOINTS)
def test_checkpoints_that_are_others(mixtral, tmp_path, case):
    change, message = CHECKPOINTS[case]
    import_folder(mixtral, tmp_path / "run")
    changed(tmp_path / "run", tmp_path / "changed", change)
    with pytest.raises(UserError, match=message):
        export_checkpoint(tmp_path / "changed", tmp_path / "out")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["changed", "run"]


def test_a_damaged_checkpoint_is_not_exported(mixtral, tmp_path):
    import_folder(mixtral, tmp_path / "run")
    (shard,) = (tmp_path / "run").glob("checkpoints/*/*.safetensors")
    data = bytearray(shard.read_bytes())
    data[-5] ^= 1
    shard.write_bytes(data)
    with pytest.raises(UserError, match="SHA-256"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_folder_whose_tokenizer_is_damaged(mixtral, tmp_path):
    folder = shutil.copytree(mixtral, tmp_path / "theirs")
    (folder / "tokenizer.json").write_text("{}")
    refused(folder, tmp_path / "run", r"not a tokenizer\.json .*--tokenizer")
    assert import_folder(folder, tmp_path / "run", tokenizer="none").tokenizer is None


def test_a_full_disk_is_told_before_anything_is_written(mixtral, tmp_path, monkeypatch):
    import_folder(mixtral, tmp_path / "run")
    monkeypatch.setattr("pretrain.interchange.folder.free_bytes", lambda folder: 1000)
    for name, call, source in (("a", import_folder, mixtral), ("b", export_checkpoint, tmp_path / "run")):
        with pytest.raises(UserError, match=f"{name}: disk full: 136832 bytes are needed, 1000 are free"):
            call(source, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


@pytest.mark.parametrize("when", ["write_new", "bytes_of"])
def test_a_disk_that_fills_up(mixtral, tmp_path, monkeypatch, when):
    import_folder(mixtral, tmp_path / "run")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "a file")

    monkeypatch.setattr(f"pretrain.interchange.folder.{when}", fail)
    with pytest.raises(UserError, match=r"cannot write .*out: No space left on device"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_tokenizers_that_are_not_there_or_too_large(mixtral, tmp_path, tiny_corpus):
    import_folder(mixtral, tmp_path / "run", tokenizer=str(tiny_corpus.tokenizer))
    with pytest.raises(UserError, match=f"has 384 entries, which exceeds model.vocab_size={VOCAB}"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    (tmp_path / "run" / "tokenizer" / "tokenizer.model").unlink()
    with pytest.raises(UserError, match=r"data\.tokenizer: cannot read .*--tokenizer"):
        export_checkpoint(tmp_path / "run", tmp_path / "out")
    assert not (tmp_path / "out").exists()
    train_tokenizer([tiny_corpus.train.with_suffix(".jsonl")], tmp_path / "other.model", 370, sentinels=0)
    with pytest.raises(UserError, match=r"trained with another tokenizer than .*other\.model"):
        export_checkpoint(tmp_path / "run", tmp_path / "out", tokenizer=str(tmp_path / "other.model"))
    done = export_checkpoint(tmp_path / "run", tmp_path / "out", tokenizer="none")
    assert "tokenizer.json" not in done.files
