"""Prices against counted bytes of the trainer, simulations that count, and limits that need no formula."""

import itertools
import math
from dataclasses import replace
from unittest import mock

import numpy as np
import pytest
import torch
import torch.distributed as dist
from engines import STEADY, Samples, engine_of
from forks import only, values
from torch import nn

from bench.traffic import Traffic
from fmoe.errors import UserError
from fmoe.parallel.all_reduce import Grid, Hierarchical, Ring
from fmoe.parallel.compression import DGC, OneBit, PowerSGD
from pretrain.config import ParallelConfig
from pretrain.planner.alternatives import (
    Price,
    all_reduce,
    gradient_compression,
    parameter_server,
    pipeline,
    tensor_parallel,
)
from pretrain.planner.cluster import Cluster, Device, Link, load_cluster

FREE = Device(memory=1.0, peak={"fp32": 1e300}, efficiency=1.0, bandwidth=1e300, launch=0.0)  # computes in no time
NODES = Cluster(
    name="nodes of 2",
    source="made up for a test",
    num_ranks=64,
    links=(Link(size=2, bandwidth=1e9, latency=0.0), Link(size=64, bandwidth=1e9, latency=0.0)),
    device=FREE,
)
BANDWIDTH = replace(NODES, links=(Link(size=64, bandwidth=1e3, latency=0.0),))  # a byte takes 1 ms
LATENCY = replace(NODES, links=(Link(size=64, bandwidth=1e300, latency=1.0),))  # a step takes 1 second


# All-reduce


class Bucket:
    """A bucket of equal parameters."""

    def __init__(self, shape, count=1):
        self._parameters = [nn.Parameter(torch.zeros(shape, dtype=torch.float32)) for _ in range(count)]
        generator = torch.Generator().manual_seed(dist.get_rank())
        self._buffer = torch.randn(count * math.prod(shape), generator=generator, dtype=torch.float32)

    def buffer(self):
        return self._buffer

    def gradients(self):
        size = self._parameters[0].numel()
        return [part.view(p.shape) for part, p in zip(self._buffer.split(size), self._parameters, strict=True)]

    def parameters(self):
        return self._parameters

    def index(self):
        return 0

    def is_last(self):
        return True


def peak_bytes(function):
    """Most bytes that a function has allocated at a time."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as found:
        function()
    changes = [e for e in found.profiler.kineto_results.events() if e.name() == "[memory]"]
    changes.sort(key=lambda event: event.start_ns())
    return max(itertools.accumulate(event.nbytes() for event in changes))


ALL_REDUCE = {"ring": Ring, "grid": Grid, "hierarchical": lambda group: Hierarchical(group, 2)}


def sent_by(algorithm, size):
    """Bytes that a rank sends."""
    reduction = ALL_REDUCE[algorithm](dist.group.WORLD)
    with Traffic() as traffic:
        reduction(Bucket((size,)))
    return traffic.sent


def held_by(algorithm, size, ranks):
    """Most bytes that a rank allocates, on a fake group, since gloo has copies of its own."""
    from torch.testing._internal.distributed.fake_pg import FakeStore

    dist.destroy_process_group()
    dist.init_process_group("fake", store=FakeStore(), rank=1, world_size=ranks)
    reduction = ALL_REDUCE[algorithm](dist.group.WORLD)
    bucket = Bucket((size,))
    return peak_bytes(lambda: reduction(bucket))


@pytest.mark.parametrize("ranks", [4, 6])
@pytest.mark.parametrize("algorithm", ALL_REDUCE)
def test_all_reduce_sends_and_holds_what_the_trainer_does(forks, algorithm, ranks):
    price = all_reduce(NODES, algorithm, ranks, 4 * 12000)
    for sent in values(forks.run(ranks, sent_by, algorithm, 12000)):
        assert price.sent == pytest.approx(sent, rel=1e-12)
    assert price.memory == pytest.approx(only(forks.run(1, held_by, algorithm, 12000, ranks)), rel=1e-3)


@pytest.mark.parametrize(
    ("algorithm", "ranks", "steps"),
    [("ring", 12, 2 * 11), ("grid", 12, 2 * (2 + 3)), ("grid", 7, 2 * 6), ("hierarchical", 16, 2 * 1 + 2 * 3)],
)
def test_latency_counts_the_transfers(algorithm, ranks, steps):
    links = (Link(size=2, bandwidth=1e300, latency=1.0), Link(size=64, bandwidth=1e300, latency=1.0))
    assert all_reduce(replace(LATENCY, links=links), algorithm, ranks, 1e6).seconds == pytest.approx(steps)


def test_only_a_part_of_a_hierarchical_sum_leaves_the_node():
    """With fast nodes, its time is that of a 1/I of the bytes; a ring's is that of all."""
    links = (Link(size=8, bandwidth=1e300, latency=0.0), Link(size=64, bandwidth=1e3, latency=0.0))
    cluster = replace(NODES, links=links)
    assert all_reduce(cluster, "hierarchical", 64, 8e3).seconds == pytest.approx(2 * 1 * 7 / 8)
    assert all_reduce(cluster, "ring", 64, 8e3).seconds == pytest.approx(2 * 8 * 63 / 64)


