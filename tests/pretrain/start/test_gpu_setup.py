"""Actions of a run on GPUs before and between its steps, with stand-ins for the GPU."""

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from fmoe.errors import UserError
from fmoe.metrics import LayerMetrics
from fmoe.routing import RoutingStats
from pretrain.engine import routing
from pretrain.models import batch as batches
from pretrain.start import process

BATCH = {
    "tokens": torch.arange(15).view(3, 5),
    "labels": torch.arange(15).view(3, 5)[:, 1:],
    "loss_weight": torch.rand(3, 4, generator=torch.Generator().manual_seed(0)),
    "documents": torch.tensor([[True, False, True]]),
    "empty": torch.zeros(0, 4, dtype=torch.int32),
}


def test_a_batch_arrives_as_it_was():
    moved = batches._packed(BATCH, torch.device("cpu"), pin_memory=False)
    for name, tensor in BATCH.items():
        assert moved[name].dtype == tensor.dtype and torch.equal(moved[name], tensor), name
    assert batches.to_device(BATCH, "cpu") is BATCH


class Copies(TorchDispatchMode):
    """Counts the operations with tensors of the host and of a device."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        leaves = [leaf for leaf in tree_leaves((args, kwargs, out)) if isinstance(leaf, torch.Tensor)]
        self.count += len({leaf.device.type for leaf in leaves}) > 1
        return out


@pytest.mark.parametrize("num_layers", [1, 5])
def test_metrics_of_all_layers_are_copied_at_once(num_layers, monkeypatch):
    monkeypatch.setattr(dist, "all_reduce", lambda *_, **__: None)
    single = SimpleNamespace(size=lambda: 1)
    monkeypatch.setattr(routing.parallel_state, "get_pipeline_model_parallel_group", lambda: single)
    layers = []
    for number in range(num_layers):
        metrics = LayerMetrics(4, ("balance",))
        one = torch.ones((), device="meta")
        metrics.add(RoutingStats(torch.ones(4, device="meta"), one, one, one), {"balance": one})
        exchange = SimpleNamespace(traffic=SimpleNamespace(sent=0))
        layers.append(SimpleNamespace(metrics=metrics, exchange=exchange, layer_number=number + 1))
    reports = routing.RoutingReports(layers, num_layers, 4, ["balance"], single, torch.device("meta"))
    rows = torch.ones(num_layers, 4 + 3 + 1 + 1 + 2, dtype=torch.float64)
    monkeypatch.setattr(torch.Tensor, "cpu", lambda self: rows)  # the only read of the device
    with Copies() as copies:
        found = reports.collect()
    assert sorted(found) == list(range(1, num_layers + 1)) and copies.count == 1


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with a driver, on which torch finds no GPU."""
    driver = tmp_path / "nvidiactl"
    driver.touch()
    monkeypatch.setattr(process, "_DRIVER", driver)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)


def refuse(message, kind):
    def init():
        raise kind(message)

    return init


@pytest.mark.parametrize(
    ("message", "kind", "text"),
    [
        ("Torch not compiled with CUDA enabled", AssertionError, "cannot use: Torch not compiled with CUDA enabled. "),
        (
            "The NVIDIA driver is too old (found version 12040).\nPlease",
            RuntimeError,
            "(found version 12040). ",
        ),
    ],
)
def test_a_gpu_that_torch_cannot_use_is_an_error(machine, message, kind, text, monkeypatch):
    """Not a silent run on the CPU."""
    monkeypatch.setattr(torch.cuda, "init", refuse(message, kind))
    assert text in process.unusable_gpu() and "CUDA_VISIBLE_DEVICES=" in process.unusable_gpu()
    with pytest.raises(UserError, match="this machine has a GPU that torch"):
        process.start()
    assert not dist.is_initialized()


@pytest.mark.parametrize("hidden", ["", "-1"])
def test_the_cpu_may_be_asked_for(machine, hidden, monkeypatch):
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", hidden)
    assert process.unusable_gpu() is None


def test_a_machine_without_a_driver(machine, monkeypatch):
    monkeypatch.setattr(process, "_DRIVER", Path("/dev/no-such-driver"))
    assert process.unusable_gpu() is None


def test_nccl_gets_its_device(monkeypatch):
    """Else it guesses the GPU from the rank, and makes its connections in the first collective."""
    called = {}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    monkeypatch.setattr(torch.cuda, "set_device", lambda device: None)
    monkeypatch.setenv("LOCAL_RANK", "3")
    monkeypatch.setattr(dist, "init_process_group", lambda backend, **options: called.update(options, backend=backend))
    monkeypatch.setattr(dist, "get_rank", lambda: 3)
    monkeypatch.setattr(dist, "get_world_size", lambda: 4)
    process.start(meeting=process.Meeting(dist.HashStore(), 3, 4))
    assert called["backend"] == "nccl" and called["device_id"] == torch.device("cuda", 3)


def test_a_batch_travels_at_once():
    with Copies() as copies:
        moved = batches.to_device(BATCH, "meta")
    assert copies.count == 1
    assert {n: (t.shape, t.dtype, t.device.type) for n, t in moved.items()} == {
        n: (t.shape, t.dtype, "meta") for n, t in BATCH.items()
    }
