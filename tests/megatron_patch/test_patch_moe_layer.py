"""A Megatron-core GPT with its own Mixture-of-Experts layers becomes one of FMoE's: the output is what it was."""

import re
import zlib

import pytest
import torch
import torch.nn.functional as F
from compare import assert_close, relative_error
from forks import only, refusal, values

from fmoe import UserError
from megatron_patch import fmoe_state_dict

# Functions run in processes of the `forks` fixture, where megatron-core is imported already.

SWIGLU = {"activation_func": F.silu, "gated_linear_unit": True}
CONFIGS = {
    "gelu": {},
    "swiglu, softmax before the choice": SWIGLU
    | {"moe_router_pre_softmax": True, "moe_router_topk_scaling_factor": 2.5},
    "biases, one expert a token": {"add_bias_linear": True, "moe_router_topk": 1, "moe_router_pre_softmax": True},
    "sigmoid": SWIGLU | {"moe_router_score_function": "sigmoid", "moe_router_topk_scaling_factor": 1.5},
    "sigmoid, one expert a token": SWIGLU | {"moe_router_score_function": "sigmoid", "moe_router_topk": 1},
    "sigmoid with a bias": SWIGLU | {"moe_router_score_function": "sigmoid", "moe_router_enable_expert_bias": True},
    "shared expert": SWIGLU | {"moe_shared_expert_intermediate_size": 20},
    "shared expert with a gate": SWIGLU | {"moe_shared_expert_intermediate_size": 20, "moe_shared_expert_gate": True},
    "every second layer": {"moe_layer_freq": [0, 1]},
}


def megatron_gpt(options, expert_parallel=1):
    """With weights of a size at which experts matter, the same at every expert parallel size."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from tiny_gpt import EXPERTS, tiny_config, tiny_gpt

    moe = {
        "num_moe_experts": EXPERTS,
        "moe_router_topk": 2,
        "moe_ffn_hidden_size": 24,
        "moe_token_dispatcher_type": "alltoall" if expert_parallel > 1 else "allgather",
        "moe_router_load_balancing_type": "none",
        "expert_model_parallel_size": expert_parallel,
    }
    options = moe | options
    spec = get_gpt_layer_local_spec(num_experts=EXPERTS, moe_grouped_gemm=False)
    if "moe_layer_freq" in options:
        spec = get_gpt_decoder_block_spec(tiny_config(**options), use_transformer_engine=False)
    gpt = tiny_gpt(spec, **options)
    first = EXPERTS // expert_parallel * torch.distributed.get_rank() if expert_parallel > 1 else 0
    with torch.no_grad():
        for name, value in gpt.state_dict().items():
            if torch.is_tensor(value) and "layernorm" not in name:
                draw = torch.Generator().manual_seed(zlib.crc32(with_global_id(name, first).encode()))
                value.normal_(std=0.3 if ".mlp." in name else 0.05, generator=draw)
    return gpt


def with_global_id(name, first):
    """The name of a parameter with its expert's number in the whole layer."""
    return re.sub(r"local_experts\.(\d+)", lambda m: f"expert {first + int(m[1])}", name)


def converted(options, expert_parallel=1, **own):
    """Logits and losses before and after, gradients of what is not in the layers, and who is in their place."""
    from tiny_gpt import batch, start

    import fmoe
    from megatron_patch import MegatronMoE, convert_moe_layers

    torch.compiler.set_stance("force_eager")  # Megatron's router has a function that is compiled, for half a minute
    start(expert_parallel)
    gpt = megatron_gpt(options, expert_parallel)
    tokens, positions, labels = batch()
    seen = []
    for change in (False, True):
        if change:
            assert convert_moe_layers(gpt, seed=3, **own) is gpt
        gpt.zero_grad()
        fmoe.random.set_position(seed=1, step=0)
        if not options.get("add_bias_linear"):  # where Megatron's experts change a view in place, and have no gradient
            gpt.train()(tokens, positions, None, labels=labels).mean().backward()
        outside = {n: p.grad.clone() for n, p in gpt.named_parameters() if ".mlp." not in n and p.grad is not None}
        with torch.no_grad():
            seen.append((gpt.eval()(tokens, positions, None), outside))
    experts = [p for n, p in gpt.named_parameters() if ".experts." in n]
    assert experts and all(p.allreduce is False and p.requires_grad for p in experts)
    return seen, [layer.layer_number for layer in gpt.decoder.layers if isinstance(layer.mlp, MegatronMoE)]


