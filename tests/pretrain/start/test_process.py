"""A launcher's environment that is incomplete or invalid, and ranks that cannot meet, are one line each."""

import socket
from datetime import timedelta

import pytest

from fmoe import UserError
from fmoe.cli import run
from fmoe.commands import selftest
from fmoe.runtime import launcher
from pretrain.__main__ import main as train
from pretrain.start import launch, process

COMPLETE = {"RANK": "0", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29411"}


@pytest.fixture
def launched(monkeypatch):
    """``launched(NAME=value, ...)`` sets a launcher's variables; None removes one."""

    def set_variables(**changes):
        for name in (*COMPLETE, "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
            monkeypatch.delenv(name, raising=False)
        for name, value in (COMPLETE | changes).items():
            if value is not None:
                monkeypatch.setenv(name, value)

    return set_variables


WRONG = [
    ({"RANK": None}, ["RANK is not set", "WORLD_SIZE=2"]),
    ({"WORLD_SIZE": None}, ["WORLD_SIZE is not set", "RANK=0"]),
    ({"MASTER_ADDR": None}, ["MASTER_ADDR is not set"]),
    ({"MASTER_PORT": None}, ["MASTER_PORT is not set"]),
    ({"WORLD_SIZE": "x"}, ["WORLD_SIZE='x'"]),
    ({"WORLD_SIZE": ""}, ["WORLD_SIZE=''"]),
    ({"RANK": "-1"}, ["RANK='-1'"]),
    ({"RANK": "2"}, ["RANK=2", "WORLD_SIZE=2"]),
    ({"MASTER_PORT": "x"}, ["MASTER_PORT='x'"]),
    ({"MASTER_PORT": "65536"}, ["MASTER_PORT=65536"]),
]


@pytest.mark.parametrize(("changes", "says"), WRONG, ids=str)
def test_a_wrong_environment_is_one_line(launched, capsys, changes, says):
    launched(**changes)
    for main, argv in ((launch.main, ["quickstart"]), (train, ["quickstart"]), (selftest.main, ["--device", "cpu"])):
        assert run("command", lambda main=main, argv=argv: main(argv)) == 2
        message = capsys.readouterr().err
        assert all(text in message for text in says) and message.count("\n") == 1, message


def test_a_port_without_a_rank_is_not_a_launchers(launched):
    launched(RANK=None, WORLD_SIZE=None)
    assert launcher.world_size() == 1 and process.meet().size == 1


def test_a_local_rank_that_is_no_number(launched):
    launched(LOCAL_RANK="x")
    with pytest.raises(UserError, match="LOCAL_RANK='x'"):
        launcher.local_rank()


def test_a_port_in_use_is_named(launched):
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        launched(WORLD_SIZE="1", MASTER_PORT=str(port))
        with pytest.raises(UserError, match=f"MASTER_PORT={port}"):
            process.meet(timedelta(seconds=5))


def test_a_rank_that_does_not_come_is_named(launched):
    launched(MASTER_PORT="0")
    with pytest.raises(UserError, match="MASTER_PORT=0"):
        process.meet(timedelta(seconds=1))


def test_a_rendezvous_port_in_use_is_named(launched, tmp_path, capsys):
    launched(RANK=None, WORLD_SIZE=None)
    with socket.create_server(("", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        argv = ["quickstart", "--nodes", "2", "--node-rank", "0", "--rendezvous", where, "--run.folder", str(tmp_path)]
        assert run("fmoe train", lambda: launch.main(argv)) == 2
    message = capsys.readouterr().err
    assert f"--rendezvous={where}" in message and message.count("\n") == 1, message
