"""Actions of ranks in the fault tests; each runs in new processes, with a short timeout of their group."""

import datetime
import os
import signal
import time

import torch
import torch.distributed as dist
from compare import relative_error
from exchange_libraries import installed

import fmoe

WIDTH = 16
OPTIONS = {"d_model": WIDTH, "num_experts": 4, "d_hidden": 8, "seed": 1, "name": "the layer"}


def report(action):
    """(name of the exception's class, its message, seconds that it took)."""
    begin = time.monotonic()
    try:
        action()
    except Exception as error:
        return type(error).__name__, str(error), time.monotonic() - begin
    return None, "", time.monotonic() - begin


def new_world(seconds):
    """The same processes, with another timeout."""
    rank, size = dist.get_rank(), dist.get_world_size()
    store = dist.distributed_c10d._get_default_store()
    store.add("connected", 1)
    while store.add("connected", 0) < size:  # a rank that leaves a group fails those that still connect to it
        time.sleep(0.01)
    dist.destroy_process_group()
    dist.init_process_group(
        "gloo",
        store=dist.PrefixStore("again", store),
        rank=rank,
        world_size=size,
        timeout=datetime.timedelta(seconds=60),  # to meet; a busy machine takes its time
    )
    dist.distributed_c10d._set_pg_timeout(datetime.timedelta(seconds=seconds), dist.group.WORLD)


def kill_later(pid, seconds):
    """Lest a stopped process stays behind."""
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)


def struck(exchange, fault, seconds, victim):
    """Two steps together; then, in the third, the victim raises or gets a signal where its experts are called."""
    new_world(seconds)
    with installed(torch.float32):
        layer = fmoe.FMoE(moe_group=dist.group.WORLD, exchange=exchange, **OPTIONS)
        x = torch.randn(6, WIDTH)
        for _ in range(2):
            layer(x).sum().backward()

        def strike(*_):  # rows have come, outputs are waited for
            if fault == "raise":
                raise ValueError(f"an expert of rank {victim} is broken")
            if fault == signal.SIGSTOP:
                kill_later(os.getpid(), seconds + 3)  # stopped for good, as far as the others can tell
            os.kill(os.getpid(), fault)

        if dist.get_rank() == victim:
            layer.experts.register_forward_pre_hook(strike)
        seen = report(lambda: layer(x).sum().backward())
        if fault == "raise":
            time.sleep(3)  # an exit now would also break the connection
        return seen


def random_counts(exchange, options, patterns):
    """Largest relative error of outputs and gradients for token counts of all kinds, none at all included."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = fmoe.FMoE(moe_group=dist.group.WORLD, exchange=exchange, exchange_options=options, **OPTIONS)
    alone = fmoe.FMoE(**OPTIONS)
    generator = torch.Generator().manual_seed(3)
    errors = []
    for _ in range(patterns):
        lengths = torch.randint(0, 12, (size,), generator=generator) * torch.randint(0, 2, (size,), generator=generator)
        rows = [torch.randn(length, WIDTH, generator=generator) for length in lengths.tolist()]
        results = []
        for one in (layer, alone):
            x = rows[rank].clone().requires_grad_()
            y = one(x)
            y.square().sum().backward()
            results.append((y, x.grad))
        errors += [relative_error(a, b) for a, b in zip(*results, strict=True)]
    return max(errors)
