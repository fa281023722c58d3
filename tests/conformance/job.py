"""A job of real processes, run as ``python job.py RANK SIZE RENDEZVOUS TIMEOUT FAULT``, as a user's script is."""

import datetime
import os
import signal
import sys

import torch
import torch.distributed as dist

import fmoe


class Expert(torch.nn.Module):
    """Goes wrong on rank 1 in the third forward pass, between two exchanges."""

    def __init__(self, d_model, fault):
        super().__init__()
        self.map = torch.nn.Linear(d_model, d_model)
        self.fault = fault
        self.calls = 0

    def forward(self, x):
        self.calls += 1
        if dist.get_rank() == 1 and self.calls == 3:
            if self.fault == "raise":
                raise ValueError("an expert of rank 1 is broken")
            os.kill(os.getpid(), getattr(signal, self.fault))
        return self.map(x)


def main():
    rank, size, rendezvous, timeout, fault = sys.argv[1:]
    dist.init_process_group(
        "gloo",
        init_method=f"file://{rendezvous}",
        rank=int(rank),
        world_size=int(size),
        timeout=datetime.timedelta(seconds=float(timeout)),
    )
    layer = fmoe.FMoE(
        d_model=8,
        num_experts=int(size),
        expert=lambda d_model: Expert(d_model, fault),
        moe_group=dist.group.WORLD,
        seed=1,
        name="layer 7",
    )
    for _ in range(5):
        layer(torch.randn(16, 8)).sum().backward()


main()