# Compression


def tensors_in(state, seen):
    """Tensors that an object of a compressor holds, but for keys, which are parameters."""
    if isinstance(state, torch.Tensor):
        seen[state.data_ptr()] = max(seen.get(state.data_ptr(), 0), state.nbytes)
    elif isinstance(state, dict):
        for value in state.values():
            tensors_in(value, seen)
    elif isinstance(state, (list, tuple)):
        for value in state:
            tensors_in(value, seen)


def compressed(method, options, shape, count):
    """Bytes that a rank sends in a step after the warm-up, and bytes that its compressor then holds."""
    make = {"powersgd": PowerSGD, "dgc": DGC, "onebit": OneBit}[method]
    compressor = make(dist.group.WORLD, warmup=2, **options)
    bucket = Bucket(shape, count)
    for _ in range(5):
        compressor.begin()
        compressor(bucket)
    compressor.begin()
    # torch's hook calls all_reduce from threads of gloo too, whose calls Traffic does not see.
    with mock.patch.object(dist, "all_reduce", wraps=dist.all_reduce) as summed, Traffic() as traffic:
        compressor(bucket)
    whole = sum(call.args[0].nbytes for call in summed.call_args_list)
    sent = 2 * whole * (1 - 1 / dist.get_world_size()) if method == "powersgd" else traffic.sent
    held = {}
    for name, state in vars(compressor).items():
        if name != "_ranges":  # parameters
            tensors_in(state, held)
    for parameter in bucket.parameters():
        held.pop(parameter.data_ptr(), None)
    return sent, sum(held.values())


@pytest.mark.parametrize("ranks", [2, 3])
@pytest.mark.parametrize(
    ("method", "options", "shape", "count"),
    [
        ("powersgd", {"rank": 1}, (48, 30), 3),
        ("powersgd", {"rank": 4}, (48, 30), 3),
        ("powersgd", {"rank": 64}, (300, 30), 1),  # more than there are columns
        ("powersgd", {"rank": 8}, (12, 12), 2),  # does not shrink
        ("powersgd", {}, (70, 1), 1),  # a vector
        ("dgc", {"density": 0.01}, (48, 31), 3),
        ("dgc", {"density": 1.0}, (48, 30), 1),
        ("onebit", {}, (100, 61), 1),
        ("onebit", {}, (7, 1), 3),
    ],
    ids=str,
)
def test_compression_sends_and_holds_what_the_trainer_does(forks, method, options, shape, count, ranks):
    price = gradient_compression(NODES, method, shape, ranks, count, **options)
    for sent, held in values(forks.run(ranks, compressed, method, options, shape, count)):
        assert price.sent == pytest.approx(sent, rel=1e-12)
        assert price.memory == held


def rarely(recipe, steps):
    """Bytes that averages of the parameters sent, bytes of their memories, and the shapes of parameters."""
    engine = engine_of(recipe)
    sent = []
    for step in range(steps):
        with Traffic() as traffic:
            engine.train_step(step, Samples())
        sent.append(traffic.sent)
    local = sent[0]  # losses and statistics
    held = sum(memory.values.nbytes for memory in engine.sync.memories())
    return sum(count - local for count in sent), held, [p.numel() for p in engine.gpt.parameters()]


