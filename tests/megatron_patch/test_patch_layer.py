"""FMoE in a Megatron-core GPT: both ways in, what it takes from the config, masks, recomputation, checkpoints."""

import pytest
import torch
import torch.nn.functional as F
from forks import only, refusal, values

# Functions run in processes of the `forks` fixture, where megatron-core is imported already.


def both_ways():
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from tiny_gpt import MOE, batch, start, tiny_gpt

    import fmoe
    import megatron_patch

    start()
    spec = get_gpt_layer_local_spec()
    untouched = repr(spec)  # from megatron-core 0.18 on, specs have partial functions, which no copy equals
    models = {
        "spec": tiny_gpt(megatron_patch.fmoe_layer_spec(spec, **MOE)),
        "in place": megatron_patch.fmoefy(tiny_gpt(), **MOE),
        "entry point": fmoe.fmoefy(tiny_gpt(), upcycle=False, **MOE),
    }
    assert repr(spec) == untouched, "the base spec was changed"
    # Attention and embedding come from torch's default generator, from which a dense MLP draws too: take one model's.
    dense = {k: v for k, v in models["in place"].state_dict().items() if ".experts." not in k and ".gate." not in k}
    models["spec"].load_state_dict(dense, strict=False)
    seen = {}
    for name, model in models.items():
        fmoe.random.set_position(seed=1, step=2)
        tokens, positions, labels = batch()
        loss = model(tokens, positions, None, labels=labels).mean()
        loss.backward()
        seen[name] = {
            "loss": loss.item(),
            "class": type(model.decoder.layers[0].mlp).__name__,
            **{f"weight of {k}": v.clone() for k, v in model.named_parameters()},
            **{f"gradient of {k}": v.grad for k, v in model.named_parameters()},
        }
    return seen


def test_spec_in_place_and_entry_point_give_the_same_model_bit_for_bit(forks):
    seen = only(forks.run(1, both_ways))
    expected = seen.pop("in place")
    assert expected["class"] == "MegatronMoE"
    assert any(".experts.weight_in" in name for name in expected)
    for way, found in seen.items():
        assert found.keys() == expected.keys(), way
        for name, value in found.items():
            same = torch.equal(value, expected[name]) if torch.is_tensor(value) else value == expected[name]
            assert same, f"{way}: {name}"


def from_a_partial():
    from functools import partial

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec, get_gpt_layer_local_spec
    from tiny_gpt import MOE, start, tiny_config

    import fmoe
    import megatron_patch

    start()
    spec = get_gpt_layer_local_spec()
    base = partial(spec.module, submodules=spec.submodules)
    untouched = repr(base)
    layer = megatron_patch.fmoe_layer_spec(base, **MOE)(config=tiny_config(), layer_number=2)
    for other in (get_gpt_decoder_block_spec(tiny_config(), use_transformer_engine=False), partial(spec.module)):
        with pytest.raises(fmoe.UserError, match=f"base_spec must be .* {type(other).__name__}"):
            megatron_patch.fmoe_layer_spec(other, **MOE)
    return type(layer.mlp).__name__, layer.mlp.layer_number, repr(base) == untouched


def test_a_layer_spec_may_be_a_partial(forks):
    assert only(forks.run(1, from_a_partial)) == ("MegatronMoE", 2, True)


def one_layer():
    from tiny_gpt import MOE, start, tiny_gpt

    from megatron_patch import MegatronMoE, fmoefy

    start()
    gpt = tiny_gpt()
    before = dict(gpt.named_parameters())
    assert fmoefy(gpt, layers=[2], **MOE) is gpt
    first, second = gpt.decoder.layers
    assert not isinstance(first.mlp, MegatronMoE)
    assert isinstance(second.mlp, MegatronMoE)
    assert second.mlp.layer_number == 2
    for name, parameter in gpt.named_parameters():
        if not name.startswith("decoder.layers.1.mlp."):
            assert parameter is before[name], name
    whole = fmoefy(tiny_gpt(), **MOE)
    for a, b in zip(second.mlp.parameters(), whole.decoder.layers[1].mlp.parameters(), strict=True):
        assert torch.equal(a, b), "a layer's experts depend on which other layers have some"
    assert not torch.equal(whole.decoder.layers[0].mlp.gate.weight, whole.decoder.layers[1].mlp.gate.weight)


