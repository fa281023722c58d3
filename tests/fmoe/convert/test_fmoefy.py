"""`fmoe.fmoefy` on every family: blocks found, output unchanged, training, checkpoints, what else a model can do."""

import copy
import inspect

import pytest
import torch
from compare import assert_close, relative_error
from tiny_models import FAMILIES, tiny

import fmoe
from fmoe.convert import find_blocks

pytest.importorskip("transformers")

EXPERTS = 4
families = pytest.mark.parametrize("family", FAMILIES)


def moe_layers(model):
    return {name: module for name, module in model.named_modules() if isinstance(module, fmoe.MoE)}


@families
def test_output_is_unchanged_and_every_block_swapped(family):
    model, inputs = tiny(family)
    dense = copy.deepcopy(model)
    config = copy.deepcopy(getattr(model, "config", None))
    blocks = find_blocks(model)
    assert len(blocks) == FAMILIES[family].num_blocks
    assert {found.family for found in blocks} <= set(FAMILIES[family].found_by.split(" or "))
    swapped = sum(EXPERTS * sum(t.numel() for t in f.block.tensors) for f in blocks)
    routers = sum(EXPERTS * f.block.d_model for f in blocks)
    kept = sum(p.numel() for p in model.parameters()) - swapped // EXPERTS

    assert fmoe.fmoefy(model, EXPERTS, seed=3) is model
    layers = moe_layers(model)
    assert len(layers) == len(blocks)
    assert sum(p.numel() for p in model.parameters()) == kept + swapped + routers
    assert all(layer.experts.gated == FAMILIES[family].gated for layer in layers.values())
    assert getattr(model, "config", None) == config
    for training in (True, False):
        model.train(training), dense.train(training)
        assert all(layer.training == training for layer in layers.values())
        actual, expected = model(**inputs), dense(**inputs)
        assert_close(actual.logits, expected.logits, 1e-5, f"logits, training={training}")
        assert_close(actual.loss, expected.loss, 1e-5, "loss")


@pytest.mark.by_default("gpt2", "llama", "t5 gated", "swin", "albert", "xlm", "torch")
@families
def test_trains_and_its_state_dict_comes_back(family):
    model, inputs = tiny(family, dropout=0.1)
    fmoe.fmoefy(model.train(), EXPERTS, noise=0.01, seed=3)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for _ in range(10):
        loss = model(**inputs).loss
        loss.backward()
        losses.append(loss.item())
        if len(losses) == 1:
            for name, layer in moe_layers(model).items():
                assert layer.gate.weight.grad.abs().sum() > 0, name
                assert layer.experts.weight_in.grad.abs().sum() > 0, name
        optimizer.step()
        optimizer.zero_grad()
    assert losses[-1] < 0.95 * losses[0], losses

    other = fmoe.fmoefy(tiny(family, dropout=0.1)[0], EXPERTS, upcycle=False, seed=4)
    other.load_state_dict(model.state_dict())
    with torch.no_grad():
        assert torch.equal(other.eval()(**inputs).logits, model.eval()(**inputs).logits)


