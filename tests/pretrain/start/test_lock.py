"""One run folder, one run: who gets it, who is refused, who waits."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import threading
import time

import pytest

from fmoe.errors import UserError
from pretrain.start import lock

fork = multiprocessing.get_context("fork")


@pytest.fixture(autouse=True)
def fast(monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.05)
    monkeypatch.setattr(lock, "SILENCE", 0.5)


def holder_in(folder, *, is_launcher=False):
    """A process that holds the folder; returns it once it does."""
    ready = fork.Event()

    def work():
        with lock.hold(folder, is_launcher=is_launcher):
            ready.set()
            time.sleep(60)

    process = fork.Process(target=work, daemon=True)
    process.start()
    assert ready.wait(10)
    return process


def kill(process):
    process.kill()
    process.join()


@pytest.fixture
def stranger(tmp_path):
    process = holder_in(tmp_path / "run")
    yield process
    kill(process)


@pytest.mark.parametrize("spelling", ["run", "./run/../run", "link", "absolute link"])
@pytest.mark.parametrize("is_launcher", [False, True])
def test_a_second_holder_is_refused_and_told_who_has_it(stranger, tmp_path, spelling, is_launcher, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    folder = tmp_path / "link" if spelling == "absolute link" else spelling
    begin = time.monotonic()
    with pytest.raises(UserError) as refused, lock.hold(lock.Path(folder), is_launcher=is_launcher):
        pass
    assert time.monotonic() - begin < 5
    for part in (f"run.folder={folder}", f"process {stranger.pid} on ", "started 20", "since 20"):
        assert part.replace("./run/../run", "run") in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_dead_holder_releases_it_at_once(stranger, tmp_path):
    kill(stranger)
    assert (tmp_path / "run" / lock.LAUNCH).exists()  # nobody tidied up
    begin = time.monotonic()
    with lock.hold(tmp_path / "run"):
        assert json.loads((tmp_path / "run" / lock.RUN).read_text())["pid"] == os.getpid()
    assert time.monotonic() - begin < 5
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[" * 2000, b'{"token": [1], "host": 5}', b"\0" * 1024, b"\xff\xfe"])
@pytest.mark.parametrize("name", [lock.LAUNCH, lock.RUN])
def test_a_file_that_nobody_holds_is_no_lock_whatever_is_in_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with lock.hold(tmp_path):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "broken link", "folder", "pipe"])
@pytest.mark.parametrize("name", [lock.LAUNCH, lock.RUN])
def test_nothing_is_written_through_what_is_no_file(tmp_path, name, kind):
    (tmp_path / "run").mkdir()
    path, other = tmp_path / "run" / name, tmp_path / "other"
    if kind == "link":
        other.write_text("of somebody else")
    make = {"folder": path.mkdir, "pipe": lambda: os.mkfifo(path)}.get(kind, lambda: path.symlink_to(other))
    make()
    with pytest.raises(UserError, match=f"{name} is not a regular file"), lock.hold(tmp_path / "run"):
        pass
    assert os.path.lexists(path)
    assert (other.read_text() == "of somebody else") if kind == "link" else not other.exists()


def test_nothing_is_left_of_a_lock(tmp_path):
    with lock.hold(tmp_path / "a" / "run"):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    with lock.hold(tmp_path / "run"):
        (tmp_path / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_workers_hold_it_under_their_launcher_and_after_it(tmp_path, monkeypatch):
    folder = tmp_path / "run"
    with lock.hold(folder, is_launcher=True) as token:
        monkeypatch.setenv(lock.TOKEN, token)
        for _ in range(2):  # torchrun starts workers again
            with lock.hold(folder):
                assert (folder / lock.RUN).exists()
        worker = holder_in(folder)
    monkeypatch.delenv(lock.TOKEN)
    # The launcher is gone, the worker is not: who comes next waits for it, as rank 0 or as a launcher.
    threading.Timer(1, kill, (worker,)).start()
    begin = time.monotonic()
    with lock.hold(folder, is_launcher=True):
        assert time.monotonic() - begin > 0.8


def test_workers_of_a_launcher_that_is_gone_are_refused(stranger, tmp_path, monkeypatch):
    monkeypatch.setenv(lock.TOKEN, "of a launcher before")
    monkeypatch.setattr(lock, "WAIT", 0.5)
    with pytest.raises(UserError, match=f"process {stranger.pid}"), lock.hold(tmp_path / "run"):
        pass
    other = tmp_path / "other"
    launcher = holder_in(other, is_launcher=True)
    with pytest.raises(UserError, match=f"process {launcher.pid}"), lock.hold(other):
        pass
    kill(launcher)


def ends_on_sigterm(folder, seconds):
    """A process that holds the folder and, at SIGTERM, ends after so many seconds."""
    ready = fork.Event()

    def work():
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: (lock.ending(), stop.set()))
        with lock.hold(folder):
            ready.set()
            stop.wait(60)
            time.sleep(seconds)

    process = fork.Process(target=work, daemon=True)
    process.start()
    assert ready.wait(10)
    return process


@pytest.mark.by_default("1.5")
@pytest.mark.parametrize("seconds", [1.5, 30])
def test_a_requeued_run_waits_for_one_that_is_about_to_end(tmp_path, monkeypatch, caplog, seconds):
    monkeypatch.setattr(lock, "WAIT", 3)
    process = ends_on_sigterm(tmp_path / "run", seconds)
    process.terminate()
    time.sleep(0.5)
    begin = time.monotonic()
    if seconds < lock.WAIT:
        with lock.hold(tmp_path / "run"):
            assert 0.5 < time.monotonic() - begin < lock.WAIT
    else:
        with pytest.raises(UserError, match=str(process.pid)), lock.hold(tmp_path / "run"):
            pass
        assert time.monotonic() - begin >= lock.WAIT
        assert f"process {process.pid}" in caplog.text and "3 s" in caplog.text
    kill(process)


# Other machines: a record with another `machine`, with flock or without.


def elsewhere(folder, *, beats):
    """Writes the record of a holder on another machine, and touches it until the returned event is set."""
    folder.mkdir()
    record = {"host": "node-7", "pid": 7, "started": "then", "since": "later", "machine": "other", "token": "x"}
    path, is_over = folder / lock.LAUNCH, threading.Event()
    path.write_text(json.dumps(record))

    def beat():
        while not is_over.wait(0.05):
            os.utime(path)

    if beats:
        threading.Thread(target=beat).start()
    return is_over


@pytest.fixture(params=["flock", "no flock"])
def flock(request, monkeypatch):
    if request.param == "no flock":

        def missing(*_):
            raise OSError(errno.ENOSYS, "Function not implemented")

        monkeypatch.setattr(fcntl, "flock", missing)
    return request.param


def test_a_living_holder_on_another_machine_is_not_robbed(tmp_path, flock):
    is_over = elsewhere(tmp_path / "run", beats=True)
    try:
        says = "process 7 on node-7, started then, .*since later"
        with pytest.raises(UserError, match=says), lock.hold(tmp_path / "run"):
            pass
    finally:
        is_over.set()


def test_a_silent_holder_on_another_machine_is_dead(tmp_path, flock):
    elsewhere(tmp_path / "run", beats=False)
    begin = time.monotonic()
    with lock.hold(tmp_path / "run"):
        assert time.monotonic() - begin > lock.SILENCE
        assert json.loads((tmp_path / "run" / lock.LAUNCH).read_text())["pid"] == os.getpid()


def test_a_dead_machine_that_a_server_still_waits_for(tmp_path, monkeypatch, stranger):
    monkeypatch.setattr(lock, "_MACHINE", "other")  # this process is elsewhere, and the holder stands still
    monkeypatch.setattr(lock, "WAIT_FOR_SERVER", 1)
    os.kill(stranger.pid, signal.SIGSTOP)
    begin = time.monotonic()
    with pytest.raises(UserError, match=str(stranger.pid)), lock.hold(tmp_path / "run"):
        pass
    assert time.monotonic() - begin > 0.9
    threading.Timer(0.5, kill, (stranger,)).start()
    with lock.hold(tmp_path / "run"):
        pass


@pytest.mark.slow
def test_without_flock_one_of_many_gets_it(tmp_path, flock, monkeypatch):
    monkeypatch.setattr(lock, "BEAT", 0.3)
    monkeypatch.setattr(lock, "SILENCE", 3)
    inside, most, failures = fork.Value("i", 0), fork.Value("i", 0), fork.Value("i", 0)

    def work():
        try:
            with lock.hold(tmp_path / "run"):
                with inside:
                    inside.value += 1
                    most.value = max(most.value, inside.value)
                time.sleep(2)
                with inside:
                    inside.value -= 1
        except UserError:
            with failures:
                failures.value += 1

    processes = [fork.Process(target=work) for _ in range(5)]
    for process in processes:
        process.start()
    for process in processes:
        process.join()
    assert most.value == 1 and failures.value == 4


def test_a_forked_child_does_not_keep_it(tmp_path):
    with lock.hold(tmp_path / "run"):
        child = fork.Process(target=time.sleep, args=(30,), daemon=True)
        child.start()
    with lock.hold(tmp_path / "run"):
        pass
    assert child.is_alive()
    kill(child)


@pytest.mark.parametrize("kind", ["a file", "below a file", "no permission", "a link to nowhere"])
def test_a_folder_that_cannot_be_written(tmp_path, kind):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    names = {"a file": "file", "below a file": "file/run", "no permission": "/proc/run", "a link to nowhere": "link"}
    folder = tmp_path / names[kind]
    with pytest.raises(UserError, match=f"run.folder={folder} is not a writable folder"), lock.hold(folder):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


# Commands


@pytest.mark.parametrize(
    ("program", "size"), [(("pretrain",), 1), (("pretrain",), 2), (("fmoe", "train"), 1), (("fmoe", "train"), 2)]
)
def test_a_run_beside_a_run_is_one_line(forks, recipe_file, stranger, tmp_path, program, size):
    folder = tmp_path / "run"
    (folder / "metrics.jsonl").write_text('{"step": 1}\n{"step": 2}\n')
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    recipe = recipe_file(run={"folder": str(folder)}, parallel={"expert": size}, checkpoint={"every": 1})
    ends = forks.command(*program, recipe, "--resume", "auto", size=size if program == ("pretrain",) else 1)
    assert {end.code for end in ends} == {2}, ends
    line = "".join(end.err for end in ends)
    assert line.count("\n") == 1 and f"process {stranger.pid} on " in line and f"run.folder={folder}" in line, line
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