@pytest.mark.by_default(
    "swiglu, softmax before the choice", "sigmoid", "sigmoid with a bias", "shared expert", "shared expert with a gate"
)
@pytest.mark.parametrize("config", CONFIGS)
def test_output_and_gradients_are_unchanged(forks, config):
    (before, after), layers = only(forks.run(1, converted, CONFIGS[config]))
    assert layers == ([2] if config == "every second layer" else [1, 2])
    assert_close(after[0], before[0], 1e-5, "logits")
    assert after[1].keys() == before[1].keys() and (before[1] or "biases" in config)
    for name, grad in before[1].items():
        assert_close(after[1][name], grad, 1e-5, f"gradient of {name}")


@pytest.mark.by_default("sigmoid with a bias")
@pytest.mark.parametrize("config", ["gelu", "sigmoid with a bias"])
def test_two_expert_parallel_ranks_convert_their_own(forks, config):
    expected = only(forks.run(1, converted, CONFIGS[config]))[0][0][0]
    for (before, after), _ in values(forks.run(2, converted, CONFIGS[config], 2)):
        assert_close(before[0], expected, 1e-5, "logits of Megatron's")
        assert_close(after[0], expected, 1e-5, "logits")


def from_a_file(folder):
    """A state in safetensors, read into a GPT that was built with FMoE layers; logits of both."""
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from safetensors.torch import load_file, save_file
    from tiny_gpt import EXPERTS, batch, start, tiny_gpt

    from megatron_patch import fmoe_layer_spec, fmoe_state_dict

    start()
    gpt = megatron_gpt(SWIGLU)
    state = {name: value for name, value in gpt.state_dict().items() if torch.is_tensor(value)}
    save_file({name: value.clone() for name, value in state.items()}, folder / "megatron.safetensors")
    spec = fmoe_layer_spec(get_gpt_layer_local_spec(), num_experts=EXPERTS, d_hidden=24, top_k=2, gate="naive")
    ours = tiny_gpt(spec, **SWIGLU)
    tokens, positions, _ = batch()
    new = ours.eval()(tokens, positions, None).detach()
    missing, unknown = ours.load_state_dict(fmoe_state_dict(load_file(folder / "megatron.safetensors")), strict=False)
    assert not unknown and all("_extra_state" in name for name in missing), (missing, unknown)
    with torch.no_grad():
        return gpt.eval()(tokens, positions, None), ours(tokens, positions, None), new


def test_a_state_in_a_file(forks, tmp_path):
    expected, found, new = only(forks.run(1, from_a_file, tmp_path))
    assert_close(found, expected, 1e-5, "logits")
    assert relative_error(new, expected) > 0.1


def own_state(experts=3, width=8, hidden=5):
    """Return the random state of one layer with SequentialMLP."""
    torch.manual_seed(0)
    state = {"router.weight": torch.randn(experts, width)}
    for n in range(experts):
        state[f"experts.local_experts.{n}.linear_fc1.weight"] = torch.randn(2 * hidden, width)
        state[f"experts.local_experts.{n}.linear_fc2.weight"] = torch.randn(width, hidden)
    return state


def test_grouped_experts_are_the_same_experts():
    """GroupedMLP multiplies rows with ``weight1.view(E, D, -1)[e]``; TEGroupedMLP numbers its weights."""
    single = own_state()
    first = [single[f"experts.local_experts.{n}.linear_fc1.weight"] for n in range(3)]
    second = [single[f"experts.local_experts.{n}.linear_fc2.weight"] for n in range(3)]
    expected = fmoe_state_dict(single)
    assert torch.equal(expected["experts.weight_in"], torch.stack(first))
    assert expected.keys() == {"gate.weight", "experts.weight_in", "experts.weight_out"}
    grouped = {
        "router.weight": single["router.weight"],
        "experts.weight1": torch.stack([w.T for w in first]).contiguous().view(8, -1),
        "experts.weight2": torch.cat([w.T for w in second]),
        "experts._extra_state": torch.zeros(1),
    }
    rows = torch.randn(4, 8)
    assert torch.allclose(rows @ grouped["experts.weight1"].view(3, 8, -1)[1], F.linear(rows, first[1]))
    numbered = {"router.weight": single["router.weight"]}
    numbered |= {f"experts.linear_fc1.weight{n}": w for n, w in enumerate(first)}
    numbered |= {f"experts.linear_fc2.weight{n}": w for n, w in enumerate(second)}
    for state in (grouped, numbered):
        found = fmoe_state_dict(state)
        assert found.keys() == expected.keys()
        assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_what_is_missing_or_unknown_is_told():
    state = {f"decoder.layers.0.mlp.{name}": value for name, value in own_state().items()}
    state["decoder.final_layernorm.weight"] = torch.ones(8)
    assert fmoe_state_dict(state)["decoder.final_layernorm.weight"] is state["decoder.final_layernorm.weight"]
    one = "decoder.layers.0.mlp.experts.local_experts.1.linear_fc2.weight"
    with pytest.raises(
        UserError, match=r"decoder\.layers\.0\.mlp: experts\.local_experts\.1\..* is missing: 3 experts are expected"
    ):
        fmoe_state_dict({name: value for name, value in state.items() if name != one})
    with pytest.raises(UserError, match=r"decoder\.layers\.0\.mlp: lora has no counterpart"):
        fmoe_state_dict(state | {"decoder.layers.0.mlp.lora": torch.ones(1)})
    with pytest.raises(UserError, match=r"local_experts\.2\.\S* has no counterpart in an FMoE layer of 2 experts"):
        fmoe_state_dict(state, num_local_experts=2)
    with pytest.raises(UserError, match=r"the state has no weights for experts\.weight_in"):
        fmoe_state_dict({"router.weight": torch.ones(2, 2)})