@pytest.mark.parametrize(("outer", "method"), [("average", "local_sgd"), ("nesterov", "diloco")])
def test_rare_averages_send_and_hold_what_the_trainer_does(forks, outer, method):
    parallel = ParallelConfig(data=2, sync_every=3, sync_outer=outer)
    model = STEADY.model.with_values({"moe.num_experts": 0, "moe.top_k": 1})
    checkpoint = replace(STEADY.checkpoint, every=24)
    train = replace(STEADY.train, precision="fp32", validation_every=24, steps=48)
    recipe = replace(STEADY, parallel=parallel, model=model, checkpoint=checkpoint, train=train)
    for sent, held, sizes in values(forks.run(2, rarely, recipe, 6)):
        prices = [gradient_compression(NODES, method, (size, 1), 2, sync_every=3) for size in sizes]
        assert 6 * sum(price.sent for price in prices) == pytest.approx(sent, rel=1e-12)
        assert sum(price.memory for price in prices) == held


@pytest.mark.parametrize("method", ["powersgd", "dgc", "onebit", "local_sgd", "diloco"])
def test_compression_is_worth_its_bytes_on_slow_links_only(method):
    shape = (4096, 4096)
    slow = replace(BANDWIDTH, device=load_cluster("h100-8").device)
    fast = replace(slow, links=(Link(size=64, bandwidth=1e15, latency=0.0),))
    plain = all_reduce(slow, "ring", 8, 4 * math.prod(shape))
    price = gradient_compression(slow, method, shape, 8)
    assert price.sent < plain.sent / 7
    assert price.seconds < plain.seconds / 7
    assert gradient_compression(fast, method, shape, 8).seconds > all_reduce(fast, "ring", 8, 4 * 4096**2).seconds


# Tensor parallelism


class Mesh:
    """Ranks on a mesh, with the numbers that each sends."""

    def __init__(self, *shape):
        self.sent = np.zeros(shape, dtype=int)

    def broadcast(self, root, blocks, others):
        """One block to all others of its line."""
        self.sent[root] += others * blocks[root].size
        return blocks[root]

    def reduce(self, root, partial):
        """The sum of a line's partial blocks at its root: each other rank sends its own once."""
        for rank, block in partial.items():
            if rank != root:
                self.sent[rank] += block.size
        return sum(partial.values())


def split(matrix, rows, columns):
    return [np.split(part, columns, axis=1) for part in np.split(matrix, rows, axis=0)]


def summa(x, a, dy, q, depth):
    """Y, dX, dA of Y = X A by SUMMA on ``depth`` layers of q x q ranks, and numbers that a rank sends and holds."""
    mesh = Mesh(depth, q, q)
    ranks = list(itertools.product(range(depth), range(q), range(q)))
    x_blocks, a_blocks, dy_blocks = split(x, depth * q, q), split(a, q, q), split(dy, depth * q, q)
    xs = {(d, i, j): x_blocks[d * q + i][j] for d, i, j in ranks}
    dys = {(d, i, j): dy_blocks[d * q + i][j] for d, i, j in ranks}
    weights = {(d, i, j): a_blocks[i][j] for d, i, j in ranks}
    y = dict.fromkeys(ranks, 0)
    dx = {}
    da = {}
    for d in range(depth):
        for t in range(q):
            # Y += X of column t, along rows, times A of row t, along columns.
            rows = [mesh.broadcast((d, i, t), xs, q - 1) for i in range(q)]
            columns = [mesh.broadcast((d, t, j), weights, q - 1) for j in range(q)]
            for i, j in itertools.product(range(q), range(q)):
                y[d, i, j] = y[d, i, j] + rows[i] @ columns[j]
            # dX of column t: A of row t along columns; sums along rows.
            columns = [mesh.broadcast((d, t, j), weights, q - 1) for j in range(q)]
            for i in range(q):
                dx[d, i, t] = mesh.reduce((d, i, t), {(d, i, j): dys[d, i, j] @ columns[j].T for j in range(q)})
            # dA of row t: X of column t along rows; sums along columns.
            rows = [mesh.broadcast((d, i, t), xs, q - 1) for i in range(q)]
            for j in range(q):
                da[d, t, j] = mesh.reduce((d, t, j), {(d, i, j): rows[i].T @ dys[d, i, j] for i in range(q)})
    sent = mesh.sent.astype(float)
    for d, i, j in ranks:  # a ring all-reduce over the depth
        sent[d, i, j] += 2 * (depth - 1) / depth * da[d, i, j].size
    total = {(i, j): sum(da[d, i, j] for d in range(depth)) for i, j in itertools.product(range(q), range(q))}
    lines = list(itertools.product(range(depth), range(q)))
    joined = [np.block([[blocks[d, i, j] for j in range(q)] for d, i in lines]) for blocks in (y, dx)]
    held = xs[0, 0, 0].size + weights[0, 0, 0].size + y[0, 0, 0].size + rows[0].size + columns[0].size
    return *joined, np.block([[total[i, j] for j in range(q)] for i in range(q)]), sent, held


