"""Volume, memory and time of methods that the trainer lacks, and of the trainer's own.

Communication overlaps with nothing unless a function says so. Where the trainer has a method, the tests compare its
volume with the bytes that the trainer sends.
"""

import math
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from fmoe.errors import UserError, known_names
from pretrain.planner.cluster import DTYPE_BYTES, Cluster

_MEMORIES = {"powersgd": 1, "dgc": 2, "onebit": 2, "local_sgd": 1, "diloco": 2}  # remembered values per element


@dataclass(frozen=True)
class Price:
    """Price of a method.

    Attributes:
        sent: bytes that the busiest rank sends.
        memory: bytes that a rank holds; each function says of what.
        seconds: time from the beginning to the end.
    """

    sent: float
    memory: float
    seconds: float


def all_reduce(cluster: Cluster, algorithm: str, num_ranks: int, num_bytes: float) -> Price:
    """Return the price of an algorithm of `fmoe.parallel.all_reduce`, without padding and arithmetic.

    A rank sends 2 n (N - 1) / N bytes: in a ring in 2 (N - 1) transfers (Baidu's ring all-reduce), in a grid in
    2 (rows + columns - 2) (arXiv 1811.05233). Of these, a hierarchical sum sends only 2 n / I (M - 1) / M between M
    nodes of I ranks (arXiv 1807.11205).

    Args:
        algorithm: ring, hierarchical or grid. The ranks of a node share the innermost link.
        num_bytes: bytes of the tensor.

    Returns:
        Price with the memory of copies and parts, without the tensor.

    Raises:
        UserError: an argument is invalid. All functions here raise it.
    """
    _check(cluster, num_ranks, "algorithm", algorithm, ("ring", "hierarchical", "grid"))
    if num_ranks == 1:
        return Price(0, 0, 0)
    if algorithm == "hierarchical":
        node = math.gcd(num_ranks, cluster.links[0].size)
        between = ("all_reduce", num_ranks // node, num_ranks, num_bytes / node, 1)
        within = [(kind, node, node, num_bytes, 1) for kind in ("reduce_scatter", "all_gather")]
        return _price(cluster, [between, *within], num_bytes * (1 + 1 / node))
    columns = num_ranks
    if algorithm == "grid":
        columns = next(n for n in range(math.isqrt(num_ranks), 0, -1) if num_ranks % n == 0)
    along_rows = ("send", 2, columns, num_bytes / columns, 2 * (columns - 1))
    along_columns = ("send", 2, num_ranks, num_bytes / num_ranks, 2 * (num_ranks // columns - 1))
    return _price(cluster, [along_rows, along_columns], num_bytes * (1 + 2 / columns))


def gradient_compression(
    cluster: Cluster,
    method: str,
    shape: tuple[int, int],
    num_ranks: int,
    count: int = 1,
    rank: int = 1,
    density: float = 0.001,
    sync_every: int = 8,
) -> Price:
    """Return the price of averaging fp32 gradients by a method of docs/communication.md in a step after its warm-up.

    The seconds cover the collectives, and one read and one write of gradients and memories: the least that a method
    takes.

    Args:
        method: powersgd (arXiv 1905.13727; torch leaves a matrix whole that would not shrink to less than half), dgc
            (arXiv 1712.01887), onebit (arXiv 2102.02888, with a magnitude per 1,024 elements), local_sgd (arXiv
            1805.09767) or diloco (arXiv 2311.08105).
        shape: rows and columns of a parameter; 1 column for a vector. An expert's matrix is a parameter of its own.
        count: number of equal parameters, in one bucket.
        rank: rank of the factors of powersgd.
        density: share of the elements that dgc sends.
        sync_every: number of steps between averages of local_sgd and diloco. The price is the mean per step.

    Returns:
        Price with the memory of what a method remembers, and of its copy for a skipped step.
    """
    _check(cluster, num_ranks, "method", method, _MEMORIES, rank=rank, density=density, sync_every=sync_every)
    if density > 1:
        raise UserError(f"density={density} must be at most 1")
    rows, columns = shape
    total = rows * columns * count
    memory = 8 * _MEMORIES[method] * total
    share = 1.0
    kinds = ["all_reduce"]
    parts = [4 * total]
    width = min(rows, columns, rank)
    if method == "powersgd" and 2 * width * (rows + columns) < rows * columns:
        parts = [4 * width * rows * count, 4 * width * columns * count]
        memory += 2 * sum(parts)
    if method == "dgc":
        kinds = ["all_gather"]
        parts = [4 * num_ranks * count * math.ceil(density * rows * columns)] * 2  # values and indices
    if method == "onebit":
        kinds = ["all_to_all", "all_gather"]  # to the rank that averages a part, and back
        chunk = 1024 * math.ceil(total / (1024 * num_ranks))
        parts = [num_ranks * chunk // 8, num_ranks * chunk // 256]  # signs and magnitudes
        memory += 8 * chunk
    if method in ("local_sgd", "diloco"):
        memory //= 2  # without a copy
        share = 1 / sync_every
    calls = [(kind, num_ranks, num_ranks, part, share) for kind in kinds for part in parts]
    return _price(cluster, calls, memory, share * cluster.move_seconds(8 * total * (1 + _MEMORIES[method])))


def tensor_parallel(
    cluster: Cluster, scheme: str, rows: int, d_in: int, d_out: int, num_ranks: int, dtype: str, depth: int = 1
) -> Price:
    """Return the price of forward and backward pass of a linear layer, X A = Y.

    With the backward pass, and matrices of x, a and y bytes, a rank sends

    * 1d: 2 (p - 1) / p of the smaller of x and y (Megatron-LM, arXiv 1909.08053): of Y for a row-parallel
      layer, of the gradient of X for a column-parallel one.
    * 2d: 3 (q - 1) / q^2 (x + a) on q^2 ranks, in q steps (SUMMA; Optimus, arXiv 2104.05343).
    * 2.5d: 3 (q - 1) / q^2 (x / depth + a) on q^2 depth ranks, and an all-reduce of the gradient of A over the depth
      (Tesseract, arXiv 2105.14500).
    * 3d: 2 (q - 1) / q^3 (x + a + y) on q^3 ranks (arXiv 2105.14450). The backward pass uses what the forward pass
      has gathered.

    A step of SUMMA counts as an all-gather or a reduce-scatter of one block per rank, whose volume is the same. All
    three products count as the first.

    Args:
        scheme: 1d, 2d, 2.5d or 3d.
        rows: number of tokens of the group.
        depth: number of layers of q^2 ranks, for 2.5d.

    Returns:
        Price with the memory of X, A, Y and of blocks of other ranks, without gradients.
    """
    _check(cluster, num_ranks, "scheme", scheme, ("1d", "2d", "2.5d", "3d"), depth=depth)
    power = int(scheme[0])
    root = round((num_ranks / depth) ** (1 / power))
    if depth * root**power != num_ranks or (depth > 1 and scheme != "2.5d"):
        raise UserError(f"num_ranks={num_ranks} with depth={depth} must be depth q^{power}; only 2.5d has a depth")
    side = root if power > 1 else 1
    steps = root if power == 2 else 1
    seconds = 3 * steps * cluster.gemm_seconds(rows / (side * depth), d_in / side, d_out / root, dtype)
    x = DTYPE_BYTES[dtype] * rows * d_in
    a = DTYPE_BYTES[dtype] * d_in * d_out * depth
    y = DTYPE_BYTES[dtype] * rows * d_out
    memory = (x + a + y) / num_ranks
    if power == 1:
        whole = min(x, y)
        return _price(cluster, [("all_reduce", root, root, whole, 1)], memory + whole * (1 - 1 / root), seconds)
    gathers = 2 * steps if power == 2 else 1
    calls = [("all_reduce", depth, num_ranks, a / num_ranks, 1)]
    for matrix, span in ((x, root), (a, root**2), (y, root**3))[:power]:
        block = matrix / (depth * root**2)
        memory += block
        calls += [("all_gather", root, span, block, gathers), ("reduce_scatter", root, span, block, steps)]
    return _price(cluster, calls, memory, seconds)


def parameter_server(
    cluster: Cluster, mode: str, num_bytes: float, compute: Sequence[float], num_servers: int, staleness: int = 0
) -> Price:
    """Return the price of one gradient of each worker: push it to the servers, and pull the parameters.

    Servers divide the parameters evenly, and are no workers (Li et al., OSDI 2014). A transfer takes the time of the
    busier of worker and server. The servers' arithmetic is left out.

    * synchronous: the slowest worker's computation, a push and a pull.
    * stale: the slowest workers set the pace, and pull once in ``staleness`` + 1 steps. The others are ``staleness``
      steps ahead of them, and pull in each step (stale synchronous parallel, Ho et al., NeurIPS 2013).
    * asynchronous: no worker waits for another; the links of the servers are the limit.

    Args:
        mode: synchronous, stale or asynchronous.
        num_bytes: bytes of the parameters, and of a gradient.
        compute: seconds of a step of each worker.
        staleness: number of steps that a worker may be ahead of the slowest, for stale.

    Returns:
        Price with the memory of parameters and gradient of a worker; the servers have the optimizer. Bytes and
        seconds are means over many steps.
    """
    workers = len(compute)
    num_ranks = workers + num_servers
    _check(
        cluster,
        num_ranks,
        "mode",
        mode,
        ("synchronous", "stale", "asynchronous"),
        num_servers=num_servers,
        workers=workers,
    )
    if staleness < 0:
        raise UserError(f"staleness={staleness} must be at least 0")
    period = 1 + staleness * (mode == "stale")
    slowest = max(compute)
    pulls = workers - compute.count(slowest) * (1 - 1 / period)
    transfer = cluster.collective_seconds("send", 2, num_ranks, num_bytes * max(1, workers / num_servers))
    seconds = slowest + transfer + transfer / period
    if mode == "asynchronous":
        seconds = workers / sum(1 / (own + 2 * transfer) for own in compute)
    return Price(num_bytes * max(1, pulls / num_servers), 2 * num_bytes, seconds)


def pipeline(
    cluster: Cluster,
    schedule: str,
    stages: int,
    micro_batches: int,
    *,
    forward: float,
    backward: float,
    weight_grad: float,
    weights: float,
    activations: float,
    boundary: float,
    overlapped: float = 0,
) -> Price:
    """Return the price of a step of equal stages, one per rank.

    The DeepSeek-V3 report (arXiv 2412.19437, table 2) has bubbles, copies of weights and micro batches in flight of
    1f1b, zero_bubble (ZB-H1, arXiv 2401.10241) and dualpipe. In DualPipe's published schedule, all but
    3/2 stages - 1 micro batches overlap with the other direction. PipeDream has no bubble after its start, and the
    first stage keeps a version of its weights for each micro batch in flight (arXiv 1806.03377).

    Args:
        schedule: 1f1b, zero_bubble, pipedream or dualpipe.
        micro_batches: at least ``stages``; for dualpipe, even and at least 2 ``stages``.
        forward: seconds of a forward pass of a micro batch through a stage.
        backward: seconds of its backward pass, with the gradients of weights.
        weight_grad: seconds of the gradients of weights. The bubbles are exact up to ``forward``.
        weights: bytes of the weights of a stage.
        activations: bytes that a stage keeps of a micro batch.
        boundary: bytes of a micro batch between two stages.
        overlapped: seconds of a forward and a backward pass that overlap, for dualpipe; 0 for no gain.

    Returns:
        Price with the memory of weights and activations of the first stage.
    """
    both = forward + backward
    pair = overlapped or both
    schedules = {  # bubble, copies of weights, micro batches in flight
        "1f1b": ((stages - 1) * both, 1, stages),
        "zero_bubble": ((stages - 1) * (both - 2 * weight_grad), 1, stages),
        "pipedream": (0.0, stages, stages),
        "dualpipe": ((stages / 2 - 1) * (pair + backward - 3 * weight_grad), 2, stages + 1),
    }
    _check(cluster, stages, "schedule", schedule, schedules)
    bubble, copies, kept = schedules[schedule]
    directions = 2 if schedule == "dualpipe" else 1
    if stages % directions or micro_batches % directions or micro_batches < directions * stages:
        limit = f"multiples of {directions}, micro_batches at least {directions} times as many"
        raise UserError(f"micro_batches={micro_batches} and stages={stages} must be {limit}")
    alone = 1.5 * stages - 1 if directions == 2 else micro_batches
    seconds = alone * both + (micro_batches - alone) * pair + max(0, bubble)
    sends = [("send", 2, stages, boundary, micro_batches * min(2, stages - 1))]
    return _price(cluster, sends, copies * weights + kept * activations, seconds)


def _check(cluster: Cluster, num_ranks: int, key: str, name: str, known: Collection[str], **positive: float) -> None:
    """Raise UserError if a name is not known, an option is not above 0, or the cluster has not so many ranks."""
    if name not in known:
        raise UserError(f"{key}={name!r} is not known; {known_names(name, known)}")
    for option, value in positive.items():
        if value <= 0:
            raise UserError(f"{option}={value} must be above 0")
    if not 1 <= num_ranks <= cluster.num_ranks:
        raise UserError(f"num_ranks={num_ranks} must be 1 to {cluster.num_ranks}, the ranks of cluster {cluster.name}")


def _price(
    cluster: Cluster, calls: Sequence[tuple[str, int, int, float, float]], memory: float, seconds: float = 0
) -> Price:
    """Return the price of collectives one after the other, and of ``seconds`` of computation.

    Args:
        calls: kind, group_size, span and num_bytes of collectives, and how often each is called.
    """
    sent = 0.0
    for kind, group_size, span, num_bytes, times in calls:
        if group_size > 1 and times:
            share = 1 if kind == "send" else 1 - 1 / group_size
            sent += times * num_bytes * share * (1 + (kind == "all_reduce"))
            seconds += times * cluster.collective_seconds(kind, group_size, span, num_bytes)
    return Price(sent, memory, seconds)
