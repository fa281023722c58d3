"""Run by test_checkpoint_kill: saves in child processes that are killed, and checks what they left. Not a test itself.

``python kill_saves.py FOLDER calls|NUMBER``: at each call in turn, or so often at random. Forks, so that deaths
cost one import of torch.
"""

import os
import random
import signal
import sys
import time
from pathlib import Path

import torch
from pieces import whole

from pretrain.checkpoint import keep_last, latest, open_checkpoint, save, steps

SHAPE = (256, 1024)


def save_step(folder, step):
    """Saves one and removes all but the newest two, as a trainer does."""
    data = torch.full(SHAPE, float(step))
    save(folder, step, [whole("w", data)], {"step": step}, {})
    keep_last(folder, 2)


def check(folder):
    """Every step that counts as complete is whole; the newest is returned."""
    for step in steps(folder):
        checkpoint = open_checkpoint(folder / f"step-{step:08d}")
        checkpoint.verify()
        assert checkpoint.state == {"step": step}
        assert (checkpoint.read("w") == step).all()
    newest = latest(folder)
    assert newest is not None, "the older checkpoint is gone"
    return open_checkpoint(newest).step


def fork(child):
    pid = os.fork()
    if pid == 0:
        try:
            child()
        finally:
            os._exit(1)
    return pid


def die_at_call(number):
    """Kills this process before its number-th call of a function that changes the disk."""
    left = number

    def counted(function):
        def call(*args, **kwargs):
            nonlocal left
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)
            left -= 1
            return function(*args, **kwargs)

        return call

    for name in ("fsync", "rename", "mkdir", "unlink", "rmdir", "open"):
        setattr(os, name, counted(getattr(os, name)))


def at_every_call(folder):
    newest = check(folder)
    for number in range(100):

        def child(number=number, step=newest + 1):
            die_at_call(number)
            save_step(folder, step)
            os._exit(0)

        _, status = os.waitpid(fork(child), 0)
        found = check(folder)
        assert found in (newest, newest + 1)
        newest = found
        if status == 0:
            return number
    raise AssertionError("a save makes more than 100 calls")


def at_random_moments(folder, deaths):
    in_middle = 0
    for number in range(deaths):
        newest = check(folder)

        def child(step=newest + 1):
            while True:
                save_step(folder, step)
                step += 1

        pid = fork(child)
        time.sleep(random.Random(number).uniform(0.005, 0.15))
        os.kill(pid, signal.SIGKILL)
        _, status = os.waitpid(pid, 0)
        assert os.WTERMSIG(status) == signal.SIGKILL, "the child failed before it was killed"
        in_middle += any(path.suffix == ".tmp" for path in folder.iterdir())
        found = check(folder)
        assert found >= newest
        save_step(folder, found + 1)  # the leftover is no obstacle
        assert check(folder) == found + 1
    return in_middle


def main():
    torch.set_num_threads(1)  # a fork must not inherit a thread pool
    folder = Path(sys.argv[1])
    save_step(folder, 0)
    print(at_every_call(folder) if sys.argv[2] == "calls" else at_random_moments(folder, int(sys.argv[2])))


if __name__ == "__main__":
    main()
