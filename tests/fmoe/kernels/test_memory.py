"""Memory that is used again is never memory in use, and nobody's numbers change by it."""

import multiprocessing
import os
import signal
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from multiprocessing.reduction import ForkingPickler

import numpy as np
import pytest
import torch
import torch.multiprocessing  # its reductions of tensors
from torch.utils.weak import WeakTensorKeyDictionary

import fmoe
from fmoe.kernels import memory
from fmoe.kernels.native import loader as native
from fmoe.metrics import LayerMetrics
from fmoe.routing import RoutingStats


@pytest.fixture
def small_blocks(monkeypatch):
    monkeypatch.setattr(memory, "_SMALLEST", 1)
    monkeypatch.setattr(memory, "_blocks", {})
    monkeypatch.setattr(memory, "_gradients", WeakTensorKeyDictionary())


def test_memory_comes_back_once_nobody_has_it(small_blocks):
    like = torch.zeros(1)
    first = memory.empty((4, 8), like)
    address = first.data_ptr()
    view = first[1:]
    del first
    assert memory.empty((4, 8), like).untyped_storage().data_ptr() != address
    del view
    assert memory.empty((4, 7), like).data_ptr() == address


def test_what_autograd_keeps_is_in_use(small_blocks):
    weight = torch.ones(4, 8, requires_grad=True)
    rows = memory.empty((4, 8), weight.detach()).fill_(3)
    out = (rows * weight).sum()
    del rows
    for _ in range(4):
        memory.empty((4, 8), weight.detach()).fill_(7)
    out.backward()
    assert weight.grad.eq(3).all()


def test_blocks_of_sizes_that_no_longer_come_go_back(small_blocks):
    like = torch.zeros(1)
    for size in (1000, *[10] * (memory._PATIENCE + 1), 100_000):
        memory.empty((size,), like)
    assert sorted(block.nbytes for block in memory._blocks) == [45, 450_000]


@pytest.mark.parametrize("capacity", [None, 0.5])
def test_a_layer_computes_the_same(monkeypatch, capacity):
    def train():
        torch.manual_seed(0)
        layer = fmoe.FMoE(
            d_model=16,
            num_experts=4,
            d_hidden=8,
            top_k=2,
            gate_options={"capacity_factor": capacity},
            backend="torch",
            seed=1,
        )
        x = torch.randn(32, 16, requires_grad=True)
        for _ in range(3):
            layer(x).square().sum().backward()
        return [x.grad, *(p.grad for p in layer.parameters())]

    expected = train()
    monkeypatch.setattr(memory, "_SMALLEST", 1)
    monkeypatch.setattr(memory, "_blocks", {})
    assert all(torch.equal(a, b) for a, b in zip(train(), expected, strict=True))
    assert memory._blocks


SHAPE = (4, 8)


def taken(kind, parameter):
    """New memory of each of the two kinds."""
    return memory.empty(SHAPE, parameter.detach()) if kind == "rows" else memory.empty_gradient(parameter)


def shared(tensor):
    """A tensor as another process gets it: the memory, without a reference of this process."""
    other = torch.empty(0)
    return other.set_(tensor.untyped_storage()._new_shared_fd_cpu(*tensor.untyped_storage()._share_fd_cpu_()))


def resized(tensor):
    """A storage that gave its memory away and got other, smaller memory."""
    tensor.untyped_storage().resize_(4)
    return torch.zeros(1)


EXPORTS = {
    "a view": lambda t: t[1:2],
    "data": lambda t: t.data,
    "detach": lambda t: t.detach(),
    "a storage": lambda t: t.untyped_storage(),
    "set_": lambda t: torch.empty(0).set_(t.untyped_storage(), 0, (1,)),
    "numpy": lambda t: t.numpy(),
    "a view of numpy": lambda t: t.numpy()[1:],
    "a buffer": lambda t: memoryview(t.numpy()),
    "from_dlpack": torch.from_dlpack,
    "a capsule": torch.utils.dlpack.to_dlpack,
    "numpy by dlpack": np.from_dlpack,
    "saved by autograd": lambda t: t.requires_grad_().square().sum(),
    "shared memory": shared,
    "resized": resized,
}


@pytest.mark.parametrize("kind", ["rows", "gradient"])
@pytest.mark.parametrize("export", EXPORTS)
def test_what_is_exported_is_in_use(small_blocks, kind, export):
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    first = taken(kind, parameter).fill_(3)
    held = EXPORTS[export](first)
    del first
    for _ in range(3):
        taken(kind, parameter).fill_(7)
    if isinstance(held, torch.Tensor) and held.grad_fn is None and export != "resized":
        assert held.view(-1)[:8].eq(3).all()
    elif isinstance(held, (np.ndarray, memoryview)):
        assert (np.asarray(held) == 3).all()
    elif isinstance(held, torch.UntypedStorage):
        assert torch.empty(0).set_(held, 0, (32,)).eq(3).all()
    elif export == "a capsule":
        assert torch.utils.dlpack.from_dlpack(held).eq(3).all()
    elif export == "saved by autograd":
        held.backward()  # the saved tensor was not written to: 3, not 7
        assert held.item() == 9 * 32


