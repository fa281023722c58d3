"""The benchmark of compressed gradients and local SGD, and its hook of Deep Gradient Compression."""

from types import SimpleNamespace

import pytest
import torch
from forks import values

from bench.studies import savers
from bench.studies.dgc import DGCState


@pytest.mark.parametrize("momentum", [0.0, 0.5])
def test_what_is_not_sent_waits(momentum):
    generator, parameter = torch.Generator().manual_seed(0), torch.nn.Parameter(torch.zeros(20, 5))
    state = DGCState(None, density=0.1, momentum=momentum)
    u, v = torch.zeros(100), torch.zeros(100)
    for _ in range(7):
        gradient = torch.randn(20, 5, generator=generator)
        sent, where = state.take(parameter, gradient)
        u = momentum * u + gradient.flatten()
        v = v + u
        largest = sorted(range(100), key=lambda n: -abs(v[n].item()))[:10]
        assert sorted(where.tolist()) == sorted(largest)
        torch.testing.assert_close(sent, v[where])
        u[largest] = v[largest] = 0
        torch.testing.assert_close(state.unsent[parameter].flatten(), v)
    assert v.count_nonzero() == 90


def whole(density):
    """Parameters after three steps of plain SGD, with the hook and with torch's reduction."""
    import torch.distributed as dist

    from bench.studies.dgc import dgc_hook
    from bench.studies.small_lm import SmallLM, loss_of
    from fmoe import parallel

    groups = parallel.init(ep=2, device_type="cpu")
    found = []
    for has_hook in (True, False):
        torch.manual_seed(0)
        model = parallel.DistributedDataParallel(SmallLM(groups, width=16, length=8), groups)
        if has_hook:
            model.register_comm_hook(DGCState(groups.data_group, density=density), dgc_hook)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(3):
            tokens = torch.randint(256, (2, 9), generator=torch.Generator().manual_seed(2 * step + dist.get_rank()))
            model.zero_grad()
            loss_of(model, tokens).backward()
            optimizer.step()
        found.append({n: p.detach().clone() for n, p in model.named_parameters() if ".experts." not in n})
    return found


@pytest.mark.slow
def test_sending_everything_is_plain_sgd(forks):
    (first, other), (second, _) = values(forks.run(2, whole, 1.0))
    for name, parameter in first.items():
        torch.testing.assert_close(parameter, other[name], rtol=1e-5, atol=1e-6)
        assert torch.equal(parameter, second[name])


@pytest.mark.slow
def test_bytes_and_losses_of_a_small_run(forks):
    options = {"contenders": list(savers.CONTENDERS), "seeds": [0], "steps": 22, "warmup": 4, "period": 6}
    sizes = {"lr": 0.2, "batch": 2, "width": 16, "density": 0.01, "rank": 1}
    arguments = SimpleNamespace(**options, **sizes)
    rows, others = values(forks.run(2, savers.train_all, arguments))
    assert [row["loss"] for row in rows] == [row["loss"] for row in others]
    of = {row["contender"]: row for row in rows}
    dense = of["all-reduce"]["dense"]
    assert of["all-reduce"]["sent"] == 18 * 4 * dense
    assert of["fp16"]["sent"] == 18 * 2 * dense
    assert of["localsgd"]["sent"] == of["geosgd"]["sent"] == 3 * 4 * dense  # steps 4, 10 and 16
    assert of["geosgd"]["loss"] == pytest.approx(of["localsgd"]["loss"], rel=1e-5)
    assert of["powersgd"]["sent"] < of["all-reduce"]["sent"] / 3
    assert 18 * 8 * 0.01 * dense <= of["dgc"]["sent"] < of["all-reduce"]["sent"] / 20
    assert all(row["exchanged"] > 0 for row in rows)
    lines = savers.table(rows, arguments).splitlines()
    assert sum(line.startswith(f"| {name} ") for name in of for line in lines) == 6
