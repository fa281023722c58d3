"""llama.cpp reads exports: its tokens and logits on a CPU. FMOE_LLAMA_CPP names a folder of its source."""

import json
import os
import sysconfig
from pathlib import Path

import huggingface_folders
import numpy as np
import pytest
import torch
from compare import assert_close
from huggingface_folders import logits as of_transformers
from huggingface_folders import save_random, some_tokens
from test_interchange_tokenizer import some_texts

from fmoe.errors import UserError
from pretrain.config import ModelConfig, MoEConfig
from pretrain.data.tokenizers import load_tokenizer, train_tokenizer
from pretrain.interchange.cli import export_main, import_main
from pretrain.interchange.families import FAMILIES
from pretrain.interchange.llama_cpp import GGUF, SCRIPT, check_convertible
from pretrain.interchange.tokenizer import TOKENIZER, files_for

PIECES, VOCAB = 800, 832  # the embedding is larger than the tokenizer
TOKENIZERS = {
    "bpe": ("tokenizer.model", {}),
    "unigram": ("tokenizer.model", {"model_type": "unigram"}),
    "byte-level": ("tokenizer.json", {}),
    "bytes": ("tokenizer.json", {"model_type": "bytes", "vocab_size": 263, "sentinels": 0}),
}


@pytest.fixture(scope="module")
def text():
    folder = Path(sysconfig.get_path("stdlib"))
    return "".join((folder / name).read_text()[:40_000] for name in ("argparse.py", "textwrap.py"))


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory, text):
    """``tokenizer(KIND)`` -> the path of one that is trained on the text."""
    folder = tmp_path_factory.mktemp("tokenizers")
    (folder / "text.txt").write_text(text)

    def train(kind):
        name, options = TOKENIZERS[kind]
        path = folder / kind / name
        if not path.exists():
            path.parent.mkdir()
            train_tokenizer([folder / "text.txt"], path, **{"vocab_size": PIECES, "sentinels": 4, **options})
        return path

    return train


@pytest.fixture
def llama_cpp():
    folder = os.environ.get("FMOE_LLAMA_CPP")
    if not folder:
        pytest.skip("FMOE_LLAMA_CPP names no folder of llama.cpp's source")
    return Path(folder)


@pytest.fixture
def scriptless(tmp_path):
    """A folder like llama.cpp's, whose converter fails."""
    (tmp_path / "llama.cpp").mkdir()
    (tmp_path / "llama.cpp" / SCRIPT).write_text("raise ValueError('no room\\x1b for this')")
    return tmp_path / "llama.cpp"


def imported(tmp_path, case, tokenizer, **values):
    """A run with random weights."""
    theirs, run = tmp_path / "theirs", tmp_path / "run"
    save_random(theirs, case, vocab_size=VOCAB, **values)
    import_main([str(theirs), str(run), "--tokenizer", str(tokenizer)])
    return run


