"""`fmoe.fmoefy` leaves a Megatron-core model to megatron_patch, by its entry point."""

import pytest
from forks import only, refusal

# Functions run in processes of the `forks` fixture, where megatron-core is imported already.


def converted(options):
    from tiny_gpt import EXPERTS, start, tiny_gpt

    import fmoe
    from megatron_patch import MegatronMoE

    start()
    gpt = tiny_gpt()
    fmoe.fmoefy(gpt, EXPERTS, **options)
    return [layer.layer_number for layer in gpt.decoder.layers if isinstance(layer.mlp, MegatronMoE)]


@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ({}, [1, 2]),
        ({"layers": "all", "upcycle": False, "seed": 1}, [1, 2]),
        ({"layers": [1]}, [1]),
        ({"layers": 2}, [2]),
    ],
    ids=str,
)
def test_megatron_models_go_to_their_converter(forks, options, expected):
    assert only(forks.run(1, converted, options)) == expected


@pytest.mark.by_default(0, 2)
@pytest.mark.parametrize("layers", [[3], [], "odd", 3], ids=str)
def test_layers_that_there_are_not(forks, layers):
    message = refusal(forks.run(1, converted, {"layers": layers}))
    assert f"layers={layers!r}" in message and ("2" in message or layers == "odd")


def with_the_norm_in_the_mlp(form):
    """The error for a layer that has its norm in the MLP, as in Transformer Engine's specs of dense layers."""
    from functools import partial

    import torch
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
    from megatron.core.transformer.identity_op import IdentityOp
    from megatron.core.transformer.mlp import MLP, MLPSubmodules
    from megatron.core.transformer.spec_utils import ModuleSpec
    from tiny_gpt import EXPERTS, start, tiny_gpt

    import fmoe
    import megatron_patch

    class LayerNormColumnParallelLinear(ColumnParallelLinear):
        def __init__(self, input_size, output_size, **options):
            super().__init__(input_size, output_size, **options)
            self.layer_norm_weight = torch.nn.Parameter(torch.ones(input_size))

    start()
    spec = get_gpt_layer_local_spec()
    spec.submodules.pre_mlp_layernorm = IdentityOp
    within = MLPSubmodules(linear_fc1=LayerNormColumnParallelLinear, linear_fc2=RowParallelLinear)
    spec.submodules.mlp = ModuleSpec(MLP, submodules=within)
    if "partial" in form:
        spec.submodules.mlp = partial(MLP, submodules=within)
        spec.submodules.pre_mlp_layernorm = partial(IdentityOp)
    if form == "partial layer":
        spec = partial(spec.module, submodules=spec.submodules)
    if form == "model":
        fmoe.fmoefy(tiny_gpt(spec), EXPERTS, upcycle=False)
    else:
        megatron_patch.fmoe_layer_spec(spec, num_experts=EXPERTS)


@pytest.mark.parametrize(
    ("form", "where"),
    [("model", "layer 1"), ("spec", "base_spec"), ("partial", "base_spec"), ("partial layer", "base_spec")],
)
def test_a_norm_in_the_mlp_is_not_lost(forks, form, where):
    message = refusal(forks.run(1, with_the_norm_in_the_mlp, form))
    assert message.startswith(where)
    assert "pre_mlp_layernorm" in message


def not_megatrons():
    from torch import nn

    import fmoe

    model = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 4))
    fmoe.fmoefy(model, 2)
    assert isinstance(model[0], fmoe.MoE)
    fmoe.fmoefy(nn.Linear(4, 4), 2)


def test_other_models_do_not_although_megatron_is_there(forks):
    assert "of whole models: megatron." in refusal(forks.run(1, not_megatrons))
