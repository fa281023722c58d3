"""FastMoE's `fmoe.megatron.fmoefy` on megatron-core models."""

from forks import only, values

# Functions run in processes of the `forks` fixture, where megatron-core is imported already.


def core_model():
    from fmoe.megatron import fmoefy
    from tiny_gpt import batch, start, tiny_gpt

    from fmoe.gates import GShardGate

    start()
    model = fmoefy(tiny_gpt(), fmoe_num_experts=4, gate=GShardGate, hidden_hidden_size=12)
    tokens, positions, labels = batch()
    model(tokens, positions, None, labels=labels).mean().backward()
    mlp = model.decoder.layers[1].mlp
    return type(mlp).__name__, type(mlp.gate).__name__, mlp.num_experts, mlp.experts.d_hidden


def test_the_readmes_line_on_a_megatron_core_model(forks):
    assert only(forks.run(1, core_model)) == ("MegatronMoE", "GShardRouter", 4, 12)


def core_model_on_two():
    from fmoe.megatron import fmoefy
    from tiny_gpt import start, tiny_gpt

    start(expert_parallel=2)
    mlp = fmoefy(tiny_gpt(), fmoe_num_experts=2).decoder.layers[0].mlp
    return mlp.num_experts, mlp.num_local_experts


def test_experts_are_those_of_a_worker_there_too(forks):
    assert values(forks.run(2, core_model_on_two)) == [(4, 2)] * 2