def test_a_subset_of_layers(forks):
    only(forks.run(1, one_layer))


def convert_wrapped(model, layers, options):
    """Convert a model that is not supported, or has other layers; it must be left as it is."""
    from megatron.core.distributed import DistributedDataParallel, DistributedDataParallelConfig
    from megatron.core.transformer.module import Float16Module
    from tiny_gpt import EXPERTS, start, tiny_gpt

    import fmoe

    start()
    gpt = tiny_gpt(**options)
    dense = [layer.mlp for layer in gpt.decoder.layers]
    wrapped = {
        "gpt": lambda: gpt,
        "linear": lambda: torch.nn.Linear(2, 2),
        "ddp": lambda: DistributedDataParallel(gpt.config, DistributedDataParallelConfig(), gpt),
        "float16": lambda: Float16Module(gpt.config, gpt),
    }[model]()
    try:
        fmoe.fmoefy(wrapped, num_experts=EXPERTS, layers=layers)
    finally:
        assert [layer.mlp for layer in gpt.decoder.layers] == dense


@pytest.mark.parametrize(
    ("model", "layers", "options", "parts"),
    [
        ("ddp", [1], {}, ["DistributedDataParallel", "before"]),
        ("float16", [1], {"bf16": True, "params_dtype": torch.bfloat16}, ["Float16Module", "before"]),
        ("linear", "all", {}, ["Linear"]),
        ("gpt", [1, 3], {}, ["layers=[1, 3]", "1 to 2"]),
        ("gpt", [1, 0], {}, ["layers=[0, 1]", "1 to 2"]),
    ],
    ids=["ddp", "float16", "linear", "layer 3", "layer 0"],
)
def test_wrong_models_are_refused(forks, model, layers, options, parts):
    message = refusal(forks.run(1, convert_wrapped, model, layers, options))
    assert all(part in message for part in parts), message


def another_tensor_parallel_size():
    from tiny_gpt import start, tiny_config

    from megatron_patch import MegatronMoE

    start()
    MegatronMoE(tiny_config(tensor_model_parallel_size=2), num_experts=4)


def test_the_config_has_the_sizes_of_the_groups(forks):
    assert "tensor_model_parallel_size=2" in refusal(forks.run(1, another_tensor_parallel_size))


def numbered():
    from tiny_gpt import MOE, start, tiny_config

    from megatron_patch import MegatronMoE

    start()

    def layer(number, **options):
        built = MegatronMoE(tiny_config(), layer_number=number, **MOE | options)
        return built, [p.detach().clone() for p in built.parameters()]

    second, weights = layer(None)
    second.set_layer_number(2)
    assert second.layer_number == 2
    for number, same in ((2, True), (1, False)):
        _, expected = layer(number)
        assert all(torch.equal(a, b) for a, b in zip(second.parameters(), expected, strict=True)) is same
    assert not torch.equal(weights[0], next(second.parameters()))
    with torch.no_grad():
        second.gate.weight.fill_(0.5)
    second.set_layer_number(2)
    assert (second.gate.weight == 0.5).all(), "the same number drew the weights again"
    _, other_run = layer(2, seed=6)
    assert not any(torch.equal(a, b) for a, b in zip(layer(2)[1], other_run, strict=True) if a.any())


def test_the_layer_number_is_a_key_of_weights(forks):
    only(forks.run(1, numbered))