def cube(x, a, dy, q):
    """The same on q x q x q ranks. X is gathered along j, A along i, and Y summed along l, in rings."""
    sent = np.zeros((q, q, q))
    ranks = list(itertools.product(range(q), repeat=3))
    xs, weights, dys = split(x, q, q), split(a, q, q), split(dy, q, q)  # X [i, l], A [l, j], Y [i, j]
    y, dx, da = ([[0] * q for _ in range(q)] for _ in range(3))
    for i, j, l in ranks:
        for gathered in (xs[i][l], weights[l][j], dys[i][j]):
            sent[i, j, l] += (q - 1) * gathered.size / q  # its own part to the next rank, and q - 2 others on
        for sums, row, column, partial in (
            (y, i, j, xs[i][l] @ weights[l][j]),
            (dx, i, l, dys[i][j] @ weights[l][j].T),
            (da, l, j, xs[i][l].T @ dys[i][j]),
        ):
            sums[row][column] = sums[row][column] + partial
            sent[i, j, l] += (q - 1) * partial.size / q
    held = (1 + 1 / q) * (xs[0][0].size + weights[0][0].size + dys[0][0].size)  # parts, and what they are gathered to
    return *(np.block(blocks) for blocks in (y, dx, da)), sent, held


@pytest.mark.parametrize(
    ("scheme", "q", "depth"),
    [("2d", 1, 1), ("2d", 2, 1), ("2d", 3, 1), ("2.5d", 2, 2), ("2.5d", 2, 3), ("3d", 2, 1), ("3d", 3, 1)],
)
def test_meshes_send_and_hold_what_a_simulation_counts(scheme, q, depth):
    rng = np.random.default_rng(0)
    rows, d_in, d_out = 36, 18, 54
    x, a, dy = (rng.standard_normal(shape) for shape in ((rows, d_in), (d_in, d_out), (rows, d_out)))
    y, dx, da, sent, held = cube(x, a, dy, q) if scheme == "3d" else summa(x, a, dy, q, depth)
    for found, exact in ((y, x @ a), (dx, dy @ a.T), (da, x.T @ dy)):
        np.testing.assert_allclose(found, exact, rtol=1e-9, atol=1e-12)
    ranks = q**3 if scheme == "3d" else q**2 * depth
    price = tensor_parallel(NODES, scheme, rows, d_in, d_out, ranks, "fp32", depth)
    np.testing.assert_allclose(4 * sent, price.sent, rtol=1e-12)
    if q > 1:
        assert price.memory == pytest.approx(4 * held)


def two_layers(hidden, ffn, rows):
    """Bytes that a rank of 2 sends for Megatron's two linear layers, forward and backward, and holds for each."""
    from megatron.core import ModelParallelConfig
    from megatron.core.tensor_parallel import ColumnParallelLinear, RowParallelLinear

    from megatron_patch import cpu
    from pretrain.engine import init_parallel

    cpu.install()
    init_parallel(replace(STEADY, parallel=ParallelConfig(tensor=2)))
    config = ModelParallelConfig(tensor_model_parallel_size=2, use_cpu_initialization=True)
    options = {"config": config, "init_method": nn.init.zeros_, "bias": False, "skip_bias_add": False}
    first = ColumnParallelLinear(hidden, ffn, gather_output=False, **options)
    second = RowParallelLinear(ffn, hidden, input_is_parallel=True, **options)
    x = torch.zeros(rows, hidden, dtype=torch.float32, requires_grad=True)
    with Traffic() as traffic:
        y = first(x)[0]
        z = second(y)[0]
        z.sum().backward()
    held = [a.nbytes + layer.weight.nbytes + b.nbytes for a, layer, b in ((x, first, y), (y, second, z))]
    return traffic.sent, held


def test_1d_sends_and_holds_what_megatron_does(forks):
    layers = [tensor_parallel(NODES, "1d", 10, *sizes, 2, "fp32") for sizes in ((16, 48), (48, 16))]
    for sent, held in values(forks.run(2, two_layers, 16, 48, 10)):
        assert sum(layer.sent for layer in layers) == sent > 0
        assert [layer.memory for layer in layers] == held


