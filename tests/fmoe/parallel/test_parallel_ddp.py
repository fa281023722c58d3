"""DistributedDataParallel with experts: communication hooks and local SGD on the dense part alone, accumulation, what a
backward pass leaves out, buffers, and wrappers that would take experts for replicas."""

import copy
from dataclasses import dataclass

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values
from rank_pool import Raised
from torch.distributed.algorithms.ddp_comm_hooks import default_hooks, powerSGD_hook
from torch.distributed.algorithms.ddp_comm_hooks.post_localSGD_hook import PostLocalSGDState, post_localSGD_hook
from torch.distributed.algorithms.model_averaging.averagers import PeriodicModelAverager
from torch.distributed.optim import PostLocalSGDOptimizer
from torch.nn.parallel import DistributedDataParallel as TorchDDP

import fmoe
from fmoe import parallel
from fmoe.parallel import is_expert

WIDTH, EXPERTS = 16, 4


def build(moe_group, gate="naive", **options):
    torch.manual_seed(0)
    layer = {"d_model": WIDTH, "num_experts": EXPERTS, "d_hidden": 12, "moe_group": moe_group, "gate": gate, **options}
    return torch.nn.Sequential(
        torch.nn.Linear(WIDTH, WIDTH), fmoe.FMoE(**layer, seed=1), torch.nn.Tanh(), fmoe.FMoE(**layer, seed=2)
    ).double()


def tokens(step=0):
    generator = torch.Generator().manual_seed(10 * step + dist.get_rank())
    return torch.randn(10, WIDTH, generator=generator, dtype=torch.float64)


def loss_of(model, step=0):
    return model(tokens(step)).square().mean()


def reduced(groups, steps=(0,), gate="naive"):
    """Gradients by name, of the model that no wrapper touches."""
    model = build(groups.moe_group, gate)
    for step in steps:
        loss_of(model, step).backward()
    parallel.average_gradients(model, groups=groups)
    return {name: p.grad for name, p in model.named_parameters()}


def close_to(model, expected, dense=1e-12, expert=1e-12):
    for name, parameter in model.named_parameters():
        name = name.removeprefix("module.")
        assert_close(parameter.grad, expected[name], expert if is_expert(parameter) else dense, name)


def alike(tensor, group):
    first = tensor.detach().clone()
    dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
    same = torch.tensor(float(torch.equal(first, tensor)))
    dist.all_reduce(same, dist.ReduceOp.MIN, group=group)
    return bool(same)


def hooked(name):
    groups = parallel.init(ep=2)
    expected = reduced(groups)
    model = parallel.DistributedDataParallel(build(groups.moe_group), groups)
    if name == "powersgd":
        state = powerSGD_hook.PowerSGDState(groups.data_group, matrix_approximation_rank=8, start_powerSGD_iter=2)
        model.register_comm_hook(state, powerSGD_hook.powerSGD_hook)
    else:
        # Under another name: torch refuses the bf16 one by its name where there is no nccl.
        model.register_comm_hook(groups.data_group, lambda state, bucket: getattr(default_hooks, name)(state, bucket))
    for step in range(4):  # PowerSGD compresses from the third on
        model.zero_grad()
        loss_of(model).backward()
        for parameter in model.parameters():
            assert alike(parameter.grad, groups.expert_data_group if is_expert(parameter) else groups.data_group), step
        close_to(
            model, expected, dense=0.5 if step > 1 else {"fp16_compress_hook": 1e-2, "powersgd": 1e-12}.get(name, 5e-2)
        )
    return True


@pytest.mark.parametrize("name", ["fp16_compress_hook", "bf16_compress_hook", "powersgd"])
def test_communication_hooks_see_the_dense_part_alone(two_ranks, name):
    assert values(two_ranks.run(hooked, name)) == [True, True]


