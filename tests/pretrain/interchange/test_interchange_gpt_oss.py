"""GPT-OSS: weights in MXFP4, and positions and windows by default."""

import json

import pytest
import torch
from huggingface_folders import assert_same_weights, save_random, weights
from safetensors.torch import save_file
from test_interchange_refusals import built
from tiny_families import GPT_OSS

from fmoe.errors import UserError
from pretrain.interchange import export_checkpoint, import_folder
from pretrain.interchange.configs import config_of, model_of
from pretrain.interchange.families import FAMILIES

CASE = "gpt_oss, other layers, bf16"
# Sizes that blocks of 32 divide.
WIDE = {"hidden_size": 64, "intermediate_size": 32}


def number(code):
    """Of four bits, by the format's definition."""
    exponent = code >> 1 & 3
    mantissa = code & 1
    value = (1 + mantissa / 2) * 2.0 ** (exponent - 1) if exponent else mantissa / 2
    return -value if code & 8 else value


def pack(folder):
    """Replace a folder's matrices of experts by random ones in MXFP4; return these as transformers has them."""
    tensors, plain = weights(folder), {}
    generator = torch.Generator().manual_seed(0)
    numbers = torch.tensor([number(code) for code in range(16)], dtype=torch.float64)
    for name in [name for name in tensors if name.endswith(("gate_up_proj", "down_proj"))]:
        experts, inputs, outputs = tensors.pop(name).shape
        blocks = torch.randint(0, 256, (experts, outputs, inputs // 32, 16), generator=generator).to(torch.uint8)
        scales = torch.randint(117, 125, (experts, outputs, inputs // 32), generator=generator).to(torch.uint8)
        tensors |= {f"{name}_blocks": blocks, f"{name}_scales": scales}
        codes = torch.stack([blocks % 16, blocks // 16], dim=-1).long().flatten(3)
        matrix = (numbers[codes] * 2.0 ** (scales.double() - 127).unsqueeze(-1)).flatten(2).transpose(1, 2)
        plain[name] = matrix.bfloat16()
        assert torch.equal(plain[name].double(), matrix), "bfloat16 is not exact"
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
    assert len(plain) == 6
    unpacked = {name: value for name, value in tensors.items() if value.dtype != torch.uint8}
    assert_same_weights(weights(tmp_path / "out"), plain | unpacked)
    tensors["model.layers.0.mlp.experts.down_proj_scales"][1, 2, 0] = 255
    save_file(tensors, folder / "model.safetensors")
    with pytest.raises(UserError, match=r"layers.0.mlp.experts.down_proj_blocks: MXFP4 weights .*not finite"):
        import_folder(folder, tmp_path / "again")
    assert not (tmp_path / "again").exists()


@pytest.mark.parametrize(("rope", "scaling"), [(None, "yarn"), ({}, None)])
def test_missing_positions_are_yarns_but_not_empty_ones(rope, scaling):
    """As transformers 5 has them."""
    config = GPT_OSS | {"model_type": "gpt_oss", "rope_parameters": rope, "rope_scaling": None}
    assert model_of(FAMILIES["gpt_oss"].adapt(config, None))[1].position.rope_scaling == scaling


@pytest.mark.parametrize(
    ("layers", "window", "kinds", "written"),
    [
        ((1, 3), 16, ["sliding_attention", "full_attention", "sliding_attention"], 16),
        ((), 16, ["sliding_attention"] * 3, 16),
        ((), None, ["full_attention"] * 3, 128),
    ],
)
def test_windows_are_written(layers, window, kinds, written):
    model = built("gpt_oss", {"attention.sliding_layers": layers, "attention.sliding_window": window})
    config = config_of(FAMILIES["gpt_oss"], model, "float32")
    assert (config["layer_types"], config["sliding_window"]) == (kinds, written)
    assert model_of(config)[1].attention.sliding_layers == layers
