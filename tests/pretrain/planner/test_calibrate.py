"""``fmoe plan calibrate``: a file that loads, complete or not at all. No test looks at how long anything took."""

import itertools
import os
import signal
import subprocess
import sys
from functools import partial
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from forks import refusal, values
from patience import within

from fmoe.errors import UserError
from pretrain.planner import calibrate
from pretrain.planner.cluster import load_cluster
from pretrain.planner.timer import Timer
from pretrain.start.process import Processes

KINDS = {"all_reduce", "all_gather", "reduce_scatter", "all_to_all", "send"}
COMMAND = (sys.executable, "-m", "pretrain.planner.calibrate")


def calibrated(*argv, local_size=1):
    """The command in a rank of a group that exists already, with tiny sizes."""
    processes = Processes(dist.get_rank(), dist.get_world_size(), torch.device("cpu"))
    small = {"_WIDTHS": (16, 32, 64), "_ROWS": (2, 4, 8), "_BYTES": [16, 1024, 4096], "_BYTES_COPIED": 1 << 12}
    small |= {"_STEP_WIDTHS": (16, 32), "_LOOK": 0.1, "_PATIENCE": 0.0}
    with (
        mock.patch.multiple(calibrate, **small),
        mock.patch.object(calibrate.process, "start", return_value=processes),
        mock.patch.object(calibrate.launcher, "is_launched", return_value=True),
        mock.patch.dict(os.environ, LOCAL_WORLD_SIZE=str(local_size)),
    ):
        return calibrate.main([*map(str, argv)])


def check(cluster):
    """Every point is what the cluster answers at its sizes, and more work never takes less time."""
    for operation, seconds_of in (
        ("gemm", cluster.gemm_seconds),
        ("attention", cluster.attention_seconds),
        ("experts", cluster.experts_seconds),
    ):
        tables = cluster.device.measured[operation]
        assert tables.keys() == {"fp32", "bf16"}
        for dtype, points in tables.items():
            for *sizes, seconds, _ in points:
                assert seconds_of(*sizes, dtype) == seconds
            for one, other in itertools.permutations(points, 2):
                if all(a <= b for a, b in zip(one[:-2], other[:-2], strict=True)):
                    assert one[-2] <= other[-2]
    device = cluster.device
    assert device.host > 0 and device.host_backward > 0
    for tables, figure_of, names in (
        (
            device.operations,
            cluster.operation_seconds,
            {"optimizer", "aten.add.Tensor", "aten.native_layer_norm.default"},
        ),
        (device.in_step, cluster.in_step, {"aten.mm.default"}),
    ):
        assert tables.keys() >= names
        for name, by_dtype in tables.items():
            for dtype, points in by_dtype.items():
                for num_bytes, figure, _ in points:
                    assert figure_of(name, num_bytes, dtype) == figure > 0
    assert device.operations["optimizer"].keys() == {"fp32", "bf16"}
    for kind, curves in cluster.collectives.items():
        for size, points in curves.items():
            for num_bytes, seconds, _ in points:
                assert cluster.collective_seconds(kind, size, size, num_bytes) == seconds
            assert [point[1] for point in points] == sorted(point[1] for point in points)


def test_two_ranks(forks, tmp_path):
    path = tmp_path / "here.toml"
    assert values(forks.run(2, calibrated, "--out", path, "--quick")) == [0, 0]
    assert [file.name for file in tmp_path.iterdir()] == ["here.toml"]
    cluster = load_cluster(str(path))
    assert (cluster.name, cluster.num_ranks) == ("here", 2)
    assert f"torch {torch.__version__} and gloo" in cluster.source and "measured" in cluster.source
    assert len(cluster.device.measured["gemm"]["fp32"]) == 8
    assert cluster.device.spread.keys() == {"bandwidth", "launch"}
    assert cluster.collectives.keys() == KINDS
    assert all(curves.keys() == {2} for curves in cluster.collectives.values())
    assert [link.size for link in cluster.links] == [2]
    check(cluster)
    path.write_text(calibrate.cluster_text(cluster))
    assert load_cluster(str(path)) == cluster