CASES = {
    "mixtral, bpe": ("mixtral", "bpe"),
    "mixtral, byte-level": ("mixtral", "byte-level"),
    "qwen3_moe, bpe": ("qwen3_moe", "bpe"),
    "qwen3_moe, byte-level": ("qwen3_moe", "byte-level"),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", CASES)
def test_tokens(tmp_path, llama_cpp, tokenizer, text, case):
    """`tests/conformance/exports.py` compares greedy text."""
    package = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")
    family, kind = CASES[case]
    run = imported(tmp_path, family, tokenizer(kind))
    out = tmp_path / "out"
    assert export_main([str(run), str(out), "--llama-cpp", str(llama_cpp)]) == 0
    served = package.Llama(str(out / GGUF), n_ctx=32, n_threads=1, verbose=False)
    ours = load_tokenizer(tokenizer(kind))
    assert served.n_vocab() == VOCAB and served.token_eos() == ours.end_of_document
    # llama.cpp writes spaces as U+2581 before it looks for pieces of a sentencepiece model.
    texts = [t for t in some_texts(text) if kind != "bpe" or "\u2581" not in t]
    assert len(texts) > 200
    assert [t for t in texts if served.tokenize(t.encode(), special=False) != ours.encode(t)] == []


# Of each family a case of `huggingface_folders` and values that llama.cpp supports.
FAMILY_CASES = {
    "mixtral": ("mixtral", {}),
    "qwen3_moe": ("qwen3_moe", {}),
    "qwen2_moe": ("qwen2_moe, dense layers", {"mlp_only_layers": [], "num_key_value_heads": 4}),
    "olmoe": ("olmoe", {"rms_norm_eps": 1e-5, "num_key_value_heads": 4}),
    "granitemoe": ("granitemoe", {}),
    "deepseek_v2": ("deepseek_v2", {"num_hidden_layers": 27}),
    "deepseek_v2, compressed queries": ("deepseek_v2", {"attention.q_lora_rank": 18}),
    "deepseek_v3": ("deepseek_v3", {}),
    "deepseek_v3, one group": (
        "deepseek_v3, all groups, weights as they are, experts in one tensor",
        {"attention.q_lora_rank": 18},
    ),
    "glm4_moe": ("glm4_moe", {}),
    "glm4_moe, whole heads": ("glm4_moe, no biases, no norms, whole heads, experts in one tensor", {}),
    "ernie4_5_moe": ("ernie4_5_moe", {"moe_layer_end_index": -1, "intermediate_size": 96}),
    "ernie4_5_moe, no shared experts": (
        "ernie4_5_moe, every second layer, no shared experts, bf16",
        {"moe_layer_interval": 1, "moe_layer_end_index": -1},
    ),
    "gpt_oss": ("gpt_oss", {}),
}


@pytest.fixture
def sampled(tmp_path, llama_cpp, tokenizer):
    """``sampled(CASE, VALUES)``: logits of llama.cpp and of transformers for the tokens of an imported case."""
    package = pytest.importorskip("llama_cpp", reason="needs llama-cpp-python")

    def logits(run):
        out = tmp_path / "out"
        options = ["--tokenizer", str(tokenizer("byte-level")), "--llama-cpp", str(llama_cpp)]
        assert export_main([str(run), str(out), *options]) == 0
        float32 = {"type_k": package.GGML_TYPE_F32, "type_v": package.GGML_TYPE_F32, "flash_attn": False}
        served = package.Llama(str(out / GGUF), n_ctx=32, n_threads=1, logits_all=True, verbose=False, **float32)
        tokens = some_tokens()[:1, :20]
        served.eval(tokens[0].tolist())
        return torch.from_numpy(np.array(served.scores[: tokens.shape[1]])), of_transformers(out, tokens)[0]

    return logits


@pytest.mark.slow
@pytest.mark.parametrize("name", FAMILY_CASES)
def test_logits(tmp_path, tokenizer, sampled, monkeypatch, name):
    case, values = FAMILY_CASES[name]
    kind, config, _, options = huggingface_folders.CASES[case]
    monkeypatch.setitem(huggingface_folders.CASES, case, (kind, config, torch.float32, options))
    found, expected = sampled(imported(tmp_path, case, tokenizer("byte-level"), **values))
    assert_close(found, expected, 1e-5, "llama.cpp's logits")


SINKS = {"tie_embeddings": False, "attention.qkv_bias": True}
LLAMA_CPP_LACKS = [
    ("qwen3_moe", {"moe.every": 2, "num_layers": 2}, r"moe\.every=2 .*every layer"),
    ("qwen3_moe", {"moe.normalize": False}, r"moe\.normalize=false"),
    ("qwen3_moe", {"moe.gate": "switch", "moe.top_k": 1}, r"moe\.gate=switch"),
    ("qwen3_moe", {"position.rope_scaling": "yarn"}, r"position\.rope_scaling=yarn"),
    ("mixtral", {"attention.sliding_window": 8}, r"attention\.sliding_window=8"),
    ("olmoe", {"moe.normalize": False, "tie_embeddings": False, "norm_eps": 1e-6}, "norm_eps=1e-06 .*1e-5"),
    ("qwen2_moe", {"moe.normalize": False, "tie_embeddings": True}, r"model\.tie_embeddings=true"),
    ("deepseek_moe", {"moe.normalize": False, "attention.head_dim": 8}, r"attention\.head_dim=8"),
    ("deepseek_v2", {"num_layers": 3}, r"attention\.q_lora_rank=none .* 26 or 27"),
    ("deepseek_v3", {"num_layers": 27, "attention.q_lora_rank": 8}, r"attention\.q_lora_rank=8 "),
    ("deepseek_v2", {"num_layers": 27, "moe.gate_options": {"expert_groups": 2}}, r"moe\.gate_options="),
    ("glm4_moe", {"mtp_layers": 1}, r"model\.mtp_layers=1 "),
    ("ernie4_5_moe", {"moe.num_shared_experts": 2}, r"moe\.num_shared_experts=2 "),
    ("gpt_oss", SINKS, r"attention\.sliding_window=none"),
    ("gpt_oss", SINKS | {"attention.sliding_window": 4}, r"attention\.sliding_layers=\[\]"),
    ("phimoe", {}, "--llama-cpp supports .* exported as phimoe"),
]


def refusal(llama_cpp, tokenizer, message, family="mixtral", values=()):
    files = {} if tokenizer is None else files_for(tokenizer, 32)
    model = ModelConfig().with_values({"moe.gate": "naive", **dict(values)})
    with pytest.raises(UserError, match=message):
        check_convertible(llama_cpp, FAMILIES[family], model, tokenizer, files)


@pytest.mark.parametrize(("family", "values", "message"), LLAMA_CPP_LACKS)
def test_models_that_llama_cpp_lacks(scriptless, tokenizer, family, values, message):
    refusal(scriptless, load_tokenizer(tokenizer("byte-level")), message, family, values)


def test_tokenizers_that_llama_cpp_lacks(scriptless, tokenizer):
    refusal(scriptless, load_tokenizer(tokenizer("unigram")), r"tokenizer\.model is not supported .* bpe")
    refusal(scriptless, load_tokenizer(tokenizer("bytes")), r"tokenizer\.json is not supported .* no merges")
    refusal(scriptless, None, "--tokenizer")


def test_splits_of_other_tokenizers_are_left_to_the_converter(scriptless, tokenizer, tmp_path):
    """A tokenizer.json from elsewhere: llama.cpp knows it by its hash, or fails."""
    ours = load_tokenizer(tokenizer("byte-level"))
    spec = json.loads(ours.path.read_bytes())
    spec["pre_tokenizer"]["pretokenizers"].pop(0)
    (tmp_path / TOKENIZER).write_text(json.dumps(spec))
    other = load_tokenizer(tmp_path / TOKENIZER)
    found = [
        check_convertible(
            scriptless, FAMILIES["mixtral"], ModelConfig(moe=MoEConfig(gate="naive")), t, files_for(t, 32)
        )
        for t in (ours, other)
    ]
    assert found == ["smollm", ""]


@pytest.mark.slow
def test_a_failure_leaves_nothing(tmp_path, scriptless, tokenizer):
    run = imported(tmp_path, "mixtral", tokenizer("bpe"))
    before = sorted(tmp_path.iterdir())
    for folder, message in ((tmp_path, f"--llama-cpp .* {SCRIPT}"), (scriptless, r"failed: ValueError: no room\\x1b")):
        with pytest.raises(UserError, match=message) as error:
            export_main([str(run), str(tmp_path / "out"), "--llama-cpp", str(folder)])
        assert "\n" not in str(error.value) and sorted(tmp_path.iterdir()) == before
