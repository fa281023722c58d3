"""LoRA of PEFT on stacked experts and routers: the same losses and gradients as with the adapted weights themselves."""

import copy

import pytest
import torch
import torch.distributed as dist
from compare import assert_close, relative_error
from forks import values

import fmoe
from fmoe import parallel

peft = pytest.importorskip("peft", reason="peft is not installed")
pytest.importorskip("transformers", reason="transformers is not installed")

EXPERTS, RANK, STEPS = 4, 3, 4
STACKS = ["experts.weight_in", "experts.weight_out"]


def build(noise=0.2, **options):
    import transformers

    torch.manual_seed(0)
    sizes = {"vocab_size": 48, "hidden_size": 16, "intermediate_size": 24, "max_position_embeddings": 16}
    config = transformers.LlamaConfig(num_hidden_layers=2, num_attention_heads=2, **sizes)
    model = transformers.LlamaForCausalLM(config)
    return fmoe.fmoefy(model, num_experts=EXPERTS, top_k=2, seed=1, noise=noise, **options)


def adapt(model, targets=STACKS, **options):
    torch.manual_seed(2)
    options = {"target_modules": [], "lora_alpha": 2 * RANK, **options}
    return peft.get_peft_model(model, peft.LoraConfig(r=RANK, target_parameters=targets, **options))


def tokens(batch=4):
    return torch.randint(48, (batch, 12), generator=torch.Generator().manual_seed(3))


def loss_of(model, x=None):
    x = tokens() if x is None else x
    return model(input_ids=x, labels=x).loss


def logits_of(model):
    with torch.no_grad():
        return model.eval()(input_ids=tokens()).logits


def trained(model):
    return {name: p for name, p in model.named_parameters() if p.requires_grad}


def train(model, lr=2e-2):
    optimizer = torch.optim.AdamW(trained(model).values(), lr=lr)
    losses = []
    for _ in range(STEPS):
        loss = loss_of(model.train())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("backend", ["auto", "torch"])
def test_gradients_are_those_of_the_adapted_weights(backend):
    model = adapt(build(expert_options={"backend": backend}), init_lora_weights=False)
    adapters = trained(model)
    loss = loss_of(model.train())
    found = torch.autograd.grad(loss, list(adapters.values()))

    plain = build(expert_options={"backend": "torch"}).requires_grad_(False)
    weights = dict(plain.named_parameters())
    for name, module in model.get_base_model().named_modules():
        if hasattr(module, "parameter_name"):
            name = f"{name.replace('.base_layer', '')}.{module.parameter_name}"
            weights[name] = weights[name] + module.get_delta_weight("default")
    x = tokens()
    expected_loss = torch.func.functional_call(plain.train(), weights, kwargs={"input_ids": x, "labels": x}).loss
    assert_close(loss, expected_loss, 1e-6, "loss")
    for name, ours, theirs in zip(
        adapters, found, torch.autograd.grad(expected_loss, list(adapters.values())), strict=True
    ):
        assert theirs.norm() > 0
        assert_close(ours, theirs, 1e-5, name)


# Adapted parameters, further options of the adapter, names of what is trained.
ADAPTERS = {
    "experts": (STACKS, {}, {"lora_A", "lora_B"}),
    "experts and attention": (STACKS, {"target_modules": ["q_proj"]}, {"lora_A", "lora_B"}),
    "experts and router": ([*STACKS, "gate.weight"], {}, {"lora_A", "lora_B"}),
    "whole routers": (STACKS, {"modules_to_save": ["gate"]}, {"lora_A", "lora_B", "modules_to_save"}),
}


@pytest.mark.parametrize("case", [pytest.param(case, marks=[pytest.mark.slow] * ("and" in case)) for case in ADAPTERS])
def test_trained_saved_loaded_merged(tmp_path, case):
    targets, options, kinds = ADAPTERS[case]
    before = copy.deepcopy(build().state_dict())
    model = adapt(build(), targets, **options)
    assert {kind for name in trained(model) for kind in kinds if kind in name} == kinds
    start = {name: p.detach().clone() for name, p in model.named_parameters()}
    losses = train(model)
    assert losses == sorted(losses, reverse=True)
    moved = {name for name, p in model.named_parameters() if not torch.equal(p, start[name])}
    assert moved == set(trained(model))
    assert all(r.tokens == STEPS * tokens().numel() and r.losses for r in fmoe.metrics(model).values())

    adapted = logits_of(model)
    model.save_pretrained(tmp_path)
    assert torch.equal(logits_of(peft.PeftModel.from_pretrained(build(), tmp_path)), adapted)
    merged = model.merge_and_unload()
    assert_close(logits_of(merged), adapted, 1e-6, "logits after merging")
    after = merged.state_dict()
    assert after.keys() == before.keys()
    changed = {name for name, value in after.items() if not torch.equal(value, before[name])}
    adapters = [*targets, *options.get("target_modules", []), *options.get("modules_to_save", [])]
    assert changed == {name for name in before if any(target in name for target in adapters)}
    for layer in merged.model.layers:  # marks that optimizers and wrappers read
        assert all(p.is_stacked and not p.allreduce for p in layer.mlp.experts.parameters())


def test_an_adapter_can_be_turned_off():
    plain = logits_of(build())
    model = adapt(build(), modules_to_save=["gate"])
    train(model)
    assert not torch.equal(logits_of(model), plain)
    with model.disable_adapter():
        assert_close(logits_of(model), plain, 1e-6, "logits without the adapter")
    assert_close(logits_of(copy.deepcopy(model)), logits_of(model), 0, "logits of a copy")


