"""Actions of ranks in the fault tests; each runs in new processes, with a short timeout of their group."""

import datetime
import os
import signal
import time

import torch
import torch.distributed as dist

import fmoe

WIDTH = 16


def layer_of(exchange="all_to_all", d_model=WIDTH, gate="naive", **options):
    return fmoe.FMoE(
        d_model=d_model,
        num_experts=4,
        d_hidden=8,
        gate=gate,
        moe_group=dist.group.WORLD,
        exchange=exchange,
        exchange_options=options.pop("exchange_options", None),
        seed=1,
        name="the layer",
        **options,
    )


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


def differing_width(exchange):
    width = WIDTH + 4 * (dist.get_rank() == 1)
    layer = layer_of(exchange, d_model=width)
    return report(lambda: layer(torch.randn(6, width)))


def kill_later(pid, seconds):
    """Lest a stopped process stays behind."""
    if os.fork() == 0:
        time.sleep(seconds)
        os.kill(pid, signal.SIGKILL)
        os._exit(0)


def signalled(exchange, number, seconds, victim):
    """Two steps together; then the victim gets the signal in the middle of an exchange of the third."""
    new_world(seconds)
    layer = layer_of(exchange)
    x = torch.randn(6, WIDTH)
    for _ in range(2):
        layer(x).sum().backward()

    if dist.get_rank() == victim:

        def struck(*_):
            if number == signal.SIGSTOP:
                kill_later(os.getpid(), seconds + 3)  # stopped for good, as far as the others can tell
            os.kill(os.getpid(), number)

        layer.experts.register_forward_pre_hook(struck)  # rows have come, outputs are waited for
    return report(lambda: layer(x).sum().backward())


class BrokenGate(fmoe.gates.NaiveRouter):
    def forward(self, x_TD, groups):
        if dist.get_rank() == 1:
            raise ValueError("the gate of rank 1 is broken")
        return super().forward(x_TD, groups)


def broken_gate(exchange):
    """An error before the exchange: everyone hears of it, and can go on afterwards (but for padded, whose workers
    exchange nothing before the rows)."""
    layer = layer_of(exchange, gate=BrokenGate)
    seen = report(lambda: layer(torch.randn(6, WIDTH)))
    again = None
    if exchange != "padded":
        again = layer_of(exchange)(torch.randn(6, WIDTH)).isfinite().all().item()
    return seen, again


class BrokenExpert(torch.nn.Module):
    def __init__(self, d_model):
        super().__init__()
        self.map = torch.nn.Linear(d_model, d_model)

    def forward(self, x):
        if dist.get_rank() == 1:
            raise ValueError("an expert of rank 1 is broken")
        return self.map(x)


def broken_expert(exchange):
    """An error between two exchanges: the others wait, and are told."""
    new_world(30)
    layer = layer_of(exchange, expert=BrokenExpert)
    seen = report(lambda: layer(torch.randn(6, WIDTH)))
    time.sleep(3)  # an exit now would also break the connection
    return seen


class BrokenCounts(fmoe.gates.SwitchGate):
    def forward(self, inp):
        if dist.get_rank() == 1:
            raise ValueError("rank 1 fails before the gate's own exchange")
        return super().forward(inp)


def broken_before_the_gates_exchange():
    new_world(30)
    layer = fmoe.FMoE(num_expert=2, d_model=WIDTH, world_size=2, gate=BrokenCounts, expert=BrokenExpert)
    seen = report(lambda: layer(torch.randn(6, WIDTH)))
    time.sleep(3)
    return seen


def random_counts(exchange, options, patterns):
    """Token counts of all kinds, none at all included; the output is that of one worker."""
    rank, size = dist.get_rank(), dist.get_world_size()
    layer = layer_of(exchange, exchange_options=options)
    alone = fmoe.FMoE(d_model=WIDTH, num_experts=4, d_hidden=8, seed=1)
    generator = torch.Generator().manual_seed(3)
    worst = 0.0
    for _ in range(patterns):
        lengths = (
            torch.randint(0, 12, (size,), generator=generator) * torch.randint(0, 2, (size,), generator=generator)
        ).tolist()
        rows = [torch.randn(length, WIDTH, generator=generator) for length in lengths]
        x, y = rows[rank].clone().requires_grad_(), rows[rank].clone().requires_grad_()
        out, expected = layer(x), alone(y)
        out.square().sum().backward()
        expected.square().sum().backward()
        for actual, wanted in ((out, expected), (x.grad, y.grad)):
            assert actual.shape == wanted.shape
            if wanted.numel():
                worst = max(worst, ((actual - wanted).norm() / wanted.norm().clamp(min=1e-12)).item())
    return worst