def as_dense(activation, gated, bias):
    """One expert that gets every token with weight one is the MLP with the same weights."""
    from tiny_gpt import LENGTH, WIDTH, start, tiny_gpt

    from megatron_patch import fmoefy

    start()
    functions = {"gelu": F.gelu, "silu": F.silu, "relu": F.relu}
    options = {"activation_func": functions[activation], "gated_linear_unit": gated, "add_bias_linear": bias}
    mlp = tiny_gpt(**options).decoder.layers[0].mlp
    gpt = fmoefy(tiny_gpt(**options), num_experts=1, top_k=1)
    fmoe_layer = gpt.decoder.layers[0].mlp
    experts = fmoe_layer.experts
    pairs = [(experts.weight_in, mlp.linear_fc1.weight), (experts.weight_out, mlp.linear_fc2.weight)]
    if bias:
        pairs += [(experts.bias_in, mlp.linear_fc1.bias), (experts.bias_out, mlp.linear_fc2.bias)]
    assert len(list(experts.parameters())) == len(pairs)
    torch.manual_seed(2)
    with torch.no_grad():
        for ours, theirs in pairs:
            ours[0].copy_(theirs.normal_(std=0.3))
    x = torch.randn(LENGTH, 3, WIDTH)
    expected, expected_bias = mlp(x)
    output, none = fmoe_layer(x)
    assert none is None
    return output, expected + expected_bias if bias else expected


@pytest.mark.cover(2)
@pytest.mark.parametrize("bias", [False, True], ids=["nobias", "bias"])
@pytest.mark.parametrize(("activation", "gated"), [("gelu", False), ("silu", True), ("gelu", True), ("relu", False)])
def test_activation_gating_and_bias_are_those_of_the_config(forks, activation, gated, bias):
    output, expected = only(forks.run(1, as_dense, activation, gated, bias))
    assert torch.allclose(output, expected, rtol=1e-5, atol=1e-5)
    assert expected.norm() > 1


def initial_weights():
    from tiny_gpt import LAYERS, start, tiny_gpt

    from megatron_patch import fmoefy

    start()
    gpt = fmoefy(tiny_gpt(init_method_std=0.5, num_moe_experts=2, moe_ffn_hidden_size=200), num_experts=2)
    experts = gpt.decoder.layers[0].mlp.experts
    return experts.weight_in.shape, experts.weight_in.std(), experts.weight_out.std() * (2 * LAYERS) ** 0.5


def test_initial_weights_and_width_are_those_of_the_config(forks):
    shape, std_in, std_out = only(forks.run(1, initial_weights))
    assert shape == (2, 200, 32)
    assert std_in.item() == pytest.approx(0.5, rel=0.03)
    assert std_out.item() == pytest.approx(0.5, rel=0.03)


def padded(shared):
    from tiny_gpt import LENGTH, MOE, WIDTH, start, tiny_config

    import fmoe
    from megatron_patch import MegatronMoE

    start()
    layer = MegatronMoE(tiny_config(), layer_number=1, **MOE | {"gate": "naive", "gate_options": {}} | shared)
    torch.manual_seed(0)
    x = torch.randn(LENGTH, 2, WIDTH)
    padding = torch.zeros(2, LENGTH, dtype=torch.bool)
    padding[0, 10:] = True
    padding[1, 3:] = True
    with pytest.raises(fmoe.UserError, match="intermediate_tensors"):
        layer(x, [x])
    padded_y, _ = layer(x, padding_mask=padding)
    padded_y.sum().backward()
    tokens = fmoe.metrics(layer, reset=True)[""].tokens
    other = x.clone()
    other[padding.t()] = 1e3  # what stands in the padding must not matter
    return padded_y, layer(other, padding_mask=padding)[0], layer(x)[0], padding.t(), tokens


@pytest.mark.parametrize("shared", [{}, {"shared_expert": 8}], ids=["", "shared"])
def test_padding_is_not_routed(forks, shared):
    y, y_other, whole, padding, tokens = only(forks.run(1, padded, shared))
    assert (y[padding] == 0).all()
    assert torch.equal(y, y_other)
    assert torch.allclose(y[~padding], whole[~padding], atol=1e-6)
    assert tokens == 13


def sharded(layers):
    from megatron.core import parallel_state
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensor
    from tiny_gpt import MOE, start, tiny_gpt

    from megatron_patch import fmoefy

    start(expert_parallel=2)
    gpt = fmoefy(tiny_gpt(), layers=layers, **MOE)
    metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
    found = [t for t in nested_values(gpt.sharded_state_dict(metadata=metadata)) if isinstance(t, ShardedTensor)]
    ours = {id(p) for name, p in gpt.named_parameters() if ".experts." in name or ".gate." in name}
    assert ours <= {id(t.data) for t in found}, "a parameter is missing"
    return [
        (t.key, t.global_shape, t.global_offset, t.prepend_axis_num, tuple(t.local_shape), t.replica_id, t.data)
        for t in found
        if id(t.data) in ours
    ]