@pytest.mark.parametrize(("scheme", "q", "ranks"), [("2d", 4, 16), ("2.5d", 4, 32), ("3d", 2, 8)])
def test_the_input_moves_within_nodes(scheme, q, ranks):
    """On nodes of q ranks, only weights, their gradients over the depth, and the output of 3d leave the node."""
    links = (Link(size=q, bandwidth=1e300, latency=0.0), Link(size=64, bandwidth=1e3, latency=0.0))
    a, y = 4 * 16 * 32, 4 * 1000 * 32
    outside = {
        "2d": 3 * a * (q - 1) / q**2,
        "2.5d": 3 * a * (q - 1) / q**2 + 2 * a / q**2 / 2,
        "3d": 2 * (a + y) * (q - 1) / q**3,
    }[scheme]
    depth = 2 if scheme == "2.5d" else 1
    price = tensor_parallel(replace(NODES, links=links), scheme, 1000, 16, 32, ranks, "fp32", depth)
    assert price.seconds == pytest.approx(outside / 1e3)
    assert price.sent > outside


@pytest.mark.parametrize(("scheme", "ranks"), [("1d", 64), ("2d", 64), ("3d", 64)])
def test_meshes_divide_work_evenly_and_2d_and_3d_divide_memory(scheme, ranks):
    rows, width = 1 << 14, 1 << 12
    device = replace(FREE, peak={"bf16": 1e12})
    cluster = replace(LATENCY, device=device, links=(Link(size=64, bandwidth=1e300, latency=0.0),))
    price = tensor_parallel(cluster, scheme, rows, width, width, ranks, "bf16")
    assert price.seconds == pytest.approx(3 * 2 * rows * width**2 / 1e12 / 64)
    matrices = 2 * (2 * rows * width + width**2)
    assert (price.memory > matrices / 4) == (scheme == "1d")
    assert price.memory >= matrices / 64


# Parameter servers


def clocks(compute, staleness, steps):
    """Seconds of ``steps`` steps of all workers under bounded staleness, and each worker's number of pulls."""
    workers = range(len(compute))
    done = [0] * len(compute)
    cached = [0] * len(compute)  # the oldest step that a worker's copy of the parameters includes
    pulls = [0] * len(compute)
    ends = [0.0] * len(compute)
    running = [False] * len(compute)
    now = 0.0
    while min(done) < steps:
        for worker in workers:
            if running[worker]:
                continue
            if cached[worker] < done[worker] - staleness and min(done) >= done[worker] - staleness:
                cached[worker] = min(done)
                pulls[worker] += 1
            if cached[worker] >= done[worker] - staleness:
                running[worker] = True
                ends[worker] = now + compute[worker]
        now = min(ends[worker] for worker in workers if running[worker])
        for worker in workers:
            if running[worker] and ends[worker] == now:
                running[worker] = False
                done[worker] += 1
    return now, [count / steps for count in pulls]


@pytest.mark.parametrize("staleness", [0, 1, 3])
@pytest.mark.parametrize("compute", [(1.0, 1.0, 1.0), (1.0, 0.5, 0.25), (1.0, 1.0, 0.75, 0.5)], ids=str)
def test_stale_workers_keep_the_pace_and_pull_as_in_a_simulation(compute, staleness):
    seconds, pulls = clocks(compute, staleness, 400)
    price = parameter_server(BANDWIDTH, "stale", 0, compute, 1, staleness)
    assert price.seconds == pytest.approx(seconds / 400, rel=0.01)
    price = parameter_server(BANDWIDTH, "stale", 1000, compute, 1, staleness)
    assert price.sent == pytest.approx(1000 * max(1, sum(pulls)), rel=0.02)


def test_synchronous_workers_wait_for_the_slowest_and_asynchronous_ones_do_not():
    compute = (1.0, 0.5, 0.25)
    synchronous = parameter_server(BANDWIDTH, "synchronous", 500, compute, 3)
    assert synchronous.seconds == pytest.approx(1.0 + 2 * 0.5)
    assert (synchronous.sent, synchronous.memory) == (500, 1000)
    assert synchronous == parameter_server(BANDWIDTH, "stale", 500, compute, 3, 0)
    asynchronous = parameter_server(BANDWIDTH, "asynchronous", 0, compute, 3)
    assert asynchronous.seconds == pytest.approx(3 / (1 + 2 + 4))


@pytest.mark.parametrize("mode", ["synchronous", "stale", "asynchronous"])
def test_few_servers_are_a_bottleneck(mode):
    """Of 8 workers, one server sends and receives 8 times the bytes of a worker, eight servers as much as a worker."""
    one = parameter_server(BANDWIDTH, mode, 1000, [0.0] * 8, 1)
    eight = parameter_server(BANDWIDTH, mode, 1000, [0.0] * 8, 8)
    assert (one.seconds, eight.seconds) == (pytest.approx(16.0), pytest.approx(2.0))
    assert (one.sent, eight.sent) == (8000, 1000)


