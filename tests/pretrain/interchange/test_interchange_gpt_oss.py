"""GPT-OSS: weights in MXFP4, keys of config.json, and models that the family does not have."""

import json

import pytest
import torch
from huggingface_folders import save_random, weights
from safetensors.torch import save_file
from tiny_models import GPT_OSS

from fmoe.errors import UserError
from pretrain.config import AttentionConfig, ModelConfig, MoEConfig
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import FAMILIES, family_for

CASE = "gpt_oss, other layers, bf16"
# Sizes that blocks of 32 divide.
WIDE = {"hidden_size": 64, "intermediate_size": 32}
CONFIG = GPT_OSS | {"model_type": "gpt_oss"}
OURS = ModelConfig(
    num_layers=4,
    norm="rms",
    activation="swiglu_oai",
    gated=True,
    attention=AttentionConfig(sinks=True, qkv_bias=True, output_bias=True, sliding_window=16, sliding_layers=(1, 3)),
    moe=MoEConfig(gate="naive", gate_options={"bias": True}, expert_options={"bias": True}, eval_capacity_factor=None),
)


def number(code, scale):
    """Of four bits, by the format's definition, and the power of two of its block."""
    exponent, mantissa = code >> 1 & 3, code & 1
    value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return (-value if code & 8 else value) * 2.0 ** (scale - 127)


def pack(folder):
    """Replace a folder's matrices of experts by random ones in MXFP4; return these as transformers has them."""
    tensors, g, plain = weights(folder), torch.Generator().manual_seed(0), {}
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=g).to(torch.uint8)
        scales = torch.randint(117, 125, (experts, outputs, inputs // 32), generator=g).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        matrix = [
            [
                [
                    number(byte >> shift & 15, scale)
                    for bytes_, scale in zip(*row, strict=True)
                    for byte in bytes_
                    for shift in (0, 4)
                ]
                for row in zip(rows, of_rows, strict=True)
            ]
            for rows, of_rows in zip(blocks.tolist(), scales.tolist(), strict=True)
        ]
        plain[name] = torch.tensor(matrix).transpose(1, 2).bfloat16()
        assert torch.equal(plain[name].float(), torch.tensor(matrix).transpose(1, 2)), "bfloat16 is not exact"
    for path in folder.glob("*.safetensors*"):
        path.unlink()
    save_file(tensors, folder / "model.safetensors")
    config = json.loads((folder / "config.json").read_text())
    config["quantization_config"] = {"quant_method": "mxfp4", "modules_to_not_convert": ["model.layers.*.self_attn"]}
    (folder / "config.json").write_text(json.dumps(config))
    return tensors, plain


def test_published_weights_are_unpacked_exactly(tmp_path):
    folder = tmp_path / "theirs"
    save_random(folder, CASE, **WIDE)
    tensors, plain = pack(folder)
    done = import_folder(folder, tmp_path / "run")
    assert done.family is FAMILIES["gpt_oss"] and done.recipe.train.precision == "bf16"
    export_checkpoint(tmp_path / "run", tmp_path / "out")
    found = weights(tmp_path / "out")
    expected = plain | {name: value for name, value in tensors.items() if value.dtype != torch.uint8}
    assert found.keys() == expected.keys() and len(plain) == 6
    for name, value in expected.items():
        assert found[name].dtype == torch.bfloat16 and torch.equal(found[name], value), name
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"layers.0.mlp.experts.down_proj_blocks: MXFP4 weights .*not finite"):
        import_folder(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(("rope", "scaling"), [(None, "yarn"), ({}, None)])
def test_missing_positions_are_yarns_but_not_empty_ones(rope, scaling):
    """As transformers 5 has them."""
    family = FAMILIES["gpt_oss"]
    config = CONFIG | {"rope_parameters": rope, "rope_scaling": None}
    assert model_of(family.adapt(config, None))[1].position.rope_scaling == scaling


@pytest.mark.parametrize(
    ("values", "kinds", "window"),
    [
        ({}, ["sliding_attention", "full_attention"] * 2, 16),
        ({"attention.sliding_layers": ()}, ["sliding_attention"] * 4, 16),
        ({"attention.sliding_layers": (), "attention.sliding_window": None}, ["full_attention"] * 4, 128),
    ],
)
def test_windows_come_back(values, kinds, window):
    model = OURS.with_values(values)
    config = config_of(FAMILIES["gpt_oss"], model, "float32")
    assert (config["layer_types"], config["sliding_window"]) == (kinds, window)
    found = model_of(config)[1]
    assert (found.attention.sliding_window, found.attention.sliding_layers) == (
        model.attention.sliding_window,
        model.attention.sliding_layers,
    )


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"layer_types": ["full_attention"] * 2}, "layer_types=.* must be a list of 3 entries"),
        ({"layer_types": ["chunked_attention"] * 3}, "layer_types=.* full_attention or sliding_attention"),
        ({"sliding_window": None}, "sliding_window=none must be an integer"),
        ({"swiglu_limit": 8.0}, "swiglu_limit=8.0 is not supported"),
        ({"swiglu_alpha": 1.0}, "swiglu_alpha=1.0 is not supported"),
        ({"attention_bias": 1}, "attention_bias=1 must be true or false"),
        ({"quantization_config": {"quant_method": "fp8"}}, "quantization_config=.*fp8"),
    ],
)
def test_configs_that_are_refused(values, message):
    with pytest.raises(UserError, match=message):
        model_of(CONFIG | values)


@pytest.mark.parametrize(
    ("values", "key"),
    [
        ({"attention.sinks": False}, "attention.sinks"),
        ({"activation": "silu"}, "activation"),
        ({"attention.qkv_bias": False}, "attention.output_bias"),
        ({"moe.gate_options": {}}, "gate_options"),
        ({"moe.expert_options": {}}, "expert_options"),
        ({"moe.every": 2}, "moe.every"),
        ({"moe.num_shared_experts": 1}, "num_shared_experts"),
        ({"moe.normalize": False}, "normalize"),
    ],
)
def test_models_that_are_refused(values, key):
    assert family_for(OURS).name == "gpt_oss"
    with pytest.raises(UserError, match=rf"{key}=.* is not supported by gpt_oss"):
        family_for(OURS.with_values(values), "gpt_oss")
