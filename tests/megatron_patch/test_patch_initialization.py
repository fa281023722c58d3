"""Layers that are made without a dense block, where experts will be, have the weights that they have with one."""

import torch
from forks import only


def both_ways():
    """Weights of a GPT with experts in layer 2, whose dense block was there before or not; names of both before."""
    import tiny_gpt
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec

    import megatron_patch
    from megatron_patch.initialization import keyed_layer_spec

    tiny_gpt.start()
    found = []
    for without_mlp in ((), (2,)):
        spec = keyed_layer_spec(get_gpt_layer_local_spec(), 7, without_mlp=without_mlp)
        model = tiny_gpt.tiny_gpt(spec)
        before = set(model.state_dict())
        megatron_patch.fmoefy(model, layers=[2], **tiny_gpt.MOE)
        found.append((before, {name: p.detach() for name, p in model.named_parameters()}))
    return found


def test_weights_are_the_same(forks):
    (dense, expected), (without, found) = only(forks.run(1, both_ways))
    assert without < dense
    assert all(name.startswith("decoder.layers.1.mlp.") for name in dense - without)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def hidden_width_that_ranks_do_not_divide():
    """Parameters of a rank of two, where experts are everywhere and whole."""
    import torch.distributed as dist

    from pretrain.config import ModelConfig, MoEConfig, ParallelConfig, Recipe
    from pretrain.engine.meta import build_rank_on_meta

    dist.destroy_process_group()
    model = ModelConfig(num_layers=2, ffn_hidden_size=255, moe=MoEConfig(num_experts=2))
    recipe = Recipe(model=model, parallel=ParallelConfig(tensor=2))
    recipe.check()
    (chunk,) = build_rank_on_meta(recipe, 1)
    return [tuple(p.shape) for name, p in chunk.named_parameters() if "mlp.experts" in name]


def test_experts_may_be_of_a_width_that_tensor_parallel_ranks_do_not_divide(forks):
    assert only(forks.run(1, hidden_width_that_ranks_do_not_divide)) == [(2, 255, 192), (2, 192, 255)] * 2