# Pipelines


def one_way(stages, micro_batches, is_split):
    """Operations of each rank in 1F1B; with gradients of weights apart, which stage r puts off by r micro batches."""
    orders = []
    for rank in range(stages):
        warmup = stages - rank - 1
        order = [[("forward", 0, n)] for n in range(min(warmup, micro_batches))]
        for n in range(micro_batches):
            if n + warmup < micro_batches:
                order.append([("forward", 0, n + warmup)])
            order.append([("input" if is_split else "backward", 0, n)])
            if is_split and n >= rank:
                order.append([("weights", 0, n - rank)])
        if is_split:
            order += [[("weights", 0, n)] for n in range(micro_batches - rank, micro_batches)]
        orders.append(order)
    return orders


def both_ways(stages, micro_batches):
    """Operations of each rank in DualPipe; a list of two is a pair that overlaps."""
    half = stages // 2
    orders = []
    for rank in range(stages):
        from_end = min(rank, stages - 1 - rank)
        to_middle = half - from_end - 1
        counts = {}
        late = []
        order = []

        def take(kind, far, rank=rank, counts=counts):
            direction = far ^ (rank >= half)
            key = (kind == "forward", direction)
            counts[key] = counts.get(key, -1) + 1
            return kind, direction, counts[key]

        def put_off(far, late=late, take=take):
            taken = take("input", far)
            late.append(("weights", *taken[1:]))
            return taken

        order += [[take("forward", 0)] for _ in range(2 * to_middle)]
        for _ in range(from_end + 1):
            order += [[take("forward", 0)], [take("forward", 1)]]
        for _ in range(to_middle):
            order += [[put_off(1)], [late.pop(0)], [take("forward", 1)]]
        for n in range(micro_batches // 2 - stages + from_end + 1):
            pair = [take("forward", 0), take("backward", 1)]
            order += [[pair[0]], [pair[1]]] if n == 0 and to_middle == 0 else [pair]
            order.append([take("forward", 1), take("backward", 0)])
        for _ in range(to_middle):
            order += [[take("backward", 1)], [take("forward", 1), take("backward", 0)]]
        for n in range(2 * (from_end + 1)):
            order.append([put_off(1 - n % 2) if n > from_end else take("backward", 1 - n % 2)])
        for _ in range(to_middle):
            order += [[late.pop(0)], [put_off(0)]]
        order += [[one] for one in late]
        orders.append(order)
    return orders


def makespan(orders, seconds):
    """Seconds until all ranks have run their operations in order, each as soon as its inputs are there."""
    ended = {}
    clock = [0.0] * len(orders)
    position = [0] * len(orders)

    def inputs(rank, kind, direction, n):
        step = -1 if direction else 1
        if kind == "weights":
            return [(rank, "backward", direction, n)]
        if kind == "forward":
            return [(rank - step, "forward", direction, n)] * (0 <= rank - step < len(orders))
        needed = [(rank, "forward", direction, n)]
        return needed + [(rank + step, "backward", direction, n)] * (0 <= rank + step < len(orders))

    while any(position[rank] < len(order) for rank, order in enumerate(orders)):
        before = sum(position)
        for rank, order in enumerate(orders):
            while position[rank] < len(order):
                together = order[position[rank]]
                needed = [key for operation in together for key in inputs(rank, *operation)]
                if not all(key in ended for key in needed):
                    break
                clock[rank] = max([clock[rank], *(ended[key] for key in needed)])
                clock[rank] += seconds["pair"] if len(together) == 2 else seconds[together[0][0]]
                for kind, direction, n in together:
                    ended[rank, "backward" if kind == "input" else kind, direction, n] = clock[rank]
                position[rank] += 1
        assert sum(position) > before, "ranks wait for each other"
    return max(clock)


def times_of(forward, into, weights, pair=None):
    backward = into + weights
    times = {"forward": forward, "backward": backward, "input": into, "weights": weights}
    return times | {"pair": pair or forward + backward}


def priced(schedule, stages, micro_batches, times, **options):
    keys = {"forward": times["forward"], "backward": times["backward"], "weight_grad": times["weights"]}
    sizes = {"weights": 100.0, "activations": 1.0, "boundary": 0.0} | options
    return pipeline(NODES, schedule, stages, micro_batches, **keys, **sizes)


@pytest.mark.parametrize("stages", [1, 2, 4, 7])
@pytest.mark.parametrize("parts", [(1.0, 1.0, 1.0), (2.0, 3.0, 1.0), (3.0, 2.0, 2.0)], ids=str)
def test_one_way_schedules_take_the_time_of_a_simulation(parts, stages):
    times = times_of(*parts)
    for micro_batches in (stages, 3 * stages + 1):
        for schedule, is_split in (("1f1b", False), ("zero_bubble", True)):
            expected = makespan(one_way(stages, micro_batches, is_split), times)
            assert priced(schedule, stages, micro_batches, times).seconds == pytest.approx(expected), schedule


@pytest.mark.parametrize("stages", [2, 4, 6, 8])
def test_dualpipe_takes_about_the_time_of_a_simulation(stages):
    equal = times_of(1.0, 1.0, 1.0)
    for micro_batches in (2 * stages, 4 * stages + 2):
        orders = both_ways(stages, micro_batches)
        assert priced("dualpipe", stages, micro_batches, equal).seconds == pytest.approx(makespan(orders, equal))
        for parts in ((2.0, 2.0, 1.0, 4.5), (3.0, 2.0, 2.0, 6.0), (2.0, 3.0, 1.0, 6.0)):
            times = times_of(*parts)
            price = priced("dualpipe", stages, micro_batches, times, overlapped=times["pair"])
            assert price.seconds == pytest.approx(makespan(orders, times), rel=0.05)


@pytest.mark.parametrize("stages", [4, 6, 8])
def test_dualpipe_gains_on_each_pair_and_in_the_bubble(stages):
    times = times_of(1.0, 1.0, 1.0)
    micro_batches = 3 * stages
    pairs = sum(len(together) == 2 for together in both_ways(stages, micro_batches)[0])
    shorter = priced("dualpipe", stages, micro_batches, times, overlapped=2.5).seconds
    gain = priced("dualpipe", stages, micro_batches, times).seconds - shorter
    assert gain == pytest.approx(0.5 * (pairs + stages / 2 - 1))


def in_flight(order):
    """Most micro batches whose activations a rank keeps."""
    changes = [(kind == "forward") - (kind in ("input", "backward")) for one in order for kind, _, _ in one]
    return max(itertools.accumulate(changes))


def test_memory_is_weights_and_micro_batches_in_flight():
    times = times_of(1.0, 1.0, 1.0)
    memory = {name: priced(name, 8, 32, times).memory for name in ("1f1b", "zero_bubble", "pipedream", "dualpipe")}
    assert memory["1f1b"] == memory["zero_bubble"] == 100 + max(map(in_flight, one_way(8, 32, False)))
    assert memory["dualpipe"] == 200 + 8 + 1
    assert max(map(in_flight, both_ways(8, 32))) in (8, 9)  # the rank of most; a pair counts its forward pass first
    assert memory["pipedream"] == 8 * 100 + 8  # a version of the weights for each micro batch in flight


def test_pipedream_has_no_bubble():
    times = times_of(1.0, 1.0, 1.0)
    assert priced("pipedream", 8, 32, times).seconds == 32 * 3.0


@pytest.mark.parametrize(("stages", "sends"), [(1, 0), (2, 6), (3, 12), (6, 12)])
def test_stages_send_activations_one_way_and_gradients_the_other(stages, sends):
    times = times_of(1.0, 1.0, 1.0)
    price = pipeline_on(BANDWIDTH, stages, times)
    assert price.sent == 1000 * sends
    assert price.seconds == pytest.approx((6 + stages - 1) * 3.0 + sends)


def pipeline_on(cluster, stages, times):
    keys = {"forward": times["forward"], "backward": times["backward"], "weight_grad": times["weights"]}
    return pipeline(cluster, "1f1b", stages, 6, **keys, weights=1.0, activations=1.0, boundary=1000)


# All


EVERY = {
    **{f"all_reduce {name}": lambda c, n, name=name: all_reduce(c, name, n, 6000) for name in ("ring", "grid")},
    "all_reduce hierarchical": lambda c, n: all_reduce(c, "hierarchical", n, 6000),
    **{
        name: lambda c, n, name=name: gradient_compression(c, name, (64, 32), n)
        for name in ("powersgd", "dgc", "onebit", "local_sgd", "diloco")
    },
    **{
        name: lambda c, n, name=name: tensor_parallel(c, name, 96, 48, 24, n, "fp32")
        for name in ("1d", "2d", "2.5d", "3d")
    },
}


@pytest.mark.parametrize("name", EVERY)
def test_time_is_that_of_the_bytes_where_nothing_else_takes_time(name):
    price = EVERY[name](BANDWIDTH, 64)
    assert price.sent > 0
    assert price.seconds == pytest.approx(price.sent / 1e3)


@pytest.mark.parametrize("name", EVERY)
def test_one_rank_sends_nothing(name):
    price = EVERY[name](replace(NODES, num_ranks=1, links=()), 1)
    assert (price.sent, price.seconds) == (0, pytest.approx(0, abs=1e-200))


def test_an_all_reduce_of_one_rank_costs_nothing():
    assert all_reduce(NODES, "grid", 1, 1e9) == Price(0, 0, 0)


STAGES = {"forward": 1.0, "backward": 2.0, "weight_grad": 1.0, "weights": 1.0, "activations": 1.0, "boundary": 1.0}


@pytest.mark.parametrize(
    ("call", "key", "value"),
    [
        (lambda: all_reduce(NODES, "tree", 4, 1.0), "algorithm", "'tree'"),
        (lambda: all_reduce(NODES, "ring", 65, 1.0), "num_ranks", 65),
        (lambda: all_reduce(NODES, "ring", 0, 1.0), "num_ranks", 0),
        (lambda: gradient_compression(NODES, "topk", (4, 4), 4), "method", "'topk'"),
        (lambda: gradient_compression(NODES, "powersgd", (4, 4), 4, rank=0), "rank", 0),
        (lambda: gradient_compression(NODES, "dgc", (4, 4), 4, density=0.0), "density", 0.0),
        (lambda: gradient_compression(NODES, "dgc", (4, 4), 4, density=1.5), "density", 1.5),
        (lambda: gradient_compression(NODES, "diloco", (4, 4), 4, sync_every=0), "sync_every", 0),
        (lambda: tensor_parallel(NODES, "4d", 4, 4, 4, 4, "fp32"), "scheme", "'4d'"),
        (lambda: tensor_parallel(NODES, "2d", 4, 4, 4, 8, "fp32"), "num_ranks", 8),
        (lambda: tensor_parallel(NODES, "2.5d", 4, 4, 4, 12, "fp32", 2), "num_ranks", 12),
        (lambda: tensor_parallel(NODES, "2.5d", 4, 4, 4, 4, "fp32", 0), "depth", 0),
        (lambda: tensor_parallel(NODES, "2d", 4, 4, 4, 8, "fp32", 2), "depth", 2),
        (lambda: tensor_parallel(NODES, "3d", 4, 4, 4, 9, "fp32"), "num_ranks", 9),
        (lambda: tensor_parallel(NODES, "1d", 4, 4, 4, 2, "fp64"), "device.peak for", "fp64"),
        (lambda: parameter_server(NODES, "eventual", 1.0, [1.0], 1), "mode", "'eventual'"),
        (lambda: parameter_server(NODES, "stale", 1.0, [1.0], 0), "num_servers", 0),
        (lambda: parameter_server(NODES, "stale", 1.0, [], 1), "workers", 0),
        (lambda: parameter_server(NODES, "stale", 1.0, [1.0], 1, -1), "staleness", -1),
        (lambda: parameter_server(NODES, "stale", 1.0, [1.0] * 60, 5), "num_ranks", 65),
        (lambda: pipeline(NODES, "gpipe", 4, 4, **STAGES), "schedule", "'gpipe'"),
        (lambda: pipeline(NODES, "1f1b", 4, 3, **STAGES), "micro_batches", 3),
        (lambda: pipeline(NODES, "dualpipe", 4, 6, **STAGES), "micro_batches", 6),
        (lambda: pipeline(NODES, "dualpipe", 4, 9, **STAGES), "micro_batches", 9),
        (lambda: pipeline(NODES, "dualpipe", 3, 8, **STAGES), "stages", 3),
        (lambda: pipeline(NODES, "1f1b", 65, 99, **STAGES), "num_ranks", 65),
    ],
)
def test_wrong_arguments_name_key_and_value(call, key, value):
    with pytest.raises(UserError) as refused:
        call()
    assert f"{key}={value}" in str(refused.value) or f"{key} {value}" in str(refused.value)
    assert "\n" not in str(refused.value)
