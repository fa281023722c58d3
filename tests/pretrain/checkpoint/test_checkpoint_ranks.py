"""Two real gloo processes saving together: what is written, and that an error on one is an error on both."""

import os
import resource
import signal
from dataclasses import replace
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from pieces import whole
from rank_pool import DIED, Raised, RankPool

from fmoe.errors import UserError
from pretrain.checkpoint import SaveError, TensorPiece, open_checkpoint, save, steps
from pretrain.config import Recipe, RunConfig
from pretrain.start.job import Job
from pretrain.start.resume import Fresh, Resume, verify_start

ROWS, COLUMNS = 6, 10


def tensors():
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(ROWS, COLUMNS, generator=generator) for name in ("rows", "columns", "flat", "zero")}


def pieces_of(rank):
    """Split by rows, by columns and by an uneven flat range over two ranks; one tensor on rank 0 alone."""
    full, shape = tensors(), (ROWS, COLUMNS)
    rows, columns = slice(3 * rank, 3 * rank + 3), slice(5 * rank, 5 * rank + 5)
    start, stop = ((0, 23), (23, 60))[rank]
    yield TensorPiece("rows", shape, (3 * rank, 0), (3, COLUMNS), full["rows"][rows])
    yield TensorPiece("columns", shape, (0, 5 * rank), (ROWS, 5), full["columns"][:, columns])
    yield TensorPiece("flat", shape, (0, 0), shape, full["flat"].reshape(-1)[start:stop], start, stop)
    if rank == 0:
        yield whole("zero", full["zero"])


def save_it(folder, step, fault=None):
    rank = dist.get_rank()
    pieces = pieces_of(rank)
    if fault is not None:
        pieces = fault(rank, pieces)
    return save(folder, step, pieces, {"seen": 100 * step}, {"rank": rank, "rng": torch.get_rng_state()})


def read_it(folder):
    """Both ranks read everything, split otherwise than it was saved."""
    rank, checkpoint = dist.get_rank(), open_checkpoint(folder)
    for name, full in tensors().items():
        columns = slice(5 * rank, 5 * rank + 5)
        assert torch.equal(checkpoint.read(name, (0, 5 * rank), (ROWS, 5)), full[:, columns])
        assert torch.equal(
            checkpoint.read(name, start=30 * rank, stop=30 * rank + 17), full.reshape(-1)[30 * rank :][:17]
        )
    assert checkpoint.state == {"seen": 100 * checkpoint.step}
    assert checkpoint.rank_state(rank)["rank"] == rank
    return checkpoint.num_ranks


def test_two_ranks_save_and_read(two_ranks, tmp_path):
    assert two_ranks.run(save_it, tmp_path, 4) == [tmp_path / "step-00000004"] * 2
    assert two_ranks.run(read_it, tmp_path) == [2, 2]
    checkpoint = open_checkpoint(tmp_path)  # and one process reads what two wrote
    checkpoint.verify()
    assert all(torch.equal(checkpoint.read(name), full) for name, full in tensors().items())
    assert sorted(path.name for path in checkpoint.path.iterdir()) == [
        "manifest.json",
        "rank-00000.json",
        "rank-00001.json",
        "shard-00000.safetensors",
        "shard-00001.safetensors",
        "state.json",
    ]


def a_bug(rank, pieces):
    yield from pieces
    if rank == 1:
        raise KeyError("a bug of ours")


def a_wrong_piece(rank, pieces):
    for piece in pieces:
        yield replace(piece, data=piece.data[..., :-1]) if rank == 1 and piece.name == "rows" else piece


def a_replica(rank, pieces):
    yield from pieces
    if rank == 1:
        yield whole("zero", tensors()["zero"])


def a_lost_piece(rank, pieces):
    return (piece for piece in pieces if not (rank == 1 and piece.name == "flat"))


def another_dtype(rank, pieces):
    return (replace(piece, data=piece.data.double()) if rank == 1 else piece for piece in pieces)


