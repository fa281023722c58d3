"""FMoE layers under tensor parallelism without the trainer: upcycled models keep their output, both ways in agree, and
parameters have the marks that Megatron's gradients and norms go by."""

import pytest
import torch
from forks import refusal, values
from tiny_gpt import MOE, batch, start, tiny_gpt


def loss_of(gpt):
    tokens, positions, labels = batch()
    return gpt(tokens, positions, None, labels=labels).detach()


def upcycled(options):
    from megatron_patch import fmoefy

    start(tensor=2)
    gpt = tiny_gpt(tensor_model_parallel_size=2, **options).eval()
    before = loss_of(gpt)
    fmoefy(gpt, num_experts=4, top_k=2, upcycle=True)
    return before, loss_of(gpt)


@pytest.mark.cover(1)
@pytest.mark.parametrize("gated", [False, True], ids=["plain", "gated"])
@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tokens alike", "sequence parallel"])
def test_upcycling_keeps_the_output(forks, sequence_parallel, gated):
    options = {"sequence_parallel": sequence_parallel, "gated_linear_unit": gated}
    for before, after in values(forks.run(2, upcycled, options)):
        assert torch.allclose(before, after, rtol=1e-5, atol=1e-6) and before.std() > 1e-3


def both_ways(sequence_parallel):
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    from megatron_patch import fmoe_layer_spec, fmoefy, patches

    start(tensor=2)
    options = {"tensor_model_parallel_size": 2, "sequence_parallel": sequence_parallel}
    built = tiny_gpt(fmoe_layer_spec(get_gpt_layer_local_spec(), shared_expert=8, **MOE), **options)
    changed = fmoefy(tiny_gpt(**options), shared_expert=8, **MOE)
    layer = built.decoder.layers[1].mlp
    twin = changed.decoder.layers[1].mlp
    same = all(torch.equal(p, q) for p, q in zip(layer.parameters(), twin.parameters(), strict=True))
    marks = {
        name: (
            getattr(p, "allreduce", True),
            getattr(p, "tensor_model_parallel", False),
            getattr(p, "sequence_parallel", False),
            getattr(p, patches.PARTIAL, False),
        )
        for name, p in twin.double().float().named_parameters()  # marks survive a cast
    }
    return same, marks


@pytest.mark.parametrize("sequence_parallel", [False, True], ids=["tokens alike", "sequence parallel"])
def test_both_ways_in_agree_and_mark_alike(forks, sequence_parallel):
    for same, marks in values(forks.run(2, both_ways, sequence_parallel)):
        assert same
        for name, mark in marks.items():
            if name.startswith("experts."):
                assert mark == (False, True, False, False), name
            else:
                assert mark == (True, False, sequence_parallel, not sequence_parallel), name


def cut_experts(call):
    from megatron.core import parallel_state

    from megatron_patch import MegatronMoE, cpu, fmoefy

    cpu.install()
    parallel_state.initialize_model_parallel(2)  # expert tensor parallel size: Megatron's default, as tensor's
    gpt = tiny_gpt(tensor_model_parallel_size=2)
    try:
        if call == "upcycle":
            fmoefy(gpt, num_experts=4, upcycle=True)
        else:
            MegatronMoE(gpt.config, num_experts=4, expert=torch.nn.Linear)
    finally:
        assert gpt.config.num_moe_experts is None


@pytest.mark.parametrize(
    ("call", "parts"),
    [("upcycle", ["upcycle=True", "expert_tensor_parallel_size=2"]), ("modules", ["expert_tensor_group"])],
)
def test_what_cut_experts_cannot_do_is_said(forks, call, parts):
    message = refusal(forks.run(2, cut_experts, call))
    assert all(part in message for part in parts), message
