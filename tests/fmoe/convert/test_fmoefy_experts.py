"""`fmoe.fmoefy` on models that have experts already: same output, same gradients, same saved model."""

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_all_close, assert_close, relative_error
from forks import values
from torch import nn
from torch.nn import functional as F

import fmoe
from bench.studies.experts import MODELS, compared, gradients_of, inputs_of, spread, tiny
from fmoe import parallel
from fmoe.cli import main
from fmoe.convert import ExpertBlock, Form, RoutedMoE, find_blocks, find_experts
from fmoe.convert.families import FAMILIES
from fmoe.runtime import versions

pytest.importorskip("transformers")

EXACT = 1e-10
QUICK = [*MODELS][:12]  # the families of `fmoe import`
families = pytest.mark.parametrize("family", MODELS)
some_families = pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss", "SwitchTransformers"])


def routed(model):
    return [layer for layer in model.modules() if isinstance(layer, RoutedMoE)]


@pytest.mark.by_default(*QUICK)
@families
def test_output_gradients_and_saved_model_are_those_of_transformers(family):
    row = compared(family)
    assert row["output"] < EXACT and row["gradients"] < EXACT, row
    assert row["is_same_when_loaded"]


@some_families
def test_the_model_keeps_router_parameters_mode_and_state(family):
    theirs = tiny(family, torch.float32)
    theirs.requires_grad_(False).eval()
    state = {name: value.clone() for name, value in theirs.state_dict().items()}
    found = find_experts(theirs)
    old = {id(p) for f in found for p in f.block.tensors.values()}
    others = {id(m) for m in theirs.modules()} - {id(m) for f in found for m in f.block.module.modules()}
    model = fmoe.fmoefy(theirs)
    layers = routed(model)
    assert model is theirs and len(layers) == len(found)
    assert others <= {id(m) for m in model.modules()}
    for layer in layers:
        assert not layer.training and not any(p.requires_grad for p in layer.parameters())
        shares = {id(p) for p in layer.parameters()} <= old
        assert shares == (family == "Qwen3Moe")
        assert all(p.allreduce is False and p.is_stacked for p in layer.parameters())
    assert model.state_dict().keys() == state.keys()
    for other in (model, copy.deepcopy(model)):
        with torch.no_grad():
            for parameter in other.parameters():
                parameter.zero_()
        other.load_state_dict(state)
        assert all(torch.equal(value, state[name]) for name, value in other.state_dict().items())
    with pytest.raises(RuntimeError, match=r"experts"):
        model.load_state_dict({name: value for name, value in state.items() if ".experts." not in name})


@some_families
def test_bfloat16(family):
    expected = tiny(family, torch.bfloat16).train()
    exact = tiny(family, torch.float32).train()
    exact.load_state_dict(expected.state_dict())
    model = fmoe.fmoefy(copy.deepcopy(expected))
    inputs = inputs_of(model)
    names, results = [], []
    for each in (exact, model, expected):
        output = each(**inputs)
        output.loss.backward()
        gradients = gradients_of(each)
        names = sorted(gradients) if each is exact else names  # in Switch, not the experts without tokens
        results.append((output.logits, torch.cat([gradients[name].flatten() for name in names])))
    for right, actual, rounded in zip(*results, strict=True):
        assert actual.dtype == rounded.dtype
        assert relative_error(actual, right) < 1.2 * relative_error(rounded, right)


@pytest.mark.parametrize("implementation", ["eager", "grouped_mm", "batched_mm"])
def test_generation_checkpointing_and_statistics(implementation):
    theirs = tiny("Qwen3Moe", torch.float32)
    theirs.set_experts_implementation(implementation)
    model = fmoe.fmoefy(copy.deepcopy(theirs))
    inputs = inputs_of(model)
    prompt = inputs["input_ids"][:, :4]
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    assert torch.equal(model.eval().generate(prompt, **options), theirs.eval().generate(prompt, **options))
    expected = theirs.train()(**inputs)
    expected.loss.backward()
    model.train().gradient_checkpointing_enable()
    actual = model(**inputs, use_cache=False)
    actual.loss.backward()
    assert_close(actual.aux_loss, expected.aux_loss, 1e-6, "auxiliary loss")
    assert_close(actual.logits, expected.logits, 1e-5, "logits")
    assert_all_close(gradients_of(model), gradients_of(theirs), 1e-4)
    (report,) = fmoe.metrics(model).values()
    assert report.tokens == 20 and report.drop_rate == 0 and report.losses == {}
    chosen = expected.router_logits[-1].topk(2).indices
    assert report.load == [int((chosen == e).sum()) / chosen.numel() for e in range(4)]


def test_experts_without_a_place_are_left_out():
    """As in transformers' expert parallelism, the id E stands for no expert."""
    model = fmoe.fmoefy(tiny("Mixtral"))
    layer = routed(model)[0].eval()
    x = torch.randn(5, 32, dtype=torch.float64)
    index = torch.tensor([[0, 4], [4, 4], [2, 1], [4, 3], [3, 0]])
    weight = torch.rand(5, 2, dtype=torch.float64)
    cut = weight.masked_fill(index == 4, 0)
    assert_close(layer(x, index, weight), layer(x, index.clamp(max=3), cut), EXACT, "output")
    assert not layer(x, index, weight)[1].any()
    with pytest.raises(fmoe.UserError, match=r"expert 5.*num_experts=4"):
        layer(x, index + 1, weight)