def local_sgd():
    groups = parallel.init(ep=2)  # of four ranks: two replicas of each expert
    model = parallel.DistributedDataParallel(build(groups.moe_group), groups)
    state = PostLocalSGDState(groups.data_group, groups.moe_group, start_localSGD_iter=1)
    model.register_comm_hook(state, post_localSGD_hook)
    averager = parallel.DenseAverager(PeriodicModelAverager(period=2, warmup_steps=2, process_group=groups.data_group))
    optimizer = PostLocalSGDOptimizer(torch.optim.SGD(model.parameters(), lr=0.5), averager)
    seen = []
    for step in range(6):
        optimizer.zero_grad()
        loss_of(model, step).backward()
        if step == 4:  # what the optimizer does, in its two parts
            optimizer.optim.step()
            before = {name: p.detach().clone() for name, p in model.named_parameters()}
            averager.average_parameters(optimizer.param_groups)
            for name, parameter in model.named_parameters():
                assert torch.equal(before[name], parameter) == is_expert(parameter), name
                if not is_expert(parameter):
                    dist.all_reduce(before[name])
                    assert_close(parameter, before[name] / dist.get_world_size(), 1e-12, name)
        else:
            optimizer.step()
        experts = [p for p in model.parameters() if is_expert(p)]
        assert all(alike(p, groups.expert_data_group) for p in experts), "replicas drift apart"
        assert not any(alike(p, groups.moe_group) for p in experts), "experts were averaged with others"
        seen.append(all(alike(p, groups.data_group) for p in model.parameters() if not is_expert(p)))
    saved = optimizer.state_dict()["step"]
    averager.step = 0
    optimizer.load_state_dict(optimizer.state_dict() | {"step": saved})
    return seen, averager.step


def test_local_sgd_averages_the_dense_part_alone(four_ranks):
    # Gradients are global in step 0 alone, then within pairs; parameters are averaged after steps 2 and 4.
    assert values(four_ranks.run(local_sgd)) == [([True, False, True, False, True, False], 6)] * 4


@dataclass
class Output:
    y: torch.Tensor


class Opaque:
    def __init__(self, y):
        self.y = y


class Wrapped(torch.nn.Module):
    """Gives its output in ``kind`` of container, and may leave out its second layer of experts."""

    def __init__(self, inner, kind):
        super().__init__()
        self.inner, self.kind, self.last = inner, kind, len(inner)

    def forward(self, x):
        y = self.inner[: self.last](x)
        return {"tensor": y, "dict": {"y": [y]}, "dataclass": Output(y), "object": Opaque(y)}[self.kind]


def passes(kind):
    groups = parallel.init(ep=2)
    model = parallel.DistributedDataParallel(
        Wrapped(build(groups.moe_group), kind), groups, find_unused_parameters=True
    )
    pick = {"tensor": lambda o: o, "dict": lambda o: o["y"][0], "dataclass": lambda o: o.y}[kind]

    def run(step):
        pick(model(tokens(step))).square().mean().backward()

    # Two synchronised passes add up, as two with no_sync do.
    expected = {f"inner.{name}": grad for name, grad in reduced(groups, (0, 1)).items()}
    run(0)
    run(1)
    close_to(model, expected)
    model.zero_grad()
    with model.no_sync():
        run(0)
    assert not alike(model.module.inner[0].weight.grad, groups.data_group)
    run(1)
    close_to(model, expected)
    # A forward pass without a backward pass leaves nothing behind; one without gradients between the two neither.
    model.zero_grad()
    model(tokens(3))
    output = pick(model(tokens(0)))
    with torch.no_grad():
        model(tokens(3))
    output.square().mean().backward()
    run(1)
    close_to(model, expected)
    # Layers that no rank used.
    model.zero_grad()
    model.module.last = 2
    run(0)
    return all(p.grad is not None and not p.grad.any() for p in model.module.inner[3].experts.parameters()) and all(
        p.grad.any() for p in model.module.inner[1].experts.parameters()
    )


@pytest.mark.parametrize("kind", ["tensor", "dict", "dataclass"])
def test_passes(two_ranks, kind):
    assert values(two_ranks.run(passes, kind)) == [True, True]


def unfinished():
    groups = parallel.init(ep=2)
    expected = {f"inner.{name}": grad for name, grad in reduced(groups).items()}
    model = parallel.DistributedDataParallel(Wrapped(build(groups.moe_group), "object"), groups)
    model(tokens()).y.square().mean().backward()
    close_to(model, expected)  # every expert came by itself
    model.module.last = 2
    model(tokens()).y.square().mean().backward()
    model(tokens())


def test_experts_that_no_backward_pass_reached_are_an_error(two_ranks):
    for result in two_ranks.run(unfinished):
        assert isinstance(result, Raised) and result.kind is RuntimeError
        assert "did not reach the experts of every layer" in result.message


def unevenly_used():
    """Ranks 0 and 1 use the second layer, their replicas 2 and 3 do not."""
    groups = parallel.init(ep=2)
    model = parallel.DistributedDataParallel(
        Wrapped(build(groups.moe_group), "tensor"), groups, find_unused_parameters=True
    )
    model.module.last = 4 if dist.get_rank() < 2 else 2
    loss_of(model).backward()
    alone = Wrapped(build(groups.moe_group), "tensor")
    alone.last = model.module.last
    loss_of(alone).backward()
    for parameter in alone.parameters():
        parameter.grad = torch.zeros_like(parameter) if parameter.grad is None else parameter.grad
    parallel.average_gradients(alone, groups=groups)
    for (name, p), q in zip(
        alone.inner[3].experts.named_parameters(), model.module.inner[3].experts.parameters(), strict=True
    ):
        assert q.grad.any() and alike(q.grad, groups.expert_data_group), name
        assert_close(q.grad, p.grad, 1e-12, name)
    return True


