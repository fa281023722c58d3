"""Upcycling a Megatron-core GPT: the output is what it was, at expert parallel size 1 and 2, and it trains on."""

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, relative_error
from forks import only, refusal, values

# Functions run in processes of the `forks` fixture, where megatron-core is imported already.

CONFIGS = {
    "gelu+bias": {"activation_func": F.gelu, "add_bias_linear": True},
    "swiglu": {"activation_func": F.silu, "gated_linear_unit": True},
    "swiglu+bias": {"activation_func": F.silu, "gated_linear_unit": True, "add_bias_linear": True},
}
DROPLESS = {"capacity_factor": None, "eval_capacity_factor": None}


def dense_gpt(config):
    """With biases and weights of a size at which an MLP matters."""
    from tiny_gpt import tiny_gpt

    gpt = tiny_gpt(**config)
    with torch.no_grad():
        for layer in gpt.decoder.layers:
            for parameter in layer.mlp.parameters():
                parameter.normal_(std=0.2)
    return gpt


def fmoefied(config, options, expert_parallel=1, steps=0):
    """Logits before and after in training and evaluation, losses of some steps, the experts of all ranks."""
    from tiny_gpt import EXPERTS, batch, gather_experts, start

    import fmoe

    start(expert_parallel)
    gpt = dense_gpt(config)
    tokens, positions, labels = batch()
    before = gpt.eval()(tokens, positions, None).detach()
    dense = {name: p.detach().clone() for name, p in gpt.named_parameters() if ".mlp." in name}
    assert fmoe.fmoefy(gpt.train(), EXPERTS, **options) is gpt
    experts = [p for name, p in gpt.named_parameters() if ".experts." in name]
    assert all(p.allreduce is False and p.requires_grad for p in experts), "Megatron's mark of experts is lost"
    after = []
    for training in (True, False):
        fmoe.random.set_position(seed=1, step=0)
        after.append(gpt.train(training)(tokens, positions, None).detach())
    gpt.train()
    optimizer = torch.optim.Adam(gpt.parameters(), lr=1e-2)
    losses = []
    for step in range(steps):
        fmoe.random.set_position(seed=1, step=step)
        optimizer.zero_grad()
        loss = gpt(tokens, positions, None, labels=labels).mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    experts = {name: gather_experts(p).detach().clone() for name, p in gpt.named_parameters() if ".experts." in name}
    return {"before": before, "after": after, "dense": dense, "experts": experts, "losses": losses}


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"top_k": 1, "layers": [2]},
        {"granularity": 2, "top_k": 2},
        {"gate": "switch", "gate_options": DROPLESS},
    ],
    ids=str,
)
@pytest.mark.parametrize("config", CONFIGS)
def test_output_is_unchanged(forks, config, options):
    found = only(forks.run(1, fmoefied, CONFIGS[config], options))
    for after in found["after"]:
        assert_close(after, found["before"], 1e-5, "logits")


def test_new_experts_where_asked_for(forks):
    found = only(forks.run(1, fmoefied, CONFIGS["gelu+bias"], {"upcycle": False}))
    assert relative_error(found["after"][0], found["before"]) > 1e-2
    weight = found["experts"]["decoder.layers.0.mlp.experts.weight_in"]
    assert not torch.equal(weight[0], weight[1])


@pytest.mark.cover(1)
@pytest.mark.parametrize("noise", [0.0, 0.1], ids=lambda noise: f"noise{noise}")
@pytest.mark.parametrize("config", ["gelu+bias", "swiglu"])
def test_expert_parallel_size_2_is_1_and_trains_on(forks, config, noise):
    alone = only(forks.run(1, fmoefied, CONFIGS[config], {"noise": noise, "seed": 3}, 1, 8))
    ranks = values(forks.run(2, fmoefied, CONFIGS[config], {"noise": noise, "seed": 3}, 2, 8))
    for found in ranks:
        for after, expected in zip(found["after"], alone["after"], strict=True):
            assert_close(after, expected, 1e-5, "logits of one rank")
            assert noise or relative_error(after, alone["before"]) < 1e-5
        assert found["losses"] == pytest.approx(alone["losses"], rel=1e-2)  # both ranks add up experts' gradients
        assert found["losses"][-1] < 0.8 * found["losses"][0]


def fused():
    from tiny_gpt import LENGTH, WIDTH, start

    from megatron_patch import fmoefy

    start()
    gpt = dense_gpt(CONFIGS["gelu+bias"])
    gpt.config.bias_activation_fusion = True
    mlp = gpt.decoder.layers[0].mlp
    x = torch.randn(LENGTH, 3, WIDTH)
    # Uncompiled: torch 2.13's compiler returns wrong numbers if ATEN_CPU_CAPABILITY=avx2 on a processor with AVX-512.
    with torch.compiler.set_stance("force_eager"):
        output, bias = mlp(x)
    return fmoefy(gpt, 4, upcycle=True).decoder.layers[0].mlp(x)[0], output + bias


def test_the_fused_gelu_is_taken_as_it_computes(forks):
    output, expected = only(forks.run(1, fused))
    assert_close(output, expected, 1e-5, "output")


BREAKS = {
    "norm": lambda mlp: setattr(mlp.linear_fc1, "layer_norm_weight", torch.nn.Parameter(torch.ones(32))),
    "dtype": lambda mlp: mlp.linear_fc2.bfloat16(),
    "hook": lambda mlp: mlp.linear_fc2.register_forward_hook(lambda module, args, output: output),
    "lora": lambda mlp: make_lora(mlp.linear_fc1),
}