@pytest.mark.by_default("gpt2", "llama", "t5 gated", "swin", "torch")
@families
def test_new_experts_have_the_sizes_of_the_block(family):
    model, inputs = tiny(family)
    shapes = [(f.block.d_model, f.block.d_hidden // 2, f.block.has_bias) for f in find_blocks(model)]
    dense = model(**inputs).logits
    fmoe.fmoefy(model, EXPERTS, upcycle=False, granularity=2, gate="switch", top_k=1, seed=3)
    experts = [layer.experts for layer in moe_layers(model).values()]
    assert [(e.d_model, e.d_hidden, e.bias_in is not None) for e in experts] == shapes
    assert not torch.equal(experts[0].weight_in[0], experts[0].weight_in[1])
    assert model(**inputs).logits.shape == dense.shape


@pytest.mark.by_default("gpt2")
@pytest.mark.parametrize("family", ["gpt2", "llama"])
def test_generation_is_unchanged(family):
    model, inputs = tiny(family)
    prompt = inputs["input_ids"][:, :4]
    model.eval()
    expected = model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0)
    fmoe.fmoefy(model, EXPERTS)
    assert torch.equal(model.generate(prompt, max_new_tokens=6, do_sample=False, pad_token_id=0), expected)


@pytest.mark.by_default("t5")
@pytest.mark.parametrize("family", ["llama", "bert", "t5"])
def test_gradient_checkpointing_changes_nothing_and_counts_once(family):
    def gradients(convert, checkpointing):
        model, inputs = tiny(family, dropout=0.1)
        if "use_cache" in inspect.signature(model.forward).parameters:
            inputs["use_cache"] = False  # checkpointing turns it off, and with it other kernels see the keys and values
        convert(model.train())
        if checkpointing:
            model.gradient_checkpointing_enable()
        forwards = []
        for layer in list(moe_layers(model).values())[:1]:
            layer.register_forward_pre_hook(lambda *_: forwards.append(1))
        torch.manual_seed(5)
        model(**inputs).loss.backward()
        return [p.grad for p in model.parameters()], fmoe.metrics(model), len(forwards)

    def errors(convert):
        (plain, plain_report, once), (again, report, twice) = (gradients(convert, c) for c in (False, True))
        assert [a is None for a in plain] == [b is None for b in again]
        assert report == plain_report
        pairs = [(b, a) for a, b in zip(plain, again, strict=True) if a is not None]
        return [relative_error(b, a) for b, a in pairs], report, (once, twice)

    gate = {"gate": "gshard", "gate_options": {"capacity_factor": 1.0}}
    found, report, forwards = errors(lambda m: fmoe.fmoefy(m, EXPERTS, exact=False, noise=0.1, seed=3, **gate))
    dense, _, _ = errors(lambda m: m)
    assert forwards == (1, 2)
    assert all(r.tokens == 20 for r in report.values())
    assert max(found) <= 4 * max(dense), "the dense model's own is 0 unless the processor's kernels see other layouts"


def test_dropout_stays_where_the_block_had_it():
    model, _ = tiny("t5 gated", dropout=0.3)
    fmoe.fmoefy(model, EXPERTS)
    assert [layer.experts.dropout for layer in moe_layers(model).values()] == [0.3] * 4
    x = torch.randn(2, 5, 32)
    layer = next(iter(moe_layers(model).values())).train()
    assert not torch.equal(layer(x), layer(x))
    assert torch.equal(layer.eval()(x), layer(x))

    model, _ = tiny("gpt2", dropout=0.2)
    fmoe.fmoefy(model, EXPERTS)
    assert [name for name in moe_layers(model)] == [f"transformer.h.{i}.mlp.moe" for i in range(3)]
    assert model.transformer.h[0].mlp.dropout.p == 0.2
    assert model.transformer.h[0].mlp.moe.experts.dropout == 0.0

    model, _ = tiny("bert", dropout=0.2)
    fmoe.fmoefy(model, EXPERTS)
    assert model.bert.encoder.layer[0].output.dropout.p == 0.2


@pytest.mark.cover(1)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "qwen2", "bert", "torch"])
def test_dtype_mode_and_what_is_frozen_stay(family, dtype):
    model, inputs = tiny(family)
    model.to(dtype).eval()
    for parameter in model.parameters():
        parameter.requires_grad_(False)
    inputs = {k: v.to(dtype) if v.is_floating_point() else v for k, v in inputs.items()}
    expected = model(**inputs).logits
    fmoe.fmoefy(model, EXPERTS)
    for layer in moe_layers(model).values():
        assert not layer.training
        assert {p.dtype for p in layer.parameters()} == {dtype}
        assert [name for name, p in layer.named_parameters() if p.requires_grad] == ["gate.weight"]
    # In bfloat16 a weighted mean of two equal outputs is rounded once more than the output.
    assert_close(model(**inputs).logits, expected, 2e-2 if dtype == torch.bfloat16 else 1e-12, "logits")


def test_under_autocast():
    model, inputs = tiny("llama")
    dense = copy.deepcopy(model)
    fmoe.fmoefy(model, EXPERTS)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        actual, expected = model(**inputs), dense(**inputs)
    assert_close(actual.logits, expected.logits, 2e-2, "logits")
    actual.loss.backward()
    assert model.model.layers[0].mlp.experts.weight_in.grad.dtype == torch.float32


def test_the_example_trains(capsys):
    import runpy
    from pathlib import Path

    runpy.run_path(str(Path(__file__).parents[3] / "examples" / "hf_bert.py"), run_name="__main__")
    losses = [float(line.split()[-1]) for line in capsys.readouterr().out.splitlines() if line.startswith("step")]
    assert losses[-1] < losses[0]