REFUSED = {
    "capacity": (
        {"moe_expert_capacity_factor": 1.0, "moe_router_load_balancing_type": "aux_loss"},
        "capacity_factor=1.0",
    ),
    "jitter": ({"moe_input_jitter_eps": 0.1}, "moe_input_jitter_eps=0.1"),
    "groups": ({"moe_router_num_groups": 2, "moe_router_group_topk": 1}, "moe_router_num_groups=2"),
    "sinkhorn": ({"moe_router_load_balancing_type": "sinkhorn"}, "moe_router_load_balancing_type=sinkhorn"),
}


def convert(options, with_fmoefy=False):
    """Convert a model whose layers compute something else, and which must be left as it is."""
    from megatron.core.transformer.moe.moe_layer import MoELayer
    from tiny_gpt import start

    import fmoe
    from megatron_patch import convert_moe_layers

    start()
    gpt = megatron_gpt(options)
    try:
        if with_fmoefy:
            fmoe.fmoefy(gpt, 4)
        convert_moe_layers(gpt)
    finally:
        assert all(isinstance(layer.mlp, MoELayer) for layer in gpt.decoder.layers)


@pytest.mark.by_default("jitter", "sinkhorn")
@pytest.mark.parametrize("case", REFUSED)
def test_what_is_computed_otherwise_is_refused(forks, case):
    options, message = REFUSED[case]
    told = refusal(forks.run(1, convert, options))
    assert told.startswith("the MoELayer of layer 1: ") and message in told


def test_upcycling_refers_to_the_conversion(forks):
    assert "which megatron_patch.convert_moe_layers converts" in refusal(forks.run(1, convert, {}, True))


NEWER = {  # than megatron-core 0.16: fields, and a value of an older one
    "moe_router_score_function": "sqrtsoftplus",
    "moe_router_force_biased": 0.5,
    "moe_expert_rank_capacity_factor": 1.5,
    "moe_mlp_glu_interleave_size": 32,
    "moe_shared_expert_glu_interleave_size": 32,
}


def refusals_of_newer_settings():
    from tiny_gpt import start

    from megatron_patch import convert_moe_layers

    start()
    gpt = megatron_gpt({})
    messages = []
    for name, value in NEWER.items():
        with pytest.MonkeyPatch.context() as patch, pytest.raises(UserError) as error:
            patch.setattr(gpt.config, name, value, raising=False)
            convert_moe_layers(gpt)
        messages.append(str(error.value))
    return messages


def test_settings_of_newer_versions_are_refused(forks):
    for (name, value), message in zip(NEWER.items(), only(forks.run(1, refusals_of_newer_settings)), strict=True):
        assert f"{name}={value} is not supported" in message


def convert_dense(stages):
    from tiny_gpt import start, tiny_gpt

    from megatron_patch import convert_moe_layers

    start()
    gpt = tiny_gpt()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("megatron.core.parallel_state.get_pipeline_model_parallel_world_size", lambda: stages)
        assert convert_moe_layers(gpt) is gpt


def test_a_dense_model_has_nothing_to_convert(forks):
    only(forks.run(1, convert_dense, 2))  # other pipeline stages may have MoELayers
    assert "has no MoELayer" in refusal(forks.run(1, convert_dense, 1))