class Plain(nn.Module):
    """Experts of another interface: separate matrices, two of them for gate and value, and a router inside."""

    def __init__(self):
        super().__init__()
        self.router = nn.Linear(6, 4)
        self.w1 = nn.Parameter(torch.randn(4, 8, 6))
        self.w2 = nn.Parameter(torch.randn(4, 6, 8))
        self.w3 = nn.Parameter(torch.randn(4, 8, 6))
        self.compute = self.loop

    def loop(self, x, index, weight):
        y = torch.zeros_like(x)
        for e in range(4):
            token, k = torch.where(index == e)
            hidden = F.silu(x[token] @ self.w1[e].T) * (x[token] @ self.w3[e].T)
            y = y.index_add(0, token, hidden @ self.w2[e].T * weight[token, k, None])
        return y

    def forward(self, x):
        weight, index = self.router(x).softmax(-1).topk(2)
        return self.compute(x, index, weight)


def test_a_registered_family():
    def find(module):
        if not isinstance(module, Plain):
            return []
        form = Form({"weight_in": ("w1", "w3"), "weight_out": ("w2",)})

        def install(layer):
            module.compute = layer
            del module.w1, module.w2, module.w3

        return [ExpertBlock(module, form, 4, install=install)]

    theirs = nn.Sequential(Plain(), nn.Linear(6, 6), Plain()).double()
    model = copy.deepcopy(theirs)
    for module in (model[0], model[2]):
        module.compute = module.loop
    fmoe.register_family("plain", find)
    try:
        fmoe.fmoefy(model, layers=[1])
    finally:
        del FAMILIES["plain"]
    assert isinstance(model[2].compute, RoutedMoE) and not isinstance(model[0].compute, RoutedMoE)
    x = torch.randn(7, 6, dtype=torch.float64)
    assert_close(model(x), theirs(x), EXACT, "output")
    assert model.state_dict().keys() - theirs.state_dict().keys() == {f"2.compute.w{i}" for i in (1, 2, 3)}


def with_buffer(model):
    model.model.layers[0].mlp.experts.register_buffer("gate_up_proj_scale", torch.ones(4))


def in_int8(model):
    experts = model.model.layers[0].mlp.experts
    experts.down_proj = nn.Parameter(experts.down_proj.to(torch.int8), requires_grad=False)


def tied(model):
    model.model.layers[1].mlp.experts = model.model.layers[0].mlp.experts


def listed(model):
    model.model.layers[0].mlp.experts = nn.ModuleList(nn.Linear(32, 32) for _ in range(4))


class Doubled(nn.Module):
    """The interface, but not the computation, of experts."""

    def __init__(self, experts):
        super().__init__()
        self.gate_up_proj = experts.gate_up_proj
        self.down_proj = experts.down_proj

    def forward(self, x, index, weight):
        return 2 * x


def doubled(model):
    model.model.layers[0].mlp.experts = Doubled(model.model.layers[0].mlp.experts)


@pytest.mark.parametrize(
    ("change", "options", "says"),
    [
        (with_buffer, {}, "mlp.experts.*gate_up_proj_scale"),
        (in_int8, {}, "mlp.experts.*down_proj of Parameter torch.int8"),
        (tied, {}, "mlp.experts.gate_up_proj is shared"),
        (listed, {}, "mlp.experts.*ModuleList"),
        (doubled, {}, "mlp.experts.*something else"),
        (None, {"granularity": 2}, "granularity=2"),
        (None, {"upcycle": False}, "upcycle=False"),
        (None, {"gate": "switch"}, "gate='switch'"),
        (None, {"top_k": 1}, "top_k=1"),
        (None, {"loss_weights": {"balance": 1.0}}, "loss_weights="),
        (None, {"layers": [2]}, r"layers=\[2\]"),
        (None, {"backend": "fast"}, "backend='fast'"),
        (None, {"exchange": "mail"}, "exchange='mail'"),
    ],
)
def test_bad_input_leaves_the_model_unchanged(change, options, says):
    model = tiny("Qwen2Moe", torch.float32)
    if change is not None:
        change(model)
    modules = list(model.modules())
    with pytest.raises(fmoe.UserError, match=says) as raised:
        fmoe.fmoefy(model, **options)
    assert "\n" not in str(raised.value)
    assert list(model.modules()) == modules


def test_a_model_that_needs_a_newer_transformers(monkeypatch):
    model = tiny("Qwen2Moe")
    model.config.model_type = "granitemoe"
    monkeypatch.setattr(versions, "version", lambda package: "5.12.1")
    with pytest.raises(fmoe.UserError, match=r"Qwen2MoeForCausalLM.*transformers>=5\.13"):
        fmoe.fmoefy(model)
    monkeypatch.setattr(versions, "version", lambda package: "5.13.0")
    fmoe.fmoefy(model)