@pytest.mark.parametrize("layers", [None, [2]], ids=["all layers", "layer 2"])
def test_experts_lie_side_by_side_in_the_sharded_state_dict(forks, layers):
    """Each element is written once; layers without experts leave no hole."""
    covered = {}
    for rank, tensors in enumerate(values(forks.run(2, sharded, layers))):
        for key, shape, offset, prepended, local, replica, data in tensors:
            assert data.shape == local
            if ".gate." in key:
                assert replica[-1] == rank, "the gate is replicated: one replica is the main one"
                assert shape[prepended:] == local == (4, 32)
                continue
            assert replica == (0, 0, 0), "each expert is held once"
            assert local == (2, *shape[-2:])
            block = (1,) * prepended + local
            written = covered.setdefault(key, torch.zeros(shape, dtype=torch.int64))
            written[tuple(slice(o, o + n) for o, n in zip(offset, block, strict=True))] += 1
    stack = (2,) if layers is None else ()
    assert {key.rpartition(".")[2]: tuple(written.shape) for key, written in covered.items()} == {
        "weight_in": (*stack, 4, 24, 32),
        "weight_out": (*stack, 4, 32, 24),
    }
    assert all((written == 1).all() for written in covered.values())


def overlapped():
    """What happened in which order with ``overlap_shared``, and the largest difference to the layer without, in the
    output and the input's gradient. Stand-ins for a GPU's tensors and streams keep the record."""
    import contextlib
    from types import SimpleNamespace

    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from tiny_gpt import MOE, start, tiny_gpt

    import fmoe
    from megatron_patch import fmoe_layer_spec, layer

    events = []

    class OnGpu(torch.Tensor):
        is_cuda = True

        def record_stream(self, stream):
            events.append(f"memory for {stream.name}")

    class Stream:
        def __init__(self, name):
            self.name = name

        def wait_stream(self, other):
            events.append(f"{self.name} waits for {other.name}")

    start()  # has stand-ins of its own
    first = Stream("first")
    second = Stream("second")
    layer._second_stream = lambda device: second
    torch.cuda.current_stream = lambda: first

    @contextlib.contextmanager
    def inside(stream):
        events.append(f"into {stream.name}")
        yield
        events.append(f"out of {stream.name}")

    torch.cuda.stream = inside
    found = []
    for overlap in (False, True):
        spec = fmoe_layer_spec(
            get_gpt_layer_local_spec(), **MOE, shared_expert=16, shared_gate=True, overlap_shared=overlap
        )
        moe = tiny_gpt(spec).decoder.layers[0].mlp
        if overlap:
            call = moe.call
            moe.call = lambda tokens: call(SimpleNamespace(x_TD=tokens.x_TD.as_subclass(OnGpu)))  # noqa: B023
            moe.shared.register_forward_hook(lambda *_: events.append("shared expert"))
            moe.experts.register_forward_hook(lambda *_: events.append("routed experts"))
        fmoe.random.set_position(seed=1, step=2)
        x = torch.randn(8, 2, moe.layout.d_model, generator=torch.Generator().manual_seed(0)).requires_grad_()
        out, _ = moe(x)
        out.square().sum().backward()
        found.append((out.detach().as_subclass(torch.Tensor), x.grad))
    assert moe._shared_output is None
    return events, max(float((a - b).abs().max()) for a, b in zip(*found, strict=True))


def test_the_shared_expert_overlaps_with_the_rest(forks):
    events, difference = only(forks.run(1, overlapped))
    assert difference < 1e-6
    assert events == [
        "second waits for first",
        "into second",
        "shared expert",
        "out of second",
        "memory for second",
        "routed experts",
        "first waits for second",
        "memory for first",
    ]