@pytest.mark.parametrize("kind", ["rows", "gradient"])
def test_a_released_export_gives_its_memory_back(small_blocks, kind):
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    first = taken(kind, parameter)
    address = first.data_ptr()
    held = first.numpy()
    storage = first.untyped_storage()
    del first
    assert taken(kind, parameter).data_ptr() != address or kind == "gradient"
    second = taken(kind, parameter)
    again = second.data_ptr()
    assert again != address
    del held, storage, second
    assert taken(kind, parameter).data_ptr() in (address, again)


def in_threads(run, number=4):
    """Calls ``run(0)`` to ``run(number - 1)`` in threads that change as often as can be."""
    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-6)
    try:
        with ThreadPoolExecutor(number) as pool:
            return list(pool.map(run, range(number)))
    finally:
        sys.setswitchinterval(before)


@pytest.mark.parametrize("kind", ["rows", "gradient"])
def test_threads_never_get_the_same_memory(small_blocks, monkeypatch, kind):
    parameter = torch.nn.Parameter(torch.zeros(SHAPE))
    is_free = memory._is_free
    held = set()
    twice = []

    def slow(block):
        answer = is_free(block)
        time.sleep(1e-4)  # another thread asks before this one takes it
        return answer

    def take(_number):
        for _ in range(40):
            mine = taken(kind, parameter)
            address = mine.data_ptr()
            if address in held:
                twice.append(address)
            held.add(address)
            time.sleep(1e-5)
            held.discard(address)
            del mine

    monkeypatch.setattr(memory, "_is_free", slow)
    in_threads(take)
    assert not twice


@pytest.mark.parametrize("backend", ["torch", "native"])
def test_a_gradient_that_another_process_got_is_not_written_again(backend):
    """Sent through torch.multiprocessing, while the next step runs here. Large enough for every pool."""
    if backend == "native" and not native.load():
        pytest.skip(native.why())
    options = {"d_model": 256, "num_experts": 2, "d_hidden": 600, "top_k": 1, "gate": "naive", "seed": 1}
    layer = fmoe.FMoE(**options, backend=backend)
    x = torch.randn(40, 256, generator=torch.Generator().manual_seed(0))

    def step(scale):
        layer.zero_grad(set_to_none=True)
        (layer(x) * scale).sum().backward()
        return layer.experts.weight_in.grad

    expected = step(1.0).clone()
    mine, theirs = multiprocessing.Pipe()
    with mine, theirs:
        mine.send_bytes(ForkingPickler.dumps(step(1.0)))
        for scale in (2.0, 3.0):
            step(scale)
        received = ForkingPickler.loads(theirs.recv_bytes())
    assert torch.equal(received, expected)


def statistics(num_experts):
    one = torch.ones(())
    return RoutingStats(torch.ones(num_experts), one * 0, one, one)


def test_threads_lose_no_counts():
    metrics = LayerMetrics(1 << 14, ())  # so many that the sum is long under way
    stats = statistics(1 << 14)

    def add(_number):
        for _ in range(500):
            metrics.add(stats, {})

    in_threads(add)
    assert metrics.report().tokens == 4 * 500


def test_backward_passes_in_threads_lose_no_counts():
    layer = fmoe.FMoE(d_model=8, num_experts=4, d_hidden=8, top_k=2, seed=1)
    x = torch.randn(3, 8, requires_grad=True)

    def run(_number):
        for _ in range(30):
            layer(x).sum().backward()

    in_threads(run)
    assert layer.metrics.report().tokens == 4 * 30 * 3


def test_reports_that_reset_lose_no_counts():
    metrics = LayerMetrics(2, ())
    stats = statistics(2)

    def run(number):
        if number == 0:
            return sum(metrics.take().tokens for _ in range(1000))
        for _ in range(500):
            metrics.add(stats, {})
        return 0

    assert sum(in_threads(run)) + metrics.take().tokens == 3 * 500


@pytest.mark.parametrize("lock", ["rows", "statistics"])
def test_a_child_that_is_forked_while_a_thread_holds_the_lock_goes_on(small_blocks, lock):
    module = memory if lock == "rows" else sys.modules[LayerMetrics.__module__]
    with module._lock:
        child = os.fork()
        if not child:
            signal.alarm(20)  # a child that waits is ended
            memory.empty(SHAPE, torch.empty(0))
            LayerMetrics(2, ()).add(statistics(2), {})
            os._exit(0)
    assert os.waitpid(child, 0)[1] == 0
