"""`fmoe.parallel.init`, groups of a mesh, gradient norms, FSDP2 beside what test_parallel_wrappers.py trains."""

import math
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from compare import assert_close
from forks import values
from rank_pool import Raised
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy
from torch.distributed.tensor import DTensor, Shard

import fmoe
from fmoe import parallel
from fmoe.parallel import is_expert
from fmoe.runtime import collectives

WIDTH = 16
TORCHRUN = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT", "LOCAL_RANK")


def ranks_of(groups):
    lists = (groups.moe_group, groups.expert_data_group, groups.data_group)
    return [dist.get_process_group_ranks(group) for group in lists], (groups.ep, groups.dp, groups.size)


def made(ep, dp):
    return ranks_of(parallel.init(ep, dp))


@pytest.mark.parametrize(("ep", "dp"), [(1, 4), (2, None), (4, 1)], ids=str)
def test_experts_are_spread_over_neighbours(four_ranks, ep, dp):
    for rank, (ranks, sizes) in enumerate(values(four_ranks.run(made, ep, dp))):
        row = rank // ep * ep
        assert ranks == [list(range(row, row + ep)), list(range(rank % ep, 4, ep)), [0, 1, 2, 3]]
        assert sizes == (ep, 4 // ep, 4)


def of_mesh(shape, names, ep, dp):
    return ranks_of(parallel.ParallelGroups.from_mesh(init_device_mesh("cpu", shape, mesh_dim_names=names), ep, dp))


@pytest.mark.parametrize(
    ("shape", "names", "expected"),
    [
        ((2, 2), ("replica", "expert"), lambda rank: [rank // 2 * 2 + 0, rank // 2 * 2 + 1]),
        ((2, 2), ("expert", "replica"), lambda rank: [rank % 2, rank % 2 + 2]),
    ],
    ids=["dp-ep", "ep-dp"],
)
def test_groups_of_a_mesh(four_ranks, shape, names, expected):
    for rank, (ranks, sizes) in enumerate(values(four_ranks.run(of_mesh, shape, names, "expert", "replica"))):
        assert ranks[0] == expected(rank) and ranks[2] == [0, 1, 2, 3] and sizes == (2, 2, 4)


def test_groups_of_a_mesh_with_other_dimensions(four_ranks):
    found = values(four_ranks.run(of_mesh, (2, 1, 2), ("pp", "dp", "ep"), "ep", "dp"))
    for rank, (ranks, sizes) in enumerate(found):
        stage = rank // 2 * 2
        assert ranks == [[stage, stage + 1], [rank], [stage, stage + 1]] and sizes == (2, 1, 2)


@pytest.mark.parametrize(
    ("function", "args", "message"),
    [
        (made, (3, None), "ep=3 does not divide the number of processes, 2"),
        (made, (2, 2), "dp=2 x ep=2 is 4, which differs from the 2 processes"),
        (made, (0, None), "ep=0 is not a positive whole number"),
        (of_mesh, ((2,), ("dp",), "ep", "dp"), "ep='ep' is not a dimension of the mesh: its dimensions are dp"),
        (of_mesh, ((2,), ("dp",), "dp", "dp"), "the same dimension"),
    ],
    ids=["ep", "dp", "zero", "mesh", "same"],
)
def test_sizes_that_do_not_fit(two_ranks, function, args, message):
    for result in two_ranks.run(function, *args):
        assert isinstance(result, Raised) and result.kind is fmoe.UserError and message in result.message


@pytest.mark.parametrize("environment", [{}, {"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"}], ids=str)
def test_init_starts_torch_distributed(monkeypatch, environment):
    for name in TORCHRUN:
        monkeypatch.delenv(name, raising=False)
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    if environment:
        with pytest.raises(fmoe.UserError, match="MASTER_PORT is not set, but other variables of torchrun are"):
            parallel.init(device_type="cpu")
        monkeypatch.setenv("MASTER_PORT", "0")
    try:
        groups = parallel.init(device_type="cpu")
        assert (groups.ep, groups.dp, dist.get_backend()) == (1, 1, "gloo")
        with pytest.raises(fmoe.UserError, match="ep=2 does not divide the number of processes, 1"):
            parallel.init(ep=2)
    finally:
        dist.destroy_process_group()


def test_an_unknown_device():
    with pytest.raises(fmoe.UserError, match="device_type='tpu'"):
        parallel.init(device_type="tpu")


# Norms.


def test_norm_and_clipping_of_one_process():
    parameters = [torch.nn.Parameter(torch.zeros(3)), torch.nn.Parameter(torch.zeros(2, dtype=torch.bfloat16))]
    unused = torch.nn.Parameter(torch.zeros(4))
    parameters[0].grad, parameters[1].grad = torch.tensor([3.0, 0.0, 0.0]), torch.tensor([4.0, 0.0]).bfloat16()
    norm = parallel.clip_grad_norm_([*parameters, unused], 10.0)
    assert norm == 5 and parameters[0].grad[0] == 3 and norm.dtype == torch.float32
    assert parallel.clip_grad_norm_(parameters, 1.0) == 5
    assert parallel.grad_norm(parameters).item() == pytest.approx(1, rel=1e-2)
    for parameter in parameters:
        parameter.grad.fill_(1e19)  # the sum of all squares is no float32
    assert parallel.grad_norm(parameters).item() == pytest.approx(math.sqrt(5) * 1e19, rel=1e-2)
    assert parallel.grad_norm([]) == 0 and parallel.grad_norm([unused]) == 0


@pytest.mark.parametrize(
    ("backends", "device"), [("cuda:nccl", "cuda"), ("cpu:gloo,cuda:nccl", "cuda"), ("cpu:gloo,cuda:gloo", "cpu")]
)
def test_a_groups_collectives_take_tensors_of_a_gpu_with_nccl(monkeypatch, backends, device):
    monkeypatch.setattr(dist, "get_backend_config", lambda group: backends)
    assert collectives.device_of(None).type == device


def test_the_norm_of_no_parameters_is_on_the_device_of_the_group(monkeypatch):
    monkeypatch.setattr(collectives, "device_of", lambda group: torch.device("meta"))
    summed = []
    monkeypatch.setattr(collectives, "run", lambda collective, tensor, group: summed.append(tensor.device.type))
    norm = parallel.grad_norm([], SimpleNamespace(size=lambda: 2))
    assert summed == ["meta"] and norm.device.type == "meta"


def not_finite(value, raises):
    groups = parallel.init(ep=2)
    layer = fmoe.FMoE(d_model=WIDTH, num_experts=2, moe_group=groups.moe_group, seed=0)
    for parameter in layer.parameters():
        parameter.grad = torch.ones_like(parameter)
    if dist.get_rank() == 1:
        layer.experts.weight_in.grad[0, 0, 0] = value
    norm = parallel.clip_grad_norm_(layer.parameters(), 1.0, groups=groups, error_if_nonfinite=raises)
    return norm.item(), all(bool((p.grad.flatten()[1:] == 1).all()) for p in layer.parameters())


@pytest.mark.parametrize("value", [math.inf, math.nan], ids=str)
def test_a_norm_that_is_not_finite_changes_nothing_on_any_rank(two_ranks, value):
    for norm, untouched in values(two_ranks.run(not_finite, value, False)):
        assert not math.isfinite(norm) and untouched
    for result in two_ranks.run(not_finite, value, True):
        assert isinstance(result, Raised) and result.kind is RuntimeError and "gradient norm is" in result.message


def test_average_gradients_needs_a_group():
    with pytest.raises(fmoe.UserError, match="group= or groups="):
        parallel.average_gradients(torch.nn.Linear(2, 2))


# FSDP2.


class Block(torch.nn.Module):
    def __init__(self, seed, moe_group, **options):
        super().__init__()
        self.dense = torch.nn.Linear(WIDTH, WIDTH)
        self.moe = fmoe.FMoE(d_model=WIDTH, d_hidden=8, moe_group=moe_group, seed=seed, **options)

    def forward(self, x):
        return x + self.moe(self.dense(x))


class PlainList(fmoe.FMoE):
    """As FastMoE's users write it: the experts are set afterwards, as a plain list."""

    def __init__(self, moe_group):
        super().__init__(num_expert=2, d_model=WIDTH, world_size=2, moe_group=moe_group)
        self.experts = torch.nn.ModuleList([Rows(WIDTH, WIDTH) for _ in range(2)])


class Rows(torch.nn.Linear):
    def forward(self, x, fwd_expert_count):
        return super().forward(x)


def tokens():
    return torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(dist.get_rank()))


def sharded(case):
    groups = parallel.init(ep=2)
    torch.manual_seed(dist.get_rank())  # begins differently: the first replica's is taken

    def build():
        if case == "plain list":
            return torch.nn.Sequential(torch.nn.Linear(WIDTH, WIDTH), PlainList(groups.moe_group))
        options = {"num_experts": 6} if case == "uneven" else {"num_experts": 4}
        return torch.nn.Sequential(*(Block(seed, groups.moe_group, **options) for seed in range(2)))

    model, options = build(), {}
    if case == "bf16":
        options["mp_policy"] = MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    if case == "kept":
        options["reshard_after_forward"] = False
    plain = build()
    parallel.DistributedDataParallel(model, groups)  # for its first parameters
    plain.load_state_dict(model.state_dict())
    if case == "blocks":
        for block in model:
            assert parallel.fully_shard(block, groups, **options) is block
    parallel.fully_shard(model, groups, **options)
    assert all(isinstance(layer.experts, FSDPModule) for layer in model.modules() if isinstance(layer, fmoe.MoE))
    assert isinstance(model[0], FSDPModule) == (case == "blocks")
    for _ in range(2):
        model.zero_grad()
        model(tokens()).square().mean().backward()
    plain(tokens()).square().mean().backward()
    parallel.average_gradients(plain, groups=groups)
    for (name, p), q in zip(plain.named_parameters(), model.parameters(), strict=True):
        assert is_expert(p) == is_expert(q) == (".experts." in name)
        assert isinstance(q, DTensor) and q.device_mesh.size() == (2 if is_expert(q) else 4)
        assert_close(q.grad.full_tensor(), p.grad, 0.1 if case == "bf16" else 1e-5, name)
        if case == "uneven" and is_expert(q):  # three experts do not divide over two ranks
            assert q.placements == (Shard(1),), name
    norms = [parallel.grad_norm(m.parameters(), groups=groups) for m in (plain, model)]
    assert_close(norms[1], norms[0], 0.05 if case == "bf16" else 1e-5, "norm")
    state = parallel.state_dict(model, groups)
    return list(state) == list(parallel.state_dict(plain, groups)) and all(
        isinstance(v, DTensor) for v in state.values()
    )


@pytest.mark.by_default("whole", "kept", "plain list")
@pytest.mark.parametrize("case", ["whole", "blocks", "kept", "bf16", "uneven", "plain list"])
def test_fully_shard(four_ranks, case):
    assert values(four_ranks.run(sharded, case)) == [True] * 4
