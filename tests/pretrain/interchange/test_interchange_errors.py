"""What cannot be exported or imported is one line that names the key, and nothing is written."""

import errno
import json
import shutil

import pytest
import torch
from huggingface_folders import save_random
from safetensors.torch import load_file, save_file
from tiny_families import VOCAB

from fmoe.errors import UserError
from pretrain.checkpoint import TensorPiece, open_checkpoint, save_parts
from pretrain.data.tokenizers import train_tokenizer
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.families import FAMILIES
from pretrain.interchange.folder import CONFIG, INDEX, WEIGHTS


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """``saved(CASE)``: a folder with random weights."""
    parent = tmp_path_factory.mktemp("models")

    def folder_of(case):
        if not (parent / case).exists():
            save_random(parent / case, case)
        return parent / case

    return folder_of


@pytest.fixture(scope="module")
def mixtral(saved):
    return saved("mixtral")


# Values of config.json that do not fit the weights.
OTHER_WEIGHTS = [
    ("mixtral", {"intermediate_size": 23}, r"has shape \[24, 32\], but config.json implies \[23, 32\]"),
    ("mixtral", {"num_hidden_layers": 1}, "has the tensor model.layers.1.*not part of this mixtral"),
    ("mixtral", {"num_hidden_layers": 3}, "has no tensor model.layers.2"),
    ("mixtral", {"tie_word_embeddings": True}, "lm_head.weight differs"),
    ("qwen2_moe, dense layers", {"shared_expert_intermediate_size": 21}, r"has shape \[20, 32\], but"),
    ("qwen2_moe, dense layers", {"qkv_bias": False}, "has the tensor .*proj.bias, which is not part of this qwen2"),
    ("t5", {"feed_forward_proj": "gated-relu", "is_gated_act": True, "dense_act_fn": "relu"}, "has no tensor"),
    ("t5", {"num_decoder_layers": 2}, "has the tensor decoder.block.2.*not part of this t5"),
    ("switch_transformers", {"num_experts": 5}, r"has shape \[4, 24\], but config.json implies \[5, 24\]"),
    ("megatron-bert", {"num_hidden_layers": 1}, "has the tensor bert.encoder.layer.1.*not part of this megatron-bert"),
    ("megatron-bert", {"max_position_embeddings": 30}, r"has shape \[32, 32\], but config.json implies \[30, 32\]"),
]


@pytest.mark.parametrize(("case", "values", "message"), OTHER_WEIGHTS)
def test_weights_of_another_configuration(saved, tmp_path, case, values, message):
    folder = shutil.copytree(saved(case), tmp_path / "theirs")
    config = json.loads((folder / CONFIG).read_text())
    (folder / CONFIG).write_text(json.dumps(config | values))
    refused(folder, tmp_path / "run", message)


# Copies of other tensors, and tensors that no language model uses: both may be there, and copies must be equal.
LEFTOVERS = [
    ("t5", "decoder.block.0.layer.1.EncDecAttention.relative_attention_bias.weight", "encoder.embed_tokens.weight"),
    ("megatron-bert", "bert.pooler.dense.weight", "cls.predictions.decoder.bias"),
]


@pytest.mark.parametrize(("family", "unused", "copy"), LEFTOVERS)
def test_copies_and_leftovers(saved, tmp_path, family, unused, copy):
    folder = shutil.copytree(saved(family), tmp_path / "theirs")
    tensors = load_file(folder / WEIGHTS)
    copies = {name: tensors[source].clone() for name, source in FAMILIES[family].copies.items()}
    save_file(tensors | copies | {unused: torch.ones(32, 2)}, folder / WEIGHTS, metadata={"format": "pt"})
    import_folder(folder, tmp_path / "run")
    shutil.rmtree(tmp_path / "run")
    copies[copy] += 1
    save_file(tensors | copies, folder / WEIGHTS, metadata={"format": "pt"})
    refused(folder, tmp_path / "run", f"{copy} differs from {FAMILIES[family].copies[copy]}")


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


def test_folders_that_are_none(mixtral, tmp_path):
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


def test_a_full_disk_is_told_before_anything_is_written(mixtral, tmp_path, monkeypatch):
    import_folder(mixtral, tmp_path / "run")
    monkeypatch.setattr("pretrain.interchange.folder.free_bytes", lambda folder: 1000)
    for name, call, source in (("a", import_folder, mixtral), ("b", export_checkpoint, tmp_path / "run")):
        with pytest.raises(UserError, match=f"{name}: disk full: 136832 bytes are needed, 1000 are free"):
            call(source, tmp_path / name)
    assert [path.name for path in tmp_path.iterdir()] == ["run"]


def test_a_disk_that_fills_up(mixtral, tmp_path, monkeypatch):
    import_folder(mixtral, tmp_path / "run")

    def fail(*_):
        raise OSError(errno.ENOSPC, "No space left on device", "a file")

    monkeypatch.setattr("pretrain.interchange.folder.write_new", fail)
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