def test_the_state_of_a_trained_router_is_updated():
    """The copy that PEFT trains counts loads and moves its expert bias."""
    model = adapt(build(gate="sigmoid", upcycle=False, noise=0.0), modules_to_save=["gate"])
    gate = model.get_base_model().model.layers[0].mlp.gate
    loss_of(model.train()).backward()
    fmoe.end_step(model)
    assert gate.modules_to_save["default"].expert_bias_E.any() and not gate.original_module.expert_bias_E.any()


def test_noise_is_that_of_the_layer_without_an_adapter():
    """Dropout of hidden units is keyed by position."""
    losses = []
    for model in (build(), adapt(build())):
        for layer in model.modules():
            if hasattr(layer, "wants_row_keys"):
                layer.dropout = 0.3
        torch.manual_seed(len(losses))
        fmoe.random.set_position(5, 0)
        losses.append(loss_of(model.train()))
    assert_close(losses[1], losses[0], 1e-6, "loss")


class Expert(torch.nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.first, self.second = torch.nn.Linear(d_model, 12), torch.nn.Linear(12, d_model)

    def forward(self, x):
        return self.second(self.first(x).relu())


def test_experts_that_are_modules():
    model = torch.nn.Sequential(fmoe.FMoE(d_model=8, num_experts=EXPERTS, expert=Expert, gate="naive", seed=0))
    model = adapt(model, None, target_modules=["first", "second"], init_lora_weights=False)
    x = torch.randn(2, 6, 8)
    y = model(x)
    y.square().mean().backward()
    assert len(trained(model)) == 4 * EXPERTS and all(p.grad is not None for p in trained(model).values())
    assert_close(model.merge_and_unload()(x), y, 1e-6, "output after merging")


def test_other_dtypes_are_refused_as_without_an_adapter():
    layer = torch.nn.Sequential(fmoe.FMoE(d_model=8, num_experts=2, d_hidden=4, gate="naive", seed=0))
    model = adapt(layer)
    with pytest.raises(fmoe.UserError, match=r"float64.*float32"):
        model(torch.randn(1, 4, 8, dtype=torch.float64))


def own(name, whole, ep):
    """This rank's part of an adapter of all experts."""
    if ".experts." not in name:
        return whole
    rank = dist.get_rank() % ep
    shape, local = whole.shape, slice(rank * EXPERTS // ep, (rank + 1) * EXPERTS // ep)
    if "lora_A" in name:
        return whole.view(EXPERTS, RANK, shape[1])[local].reshape(-1, shape[1])
    return whole.view(shape[0], RANK, EXPERTS)[..., local].reshape(shape[0], -1)


def trained_on_ranks(wrapper, ep, options, expected):
    """Errors of the adapters after the steps of `whole`, by name, on this rank."""
    groups = parallel.init(ep=ep)
    rank, size = dist.get_rank(), dist.get_world_size()
    model = adapt(build(moe_group=groups.moe_group, **options), target_modules=["q_proj"])
    start, end = expected
    with torch.no_grad():
        for name, p in trained(model).items():
            p.copy_(own(name, start[name], ep))
    wrap = {"ddp": parallel.DistributedDataParallel, "fsdp": parallel.fully_shard, "average": lambda model, _: model}
    wrapped = wrap[wrapper](model, groups)
    optimizer = torch.optim.SGD(trained(model).values(), lr=1.0)
    for _ in range(STEPS):
        loss_of(wrapped.train(), tokens().chunk(size)[rank]).backward()
        if wrapper == "average":
            parallel.average_gradients(model, groups=groups)
        optimizer.step()
        optimizer.zero_grad()
    found = {name: p.full_tensor() if hasattr(p, "full_tensor") else p for name, p in trained(model).items()}
    return {name: relative_error(p, own(name, end[name], ep)) for name, p in found.items()}


def whole():
    """Adapters before and after some steps on one process."""
    model = adapt(build(), target_modules=["q_proj"], init_lora_weights=False)
    start = {name: p.detach().clone() for name, p in trained(model).items()}
    optimizer = torch.optim.SGD(trained(model).values(), lr=1.0)
    for _ in range(STEPS):
        loss_of(model.train()).backward()
        optimizer.step()
        optimizer.zero_grad()
    return start, {name: p.detach() for name, p in trained(model).items()}


RANKS = {
    "ep2, ddp": ("ddp", 2, {}),
    "ep2, ddp, two chunks": ("ddp", 2, {"exchange_options": {"chunks": 2}}),
    "ep2, average, few rows at once": ("average", 2, {"exchange_options": {"max_rows": 2 * EXPERTS}}),
    "ep2, fsdp": ("fsdp", 2, {}),
    "dp2, fsdp": ("fsdp", 1, {}),
}


@pytest.mark.slow
@pytest.mark.parametrize("case", RANKS)
def test_expert_parallel_ranks_equal_one(two_ranks, case):
    for errors in values(two_ranks.run(trained_on_ranks, *RANKS[case], whole())):
        assert len(errors) == 2 * 2 * 3 and max(errors.values()) < 1e-5, errors


def refused_shadow():
    groups = parallel.init(ep=2)
    model = adapt(build(moe_group=groups.moe_group, exchange_options={"shadow": 1}))
    loss_of(model)


@pytest.mark.slow
def test_shadowing_adapted_experts_is_refused(two_ranks):
    for result in two_ranks.run(refused_shadow):
        assert result.kind is fmoe.UserError and "shadow=1" in result.message