def test_models_without_experts_need_num_experts():
    with pytest.raises(fmoe.UserError, match="num_experts is missing"):
        fmoe.fmoefy(nn.Sequential(nn.Linear(2, 4), nn.ReLU(), nn.Linear(4, 2)))


def test_dense_blocks_stay_and_experts_stay_unless_asked():
    model = fmoe.fmoefy(tiny("DeepseekV3", torch.float32))
    assert len(routed(model)) == 1 and len(find_blocks(model)) > 0
    model = tiny("DeepseekV3", torch.float32)
    fmoe.fmoefy(model, num_experts=2, layers=[0])
    assert not routed(model) and len(find_experts(model)) == 1


def test_info_tells_the_experts_of_a_folder_without_weights(tmp_path, capsys):
    model = tiny("Qwen3Moe")
    model.config.architectures = ["Qwen3MoeForCausalLM"]
    model.config.save_pretrained(tmp_path)
    assert main(["info", str(tmp_path)]) == 0
    assert capsys.readouterr().out == "Qwen3MoeForCausalLM: 1 layer of 4 experts (Qwen3MoeExperts, top 2)\n"
    wrong = str(tmp_path / "nowhere")
    with pytest.raises(SystemExit) as end:
        main(["info", wrong])
    error = capsys.readouterr().err
    assert end.value.code == 2 and f"MODEL={wrong!r}" in error and error.count("\n") == 1


def whole(state):
    full = {name: value.full_tensor() if hasattr(value, "full_tensor") else value for name, value in state.items()}
    return {name: value.clone() for name, value in full.items()}


def on_a_rank(family, folder):
    row = spread(family, f"{folder}/saved")
    assert max(row["output"], row["gradients"]) < EXACT and row["is_same_when_loaded"], row
    groups = parallel.init(ep=dist.get_world_size())
    theirs = tiny(family)
    expected = theirs.state_dict()
    experts = sum(p.numel() for found in find_experts(theirs) for p in found.block.tensors.values())
    model = fmoe.fmoefy(copy.deepcopy(theirs), moe_group=groups.moe_group)
    assert sum(p.numel() for layer in routed(model) for p in layer.parameters()) * groups.ep == experts
    state = whole(parallel.state_dict(model, groups))
    assert all(torch.equal(value, expected[name]) for name, value in state.items())
    loads = (lambda: parallel.load_state_dict(model, state, groups), lambda: parallel.load_hf(model, f"{folder}/saved"))
    for load in loads:
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.zero_()
        load()
        again = whole(parallel.state_dict(model, groups))
        assert all(torch.equal(value, state[name]) for name, value in again.items())
    return set(state)


@pytest.mark.by_default("Qwen3Moe", "GptOss")
@families
def test_two_ranks_equal_one_process(family, two_ranks, tmp_path):
    keys = values(two_ranks.run(on_a_rank, family, str(tmp_path)))
    assert set().union(*keys) == set(tiny(family).state_dict())  # in Switch, each rank has its own


@pytest.mark.slow
@families
def test_four_ranks_equal_one_process(family, four_ranks, tmp_path):
    keys = values(four_ranks.run(on_a_rank, family, str(tmp_path)))
    assert set().union(*keys) == set(tiny(family).state_dict())


def loaded_on_a_rank(wrapper, family):
    groups = parallel.init(ep=2)
    model = fmoe.fmoefy(tiny(family).train(), moe_group=groups.moe_group)
    model = getattr(parallel, wrapper)(model, groups)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    state = whole(parallel.state_dict(model, groups))
    moments = parallel.optimizer_state_dict(model, optimizer, groups)["state"]
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    parallel.load_state_dict(model, state, groups)
    expected = tiny(family).state_dict()
    assert all(torch.equal(state[name], value) for name, value in expected.items())
    assert all(torch.equal(value, state[name]) for name, value in whole(parallel.state_dict(model, groups)).items())
    assert len(moments) == len(list(model.parameters()))


@pytest.mark.parametrize("wrapper", ["DistributedDataParallel", "fully_shard"])
@pytest.mark.by_default(1, 2)
@pytest.mark.parametrize("family", ["Qwen3Moe", "GptOss"])
def test_wrapped_models_save_and_load_under_the_names_of_transformers(family, wrapper, two_ranks):
    values(two_ranks.run(loaded_on_a_rank, wrapper, family))


def refused_on_a_rank():
    groups = parallel.init(ep=2)
    model = tiny("Mixtral", num_local_experts=3)
    modules = list(model.modules())
    with pytest.raises(fmoe.UserError, match=r"num_experts=3.*2 ranks"):
        fmoe.fmoefy(model, moe_group=groups.moe_group)
    assert list(model.modules()) == modules
    return True


def test_ranks_that_do_not_divide_the_experts(two_ranks):
    assert values(two_ranks.run(refused_on_a_rank)) == [True, True]