def test_one_rank_and_all_sizes(forks, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("an older one")
    assert values(forks.run(1, calibrated, "--out", path, "--ranks", 1, "--overwrite")) == [0]
    cluster = load_cluster(str(path))
    assert (cluster.num_ranks, cluster.links) == (1, ())
    assert not any(cluster.collectives.values())
    points = cluster.device.measured["gemm"]["bf16"]
    assert len(points) == 27
    assert cluster.device.peak["bf16"] == max(2 * m * k * n / seconds for m, k, n, seconds, _ in points)
    check(cluster)


def test_groups_of_three_take_as_many_numbers_for_every_rank(forks):
    curves, *others = values(forks.run(3, measured_collectives))
    assert curves == others[0] == others[1]  # as slow as the slowest rank
    assert all(sizes.keys() == {3} for sizes in curves.values())
    assert {tuple(point[0] for point in sizes[3]) for sizes in curves.values()} == {(12, 4092)}


def measured_collectives():
    with mock.patch.object(calibrate, "_BYTES", [4, 1024, 4096]):
        device = torch.device("cpu")
        timer = Timer(1.0, device, repeats=3, min_seconds=1e-9, patience=0.0)
        return calibrate._collectives(partial(calibrate._points, timer, 2), device)


def test_levels_are_machines_and_the_job():
    sends = {2: ((8, 1.0, 0.0),), 3: ((8, 0.5, 0.0), (800, 2.0, 0.0)), 6: ((8, 4.0, 0.0), (800, 5.0, 0.0))}
    for world_size, local_size, sizes in ((6, 3, [3, 6]), (6, 4, [6]), (6, 1, [6]), (3, 3, [3])):
        with mock.patch.object(calibrate.dist, "get_world_size", return_value=world_size):
            links = calibrate._links(sends, local_size)
        assert [link.size for link in links] == sizes
    assert (links[0].bandwidth, links[0].latency) == (400.0, 0.5)


def test_an_existing_file_stays(forks, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("mine")
    assert f"{path} exists" in refusal(forks.run(1, calibrated, "--out", path))
    assert path.read_text() == "mine"


def test_a_disk_that_is_full_keeps_the_old_file(forks, tmp_path):
    path = tmp_path / "c.toml"
    path.write_text("mine")
    assert "cannot write" in refusal(forks.run(1, on_a_full_disk, path))
    assert path.read_text() == "mine" and len(list(tmp_path.iterdir())) == 1


def on_a_full_disk(path):
    with mock.patch("os.fsync", side_effect=OSError(28, "No space left on device")):
        calibrated("--out", path, "--overwrite", "--quick")


def test_invalid_options(tmp_path, capsys):
    with pytest.raises(UserError, match="--ranks 0 must be at least 1"):
        calibrate.main(["--ranks", "0", "--out", str(tmp_path / "c.toml")])
    for argv, words in ((["--quick"], "--out"), (["--out", "c", "--ranks", "two"], "two"), (["--fast"], "--fast")):
        with pytest.raises(SystemExit) as ended:
            calibrate.main(argv)
        assert ended.value.code == 2 and words in capsys.readouterr().err


def started(folder, *argv, **options):
    root = Path(calibrate.__file__).parents[2]
    environment = os.environ | {"PYTHONPATH": str(root), "PYTHONSAFEPATH": "1"}
    return subprocess.Popen([*COMMAND, *argv], cwd=folder, env=environment, text=True, **options)


def test_an_interrupt_leaves_nothing(tmp_path):
    with started(tmp_path, "--out", "c.toml", "--ranks", "2", "--quick", stderr=subprocess.PIPE) as command:
        assert "all_reduce, 2 ranks" in command.stderr.readline()  # the ranks measure
        command.send_signal(signal.SIGINT)
        text = command.stderr.read()
    assert command.returncode == 130, text
    assert "SIGINT" in text and "Traceback" not in text
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
def test_the_command_as_a_user_runs_it(tmp_path):
    with started(tmp_path, "--out", "c.toml", "--ranks", "2", "--quick") as command:
        assert command.wait(within(120)) == 0
    cluster = load_cluster(str(tmp_path / "c.toml"))
    assert cluster.num_ranks == 2
    check(cluster)
