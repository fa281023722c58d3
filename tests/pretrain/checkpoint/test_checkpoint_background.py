"""Writing in a thread: what training does meanwhile changes nothing, and an error is one on every rank at one step."""

import threading
import time

import pytest
import torch
import torch.distributed as dist
from pieces import whole
from rank_pool import Raised

from pretrain.checkpoint import SaveError, TensorPiece, collect, latest, save, write
from pretrain.checkpoint.background import BackgroundWriter
from pretrain.checkpoint.host import HostBuffers

SHAPE = (64, 32)


def pieces_of(tensors):
    return [whole(name, tensor) for name, tensor in tensors.items()]


def contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_is_trained_meanwhile_is_not_written(tmp_path):
    """Files equal those of a synchronous save of that step, byte for byte, twice from the same host memory."""
    tensors = {"w": torch.randn(SHAPE), "t": torch.randn(32, 64).T, "h": torch.randn(SHAPE).bfloat16()}
    writer, buffers, places = BackgroundWriter(), HostBuffers(), []
    for step in (1, 2):
        expected = save(tmp_path / "sync", step, pieces_of(tensors), {"step": step}, {"rng": torch.get_rng_state()})
        snapshot = collect(pieces_of(tensors), {"step": step}, {"rng": torch.get_rng_state()}, buffers=buffers)
        places.append([piece.data.data_ptr() for piece in snapshot.pieces])
        trained = threading.Event()

        def work(group, step=step, snapshot=snapshot, trained=trained):
            assert trained.wait(10)
            write(tmp_path / "async", step, snapshot, group=group)

        writer.start(work)
        writer.poll()
        assert writer.is_busy
        for tensor in tensors.values():
            tensor.add_(1)
        torch.rand(3)
        trained.set()
        writer.wait()
        assert contents(latest(tmp_path / "async")) == contents(expected)
    assert places[0] == places[1], "fresh memory for each save"


def test_one_at_a_time():
    writer, running = BackgroundWriter(), []

    def work(group):
        assert not running
        running.append(1)
        time.sleep(0.02)
        running.pop()

    for _ in range(5):
        writer.start(work)
    writer.wait()
    assert not running and not writer.is_busy


def step_of_the_error(seconds_of_rank, failing):
    """Steps of 10 ms until the error comes; the thread of rank r takes ``seconds_of_rank[r]``."""
    rank, writer = dist.get_rank(), BackgroundWriter()

    def work(group):
        time.sleep(seconds_of_rank[rank])
        if rank in failing:
            raise SaveError(f"the disk of rank {rank} is full")

    writer.start(work)
    for step in range(1000):
        try:
            writer.poll()
        except Exception as error:
            total = torch.ones(1)
            dist.all_reduce(total)  # the group that training uses is in order
            return step, type(error).__name__, str(error), total.item()
        time.sleep(0.01)
    return None


@pytest.mark.parametrize("failing", [(0, 1), (1,)], ids=["all", "one"])
@pytest.mark.parametrize("seconds", [(0.0, 0.2), (0.2, 0.0)], ids=str)
def test_an_error_surfaces_at_the_same_step_everywhere(two_ranks, seconds, failing):
    (step_0, kind_0, text_0, total_0), (step_1, kind_1, text_1, total_1) = two_ranks.run(
        step_of_the_error, seconds, failing
    )
    assert step_0 == step_1 >= 3, "before the slower thread had ended"
    assert kind_0 == kind_1 == "SaveError"
    assert "full" in text_0 and "full" in text_1
    assert total_0 == total_1 == 2.0


def save_beside_training(folder, steps):
    """Saves with the thread's group while the main thread reduces with its own; the totals it got."""
    rank, writer, buffers, totals = dist.get_rank(), BackgroundWriter(), HostBuffers(), []
    full, mine = torch.arange(64.0).view(8, 8), slice(4 * rank, 4 * rank + 4)
    for step in range(1, steps + 1):
        writer.wait()
        piece = TensorPiece("w", (8, 8), (4 * rank, 0), (4, 8), full[mine] * step)
        snapshot = collect([piece], {"step": step}, {"rank": rank}, buffers=buffers)
        writer.start(lambda group, step=step, snapshot=snapshot: write(folder, step, snapshot, group=group))
        for _ in range(20):
            total = torch.ones(1)
            dist.all_reduce(total)
            totals.append(total.item())
            writer.poll()
    writer.wait()
    return totals


def test_two_ranks_write_while_they_communicate(two_ranks, tmp_path):
    results = two_ranks.run(save_beside_training, tmp_path, 4)
    assert not any(isinstance(result, Raised) for result in results), results
    assert results == [[2.0] * 80] * 2
    from pretrain.checkpoint import open_checkpoint, steps

    assert steps(tmp_path) == [1, 2, 3, 4]
    for step in steps(tmp_path):
        checkpoint = open_checkpoint(tmp_path / f"step-{step:08d}")
        checkpoint.verify()
        assert torch.equal(checkpoint.read("w"), torch.arange(64.0).view(8, 8) * step)