def test_a_layer_that_some_replicas_leave_out(four_ranks):
    assert values(four_ranks.run(unevenly_used)) == [True] * 4


class Checkpointed(torch.nn.Module):
    def __init__(self, inner, reentrant):
        super().__init__()
        self.inner, self.reentrant = inner, reentrant

    def forward(self, x):
        for module in self.inner:
            x = torch.utils.checkpoint.checkpoint(module, x.requires_grad_(), use_reentrant=self.reentrant)
        return x


def checkpointed(reentrant, static_graph):
    groups = parallel.init(ep=2)
    expected = {f"inner.{name}": grad for name, grad in reduced(groups).items()}
    inner = Checkpointed(build(groups.moe_group), reentrant)
    model = parallel.DistributedDataParallel(inner, groups, static_graph=static_graph)
    for _ in range(2):
        model.zero_grad()
        loss_of(model).backward()
        close_to(model, expected)
    return True


@pytest.mark.parametrize(("reentrant", "static_graph"), [(False, False), (True, False), (True, True)], ids=str)
def test_checkpointing(two_ranks, reentrant, static_graph):
    assert values(two_ranks.run(checkpointed, reentrant, static_graph)) == [True, True]


class Normed(torch.nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.linear = torch.nn.Linear(d_model, d_model)
        self.register_buffer("rank", torch.tensor(float(dist.get_rank())))

    def forward(self, x):
        return self.linear(x) + 0 * self.rank


def beginning():
    groups = parallel.init(ep=2)
    model = build(groups.moe_group, expert=Normed)
    torch.manual_seed(dist.get_rank())
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_()
    before = copy.deepcopy(model)
    wrapped = parallel.DistributedDataParallel(model, groups)
    loss_of(wrapped)
    for (name, new), old in zip(model.state_dict().items(), before.state_dict().values(), strict=True):
        group = groups.expert_data_group if ".experts." in name else groups.data_group
        first = old.clone()
        dist.broadcast(first, dist.get_global_rank(group, 0), group=group)
        assert torch.equal(new, first), name
    return sorted(key.split(".")[0] for key in wrapped.state_dict())[0]


def test_parameters_and_buffers_begin_alike_where_they_are_replicas(four_ranks):
    assert values(four_ranks.run(beginning)) == ["module"] * 4


def foreign(wrapper):
    model = build(dist.group.WORLD)
    if wrapper == "ddp":
        model = TorchDDP(model)
    elif wrapper == "fsdp":
        torch.distributed.fsdp.fully_shard(model)
    elif wrapper == "experts ignored":
        names = [name for name, p in model.named_parameters() if is_expert(p)]
        TorchDDP._set_params_and_buffers_to_ignore_for_model(model, names)
        model = TorchDDP(model)
    elif wrapper == "not spread":
        model = TorchDDP(build(None))
    loss_of(model)
    return True


@pytest.mark.parametrize("wrapper", ["ddp", "fsdp"])
def test_a_wrapper_that_takes_experts_for_replicas_is_refused(two_ranks, wrapper):
    for result in two_ranks.run(foreign, wrapper):
        assert isinstance(result, Raised) and result.kind is fmoe.UserError
        assert "fmoe.parallel." in result.message and "FMoE" in result.message


@pytest.mark.parametrize("wrapper", ["experts ignored", "not spread"])
def test_a_wrapper_that_does_not_is_let_through(two_ranks, wrapper):
    assert values(two_ranks.run(foreign, wrapper)) == [True, True]


def misfit(case):
    groups = parallel.init(ep=2)
    if case == "layer":
        parallel.DistributedDataParallel(build(None), groups)
    if case == "group":
        parallel.DistributedDataParallel(build(groups.moe_group), groups, process_group=dist.group.WORLD)
    if case == "frozen":
        model = build(groups.moe_group)
        for parameter in model.parameters():
            parameter.requires_grad_(is_expert(parameter))
        parallel.DistributedDataParallel(model, groups)


@pytest.mark.parametrize(
    ("case", "message"), [("layer", "moe_group=groups.moe_group"), ("group", "process_group"), ("frozen", "no dense")]
)
def test_what_cannot_be_wrapped(two_ranks, case, message):
    for result in two_ranks.run(misfit, case):
        assert isinstance(result, Raised) and result.kind is fmoe.UserError and message in result.message
