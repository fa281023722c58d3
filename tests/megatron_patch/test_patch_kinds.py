"""T5 and BERT: both ways in, numbers of layers, upcycling, fused attention."""

import pytest
import torch
from compare import assert_close, relative_error
from forks import only, refusal, values

# Functions run in processes of the `forks` fixture, where megatron-core is imported already.

NUMBERS = {"t5": [1, 2, 3, 4, 5], "bert": [1, 2]}
DROPLESS = {"capacity_factor": None, "eval_capacity_factor": None}


def both_ways(kind):
    """Parameters by the spec and in place, gradients, layer numbers, tracker."""
    from megatron.core.transformer.moe.moe_utils import clear_aux_losses_tracker, get_moe_layer_wise_logging_tracker
    from tiny_gpt import MOE, start
    from tiny_kinds import BUILD, run

    from fmoe import random
    from megatron_patch import MegatronMoE, fmoe_layer_spec, fmoefy

    start()
    options = dict(MOE)
    count = options.pop("num_experts")
    found = []
    for model in (
        BUILD[kind](lambda spec, **where: fmoe_layer_spec(spec, num_experts=count, **options, **where)),
        fmoefy(BUILD[kind](), count, **options),
    ):
        layers = [module for module in model.modules() if isinstance(module, MegatronMoE)]
        clear_aux_losses_tracker()
        random.set_position(seed=1, step=0)
        run(model, labels=True).mean().backward()
        tracked = get_moe_layer_wise_logging_tracker()["load_balancing_loss"]["values"].clone()
        experts = [config.num_moe_experts for config in (model.config, getattr(model, "encoder_config", model.config))]
        # Both ways draw the dense part from torch's generator, which the MLPs of the second have used too.
        moe = {name: p for name, p in model.named_parameters() if ".mlp." in name}
        found.append(
            {
                "numbers": [layer.layer_number for layer in layers],
                "names": [layer.name for layer in layers],
                "parameters": {name: p.detach() for name, p in moe.items()},
                "gradients": {name: p.grad for name, p in moe.items()},
                "tracked": tracked,
                "experts": experts,
                "final norms": [name for name, _ in model.named_modules() if name.endswith("final_layernorm")],
            }
        )
    return found


@pytest.mark.parametrize("kind", NUMBERS)
def test_the_two_ways_in_give_the_same_experts(forks, kind):
    spec, patched = only(forks.run(1, both_ways, kind))
    for found in (spec, patched):
        assert found["numbers"] == NUMBERS[kind]
        assert len(set(found["names"])) == len(NUMBERS[kind])
        assert found["tracked"].shape == (len(NUMBERS[kind]),) and (found["tracked"] > 0).all(), "a slot a layer"
        assert set(found["experts"]) == {4}
        assert len(found["final norms"]) == (2 if kind == "t5" else 1)
        assert all(gradient.abs().sum() > 0 for gradient in found["gradients"].values())
    assert set(spec["parameters"]) == set(patched["parameters"])
    for name, value in spec["parameters"].items():
        assert torch.equal(value, patched["parameters"][name]), name
    gates = [value for name, value in patched["parameters"].items() if name.endswith("gate.weight")]
    assert len(gates) == len(NUMBERS[kind])
    assert all(not torch.equal(a, b) for i, a in enumerate(gates) for b in gates[:i]), "layers share their weights"


def upcycled(kind, options):
    from tiny_gpt import EXPERTS, start
    from tiny_kinds import BUILD, run

    import fmoe
    from fmoe.parallel import is_expert
    from megatron_patch import MegatronMoE

    start(options.pop("expert_parallel", 1))
    model = BUILD[kind](add_bias_linear=True)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            if ".mlp." in name:
                parameter.normal_(std=0.2)
    before = run(model.eval()).detach()
    fmoe.fmoefy(model.train(), EXPERTS, **options)
    layers = [module.layer_number for module in model.modules() if isinstance(module, MegatronMoE)]
    marked = [p.allreduce is False for p in model.parameters() if is_expert(p)]
    after = []
    for training in (True, False):
        fmoe.random.set_position(seed=1, step=0)
        after.append(run(model.train(training)).detach())
    return before, after, layers, bool(marked) and all(marked)


UPCYCLED = {  # options, and the numbers of the layers that become experts
    "all": ({"top_k": 2}, NUMBERS | {"vit": [1, 2]}),
    "every second": ({"layers": 2, "granularity": 2}, {"t5": [2, 4], "bert": [2], "vit": [2]}),
    "switch": ({"layers": [1], "gate": "switch", "top_k": 1, "gate_options": DROPLESS}, {"t5": [1], "bert": [1]}),
    "expert parallel": ({"expert_parallel": 2, "top_k": 2}, NUMBERS),
}


@pytest.mark.cover(1)
@pytest.mark.parametrize(
    ("case", "kind"), [(case, kind) for case, (_, numbers) in UPCYCLED.items() for kind in numbers]
)
def test_output_is_unchanged(forks, kind, case):
    options, numbers = UPCYCLED[case]
    ranks = values(forks.run(options.get("expert_parallel", 1), upcycled, kind, options))
    for before, after, layers, is_marked in ranks:
        assert layers == numbers[kind] and is_marked
        for output in after:
            assert_close(output, before, 1e-5, "output")


def refused(kind, options):
    from tiny_gpt import start
    from tiny_kinds import BUILD

    from megatron_patch import fmoefy

    start()
    model = BUILD[kind]()
    try:
        fmoefy(model, 4, **options)
    finally:
        assert not any("gate" in name for name, _ in model.named_parameters())


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("t5", {"layers": [6]}, "layers=[6] must be one or more layer numbers from 1 to 5"),
        ("bert", {"layers": [3]}, "layers=[3] must be one or more layer numbers from 1 to 2"),
        ("t5", {"layers": [5], "upcycle": True, "d_hidden": 7}, "d_hidden"),
    ],
    ids=str,
)
def test_what_cannot_be(forks, kind, options, says):
    assert says in refusal(forks.run(1, refused, kind, options))


def attended(kind):
    """Outputs and gradients of megatron-core's attention with its masks, and of the fused one without."""
    from tiny_gpt import start
    from tiny_kinds import BUILD, run

    from megatron_patch.attention import SDPAttention
    from pretrain.models.bert import UnpaddedBert

    start()
    model = BUILD[kind]().eval()
    found = []
    for fused in (False, True):
        if fused:
            for module in model.modules():
                for name in ("self_attention", "cross_attention"):
                    attention = getattr(module, name, None)
                    if hasattr(attention, "core_attention"):
                        attention.core_attention.__class__ = SDPAttention
            if kind == "bert":
                model.__class__ = UnpaddedBert
        model.zero_grad()
        losses = run(model, labels=True, masks=not fused)
        losses.mean().backward()
        found.append({"losses": losses.detach()} | {n: p.grad.clone() for n, p in model.named_parameters()})
    return found


@pytest.mark.parametrize("kind", NUMBERS)
def test_fused_attention_without_masks_is_that_with_them(forks, kind):
    dense, fused = only(forks.run(1, attended, kind))
    for name, expected in dense.items():
        assert relative_error(fused[name], expected) <= 1e-5, name