def make_lora(linear):
    base = type(linear)
    linear.__class__ = type("Lora", (base,), {"forward": lambda self, x: base.forward(self, 2 * x)})


def refused(config, options, break_it=None):
    from tiny_gpt import EXPERTS, start

    import fmoe

    start()
    gpt = dense_gpt(config)
    if break_it == "class":
        gpt.decoder.layers[1].mlp = torch.nn.Identity()
    elif break_it == "twice":
        fmoe.fmoefy(gpt, EXPERTS)
    elif break_it is not None:
        BREAKS[break_it](gpt.decoder.layers[1].mlp)
    mlps = [layer.mlp for layer in gpt.decoder.layers]
    try:
        fmoe.fmoefy(gpt, EXPERTS, **options)
    finally:
        assert [layer.mlp for layer in gpt.decoder.layers] == mlps, "the model was changed all the same"


@pytest.mark.by_default(0, 5, 7, 10, 11, 12, 14, 15, 16)
@pytest.mark.parametrize(
    ("options", "break_it", "parts"),
    [
        ({"gate": "switch"}, None, ["'switch'", "drops tokens", f"gate_options={DROPLESS}"]),
        ({"gate": "gshard", "gate_options": DROPLESS}, None, ["at random"]),
        ({"granularity": 5, "top_k": 4}, None, ["granularity=5"]),
        ({"granularity": 2, "top_k": 1}, None, ["top_k=1", "granularity=2"]),
        ({"granularity": 0}, None, ["granularity=0"]),
        ({"noise": -1.0}, None, ["noise=-1.0"]),
        ({"noise": 0.1, "upcycle": False}, None, ["noise=0.1", "upcycle=False"]),
        ({"d_hidden": 12}, None, ["d_hidden"]),
        ({"d_model": 12, "upcycle": False}, None, ["d_model=12"]),
        ({"expert_options": {"activation": "relu"}}, None, ["expert_options['activation']"]),
        ({"top_k": 9}, None, ["top_k=9"]),
        ({}, "norm", ["layer 2", "layer_norm_weight"]),
        ({}, "class", ["layer 2", "Identity"]),
        ({}, "dtype", ["layer 2", "bfloat16"]),
        ({}, "hook", ["layer 2", "its linear_fc2 has hooks"]),
        ({}, "lora", ["layer 2", "its linear_fc1, a Lora, is not Megatron-core's own"]),
        ({}, "twice", ["already has MoE layers (2)"]),
    ],
    ids=str,
)
def test_what_stands_against_it_is_told_and_nothing_changed(forks, options, break_it, parts):
    message = refusal(forks.run(1, refused, {}, options, break_it))
    assert all(part in message for part in parts), message


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"moe_ffn_hidden_size": 20, "num_moe_experts": 4}, "moe_ffn_hidden_size=20"),
        (CONFIGS["swiglu"] | {"activation_func_clamp_value": 1.0}, "activation_func_clamp_value=1.0"),
        (CONFIGS["swiglu"] | {"glu_linear_offset": 1.0}, "glu_linear_offset=1.0"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_experts_cannot_compute_is_told(forks, config, part):
    assert part in refusal(forks.run(1, refused, config, {}))


def accepted_at_a_price():
    from tiny_gpt import batch, start

    import fmoe

    start()
    gpt = fmoe.fmoefy(dense_gpt({}), 4, gate="switch", exact=False)
    tokens, positions, labels = batch()
    gpt(tokens, positions, None, labels=labels).mean().backward()
    return [bool(p.grad.isfinite().all()) for p in gpt.decoder.parameters()]


def test_exact_false_takes_a_gate_that_drops(forks):
    assert all(only(forks.run(1, accepted_at_a_price)))


def frozen_bf16():
    from tiny_gpt import batch, start

    import fmoe

    start()
    gpt = dense_gpt({"bf16": True, "params_dtype": torch.bfloat16}).bfloat16()  # the norms too
    tokens, positions, _ = batch()
    before = gpt.eval()(tokens, positions, None).detach()
    gpt.decoder.layers[0].mlp.requires_grad_(False)
    fmoe.fmoefy(gpt, 4, top_k=1)
    first, second = (layer.mlp for layer in gpt.decoder.layers)
    assert {p.dtype for p in gpt.parameters()} == {torch.bfloat16}
    assert not any(p.requires_grad for p in first.experts.parameters()) and first.gate.weight.requires_grad
    assert all(p.requires_grad for p in second.experts.parameters())
    assert not first.training
    return before, gpt(tokens, positions, None).detach()


def test_a_frozen_16_bit_model_stays_so(forks):
    before, after = only(forks.run(1, frozen_bf16))
    assert_close(after, before, 2e-2, "logits")


def drawn_again():
    from tiny_gpt import start

    import fmoe
    from megatron_patch import MegatronMoE

    start()
    gpt = fmoe.fmoefy(dense_gpt({}), 4, seed=3)
    layer = gpt.decoder.layers[0].mlp
    layer.set_layer_number(1)  # as it is: nothing is drawn
    kept = layer.experts.weight_in[0].clone()
    new = MegatronMoE(gpt.config, layer_number=1, num_experts=4, seed=3)
    layer.reset_parameters()
    assert torch.equal(layer.experts.weight_in, new.experts.weight_in)
    layer.set_layer_number(2)
    new = MegatronMoE(gpt.config, layer_number=2, num_experts=4, seed=3)
    assert torch.equal(layer.experts.weight_in, new.experts.weight_in)
    return bool((kept == gpt.decoder.layers[0].mlp.experts.weight_in[0]).all())


def test_reset_parameters_draws_as_the_config_says(forks):
    assert not only(forks.run(1, drawn_again))