@pytest.mark.parametrize(
    "fault, kinds, message",
    [
        (a_bug, (RuntimeError, KeyError), "a bug of ours"),
        (a_wrong_piece, (UserError, UserError), "tensor rows: the data has 27 elements, but its region has 30"),
        (a_replica, (UserError, UserError), "zero: shard-00000.safetensors and shard-00001.safetensors both hold"),
        (a_lost_piece, (UserError, UserError), "tensor flat: 37 of its 60 elements are missing"),
        (another_dtype, (UserError, UserError), "float32 (6, 10) and float64"),
    ],
)
def test_an_error_on_one_rank_raises_on_both_and_leaves_nothing(two_ranks, tmp_path, fault, kinds, message):
    results = two_ranks.run(save_it, tmp_path, 1, fault)
    assert all(isinstance(result, Raised) for result in results), results
    assert tuple(result.kind for result in results) == kinds
    assert all(message in result.message for result in results)
    assert list(tmp_path.iterdir()) == []
    assert not isinstance(two_ranks.run(save_it, tmp_path, 1)[0], Raised)  # the group still works


def save_with_a_full_disk_on_rank(full_rank, folder, step):
    """The kernel refuses rank 1's writes past some bytes: a real OSError in the middle of a file."""
    if dist.get_rank() != full_rank:
        return save_it(folder, step)
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (300, hard))
    try:
        return save_it(folder, step)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize("full_rank", [0, 1])
def test_a_refused_write_on_one_rank_keeps_the_older_checkpoint(two_ranks, tmp_path, full_rank):
    two_ranks.run(save_it, tmp_path, 1)
    results = two_ranks.run(save_with_a_full_disk_on_rank, full_rank, tmp_path, 2)
    assert [result.kind for result in results] == [SaveError, SaveError]
    for result in results:
        assert f"rank-{full_rank:05d}.json: File too large" in result.message
    assert [path.name for path in tmp_path.iterdir()] == ["step-00000001"]
    two_ranks.run(save_it, tmp_path, 2)
    assert steps(tmp_path) == [1, 2]


def die_on_rank_1(rank, pieces):
    yield from pieces
    if rank == 1:
        os.kill(os.getpid(), signal.SIGKILL)


def test_the_death_of_a_rank_ends_the_save_of_the_other(tmp_path):
    with RankPool(2, tmp_path) as pool:
        folder = tmp_path / "checkpoints"
        pool.run(save_it, folder, 1)
        survivor, dead = pool.run(save_it, folder, 2, die_on_rank_1)
    assert isinstance(survivor, Raised)
    assert dead == DIED
    assert steps(folder) == [1]


def save_where_rank_1_sees_another_disk(folder, other):
    return save_it(other if dist.get_rank() == 1 else folder, 1)


def test_a_folder_that_is_not_shared_is_told(two_ranks, tmp_path):
    folder, other = tmp_path / "a", tmp_path / "b"
    results = two_ranks.run(save_where_rank_1_sees_another_disk, folder, other)
    assert all(result.kind is UserError and "filesystem that all ranks share" in result.message for result in results)
    assert results[0].message.startswith("rank 1: ")
    assert list(folder.iterdir()) == []


def save_in_groups(folder):
    """Each rank is a group of its own and saves alone."""
    groups = [dist.new_group([rank]) for rank in range(2)]
    rank = dist.get_rank()
    tensor = torch.full((3,), float(rank))
    path = save(folder / str(rank), 1, [whole("w", tensor)], {}, {}, group=groups[rank])
    return open_checkpoint(path).read("w").tolist()


def test_a_group_saves_without_the_others(two_ranks, tmp_path: Path):
    assert two_ranks.run(save_in_groups, tmp_path) == [[0, 0, 0], [1, 1, 1]]


def found_on(finders, folder):
    job = Job("recipe.toml", replace(Recipe(), run=RunConfig(folder=str(folder))))
    start = Resume(open_checkpoint(folder), ()) if dist.get_rank() in finders else Fresh()
    verify_start(start, job, None)


def test_a_checkpoint_that_only_one_rank_sees_is_an_error_on_both(two_ranks, tmp_path):
    two_ranks.run(save_it, tmp_path, 4)
    assert two_ranks.run(found_on, (0, 1), tmp_path) == two_ranks.run(found_on, (), tmp_path) == [None, None]
    for result in two_ranks.run(found_on, (1,), tmp_path):
        assert isinstance(result, Raised) and result.kind is UserError
        assert f"run.folder={tmp_path}: 1 of 2 ranks" in result.message
