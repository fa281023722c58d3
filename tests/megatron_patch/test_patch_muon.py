"""The hidden matrices of a Megatron model, and how its fused weights divide into them, at every split."""

import pytest
import torch
from forks import refusal, values
from torch import nn

HEAD = 8
WIDTH = 32


def described(tensor=1, expert=1, replaces=False):
    """By name: sections, axis of the split and size of the group, of all hidden matrices of a gated GPT."""
    from tiny_gpt import MOE, start, tiny_gpt

    import fmoe
    from megatron_patch.muon import megatron_matrices

    start(expert, tensor)
    split = {"tensor_model_parallel_size": tensor, "sequence_parallel": tensor > 1}
    gpt = tiny_gpt(gated_linear_unit=True, activation_func=nn.functional.silu, kv_channels=HEAD, **split)
    fmoe.fmoefy(gpt, upcycle=False, layers=[2], shared_expert=8, shared_gate=True, **MOE)
    if replaces:  # by tensors without the attributes that modules have set
        for module in gpt.modules():
            for name, parameter in module.named_parameters(recurse=False):
                setattr(module, name, nn.Parameter(parameter.detach().clone()))
    names = {parameter: name for name, parameter in gpt.named_parameters()}
    found = megatron_matrices([nn.Sequential(gpt)])  # wrapped, as in a DDP
    return {
        names[p]: (m.sections, m.axis, 1 if m.group is None else m.group.size(), m.blocks) for p, m in found.items()
    }


ATTENTION = {"linear_proj": ((WIDTH,), 1), "linear_qkv": ((HEAD, HEAD, HEAD), 0)}


def expected(tensor, expert):
    cut = {f"{layer}.self_attention.{n}.weight": of for layer in (0, 1) for n, of in ATTENTION.items()}
    cut |= {"0.mlp.linear_fc1.weight": ((48 // tensor,) * 2, 0), "0.mlp.linear_fc2.weight": ((WIDTH,), 1)}
    found = {name: (rows, axis if tensor > 1 else 0, tensor, 1) for name, (rows, axis) in cut.items()}
    found |= {"1.mlp.experts.weight_in": ((24, 24), 0, 1, 4 // expert)}
    found |= {"1.mlp.experts.weight_out": ((WIDTH,), 0, 1, 4 // expert)}
    found |= {"1.mlp.shared.expert.weight_in": ((8, 8), 0, 1, 1)}
    found |= {"1.mlp.shared.expert.weight_out": ((WIDTH,), 0, 1, 1)}
    return {f"decoder.layers.{name}": of for name, of in found.items()}


@pytest.mark.parametrize(("tensor", "expert", "replaces"), [(1, 1, False), (1, 1, True), (2, 1, True), (1, 2, False)])
def test_hidden_matrices_are_those_of_the_layers(forks, tensor, expert, replaces):
    """Neither embedding nor gates; by their modules, so that replaced parameters are found too."""
    for rank in values(forks.run(tensor * expert, described, tensor, expert, replaces)):
        assert rank == expected(tensor, expert)


def grouped_experts():
    from megatron.core.transformer.moe import experts

    from megatron_patch.muon import megatron_matrices

    if not hasattr(experts, "GroupedMLP"):
        return None
    grouped = experts.GroupedMLP.__new__(experts.GroupedMLP)
    nn.Module.__init__(grouped)
    return megatron_matrices([grouped])


def test_experts_side_by_side_are_refused(forks):
    results = forks.run(1, grouped_experts)
    if results == [None]:
        pytest.skip("this version of megatron-core has no GroupedMLP")
    assert "does not support Megatron-core's GroupedMLP" in refusal(results)


def unknown_split():
    from fmoe.optim import Matrices
    from megatron_patch.muon import check_slices

    weight = nn.Parameter(torch.ones(4, 3))
    check_slices(Matrices.of(weight), weight, 1)
    check_slices(Matrices.of(weight), weight, 2)


def test_what_cannot_be_gathered_is_refused(forks):
    message = refusal(forks.run(1, unknown_split))
    assert "a weight of shape (4, 3)" in message and "2 tensor parallel ranks" in message
