"""A full disk, before and during a save: the older checkpoint stays, nothing is left, and the message has figures."""

import errno
import os
import re
import sys

import pytest
import torch
from pieces import whole
from rank_pool import Raised

from pretrain.checkpoint import SaveError, TensorPiece, open_checkpoint, save, steps
from pretrain.checkpoint.files import write_file

save_module = sys.modules["pretrain.checkpoint.save"]  # the package has a function of that name
MIB = 1 << 20
FIGURES = re.compile(r"the checkpoint needs (\d+) bytes, \D*(\d+) are free")


def save_mib(folder, step, mib):
    data = torch.full((mib, MIB // 4), float(step))
    return save(folder, step, [whole("w", data)], {}, {})


def refused(folder, mib, needed_at_least):
    """A save of step 2 fails, and only step 1 is there, intact. What is free according to the message."""
    with pytest.raises(SaveError) as caught:
        save_mib(folder, 2, mib)
    assert caught.value.errno == errno.ENOSPC
    needed, free = map(int, FIGURES.search(str(caught.value)).groups())
    assert needed_at_least <= needed <= needed_at_least + MIB
    assert "\n" not in str(caught.value)
    assert [path.name for path in folder.iterdir()] == ["step-00000001"]
    open_checkpoint(folder).verify()
    return free


def test_too_little_before(tmp_path, monkeypatch):
    save_mib(tmp_path, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(save_module, "free_bytes", lambda folder: 3 * MIB)
        assert refused(tmp_path, 4, 4 * MIB) == 3 * MIB
    save_mib(tmp_path, 2, 4)
    assert steps(tmp_path) == [1, 2]


def full_after(count):
    """`write_file` on a disk that takes ``count`` bytes more."""

    def write(path, buffers):
        buffers = [bytes(buffer) for buffer in buffers]
        if sum(map(len, buffers)) > count:
            path.write_bytes(b"".join(buffers)[:count])
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return write_file(path, buffers)

    return write


@pytest.mark.parametrize("where", ["shard", "save"])
def test_too_little_during(tmp_path, monkeypatch, where):
    """In the shard, and in the JSON that is written after it."""
    save_mib(tmp_path, 1, 1)
    with monkeypatch.context() as patch:
        patch.setattr(
            sys.modules[f"pretrain.checkpoint.{where}"], "write_file", full_after(300 if where == "save" else MIB)
        )
        refused(tmp_path, 4, 4 * MIB)
    save_mib(tmp_path, 2, 4)
    assert steps(tmp_path) == [1, 2]


def save_half(folder, step, free):
    """Each rank saves 1 MiB; ``free`` bytes are there according to rank 0, which asks for both."""
    import torch.distributed as dist

    save_module.free_bytes, real = (lambda _: free), save_module.free_bytes
    try:
        rank = dist.get_rank()
        piece = TensorPiece("w", (2, MIB // 4), (rank, 0), (1, MIB // 4), torch.ones(1, MIB // 4))
        return save(folder, step, [piece], {}, {})
    finally:
        save_module.free_bytes = real


def test_the_need_of_all_ranks_counts_and_all_are_told(two_ranks, tmp_path):
    two_ranks.run(save_half, tmp_path, 1, 3 * MIB)
    results = two_ranks.run(save_half, tmp_path, 2, 3 * MIB // 2)  # more than one rank needs, less than both
    assert all(isinstance(result, Raised) and result.kind is SaveError for result in results), results
    for result in results:
        needed, free = map(int, FIGURES.search(result.message).groups())
        assert 2 * MIB < needed < 3 * MIB and free == 3 * MIB // 2
    assert steps(tmp_path) == [1]
