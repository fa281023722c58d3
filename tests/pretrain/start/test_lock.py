"""One run folder, one run: who gets it, who is refused, who waits."""

import errno
import fcntl
import json
import multiprocessing
import os
import signal
import threading
import time
from pathlib import Path

import pytest

from fmoe.errors import UserError
from pretrain.start import lock

fork = multiprocessing.get_context("fork")
BOTH = (lock.LAUNCH, lock.RUN)


def holder_in(folder, *names, seconds_to_end=0.0):
    """A process that holds locks of the folder; returned once it does. At SIGTERM, it announces its end, and ends."""
    ready = fork.Event()

    def work():
        stop = threading.Event()
        signal.signal(signal.SIGTERM, lambda *_: (lock.ending(), stop.set()))
        with lock.hold(folder, *names):
            ready.set()
            stop.wait(60)
            time.sleep(seconds_to_end)

    process = fork.Process(target=work, daemon=True)
    process.start()
    assert ready.wait(10)
    return process


def kill(process):
    process.kill()
    process.join()


@pytest.fixture
def stranger(tmp_path):
    process = holder_in(tmp_path / "run", *BOTH)
    yield process
    kill(process)


@pytest.mark.parametrize("spelling", ["run", "./run/../run", "link", "absolute link"])
def test_a_second_holder_is_refused_and_told_who_has_it(stranger, tmp_path, spelling, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "link").symlink_to("run")
    folder = tmp_path / "link" if spelling == "absolute link" else Path(spelling)
    begin = time.monotonic()
    with pytest.raises(UserError) as refused, lock.hold(folder, *BOTH):
        pass
    assert time.monotonic() - begin < 5
    for part in (f"run.folder={folder}", f"process {stranger.pid} on ", "since 20", lock.LAUNCH):
        assert part in str(refused.value)
    assert "\n" not in str(refused.value)


def test_a_dead_holder_releases_it_at_once(stranger, tmp_path):
    kill(stranger)
    assert (tmp_path / "run" / lock.LAUNCH).exists()  # nobody tidied up
    begin = time.monotonic()
    with lock.hold(tmp_path / "run", *BOTH):
        assert json.loads((tmp_path / "run" / f"{lock.RUN}.json").read_text())["pid"] == os.getpid()
    assert time.monotonic() - begin < 5
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.parametrize("content", [b"", b"[" * 2000, b'{"pid": [1], "host": 5}', b"\0" * 1024, b"\xff\xfe"])
@pytest.mark.parametrize("name", [*BOTH, f"{lock.RUN}.json"])
def test_a_file_that_nobody_holds_is_no_lock_whatever_is_in_it(tmp_path, name, content):
    (tmp_path / name).write_bytes(content)
    with lock.hold(tmp_path, *BOTH):
        pass
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("kind", ["link", "broken link", "folder"])
@pytest.mark.parametrize("name", BOTH)
def test_nothing_is_written_through_what_is_no_file(tmp_path, name, kind):
    (tmp_path / "run").mkdir()
    path = tmp_path / "run" / name
    other = tmp_path / "other"
    if kind == "link":
        other.write_text("of somebody else")
    if kind == "folder":
        path.mkdir()
    else:
        path.symlink_to(other)
    with pytest.raises(UserError, match=f"run.folder={tmp_path / 'run'} .*{name}"), lock.hold(tmp_path / "run", *BOTH):
        pass
    assert os.path.lexists(path)
    assert (other.read_text() == "of somebody else") if kind == "link" else not other.exists()


def test_nothing_is_left_of_a_lock(tmp_path):
    with lock.hold(tmp_path / "a" / "run", *BOTH):
        pass
    assert list(tmp_path.iterdir()) == []
    (tmp_path / "run").mkdir()
    with lock.hold(tmp_path / "run", *BOTH):
        (tmp_path / "run" / "file").touch()
    assert [path.name for path in (tmp_path / "run").iterdir()] == ["file"]


def test_a_rank_holds_its_lock_under_its_launcher_and_after_it(tmp_path):
    folder = tmp_path / "run"
    with lock.hold(folder, lock.LAUNCH):
        for _ in range(2):  # torchrun starts ranks again
            with lock.hold(folder, lock.RUN):
                assert (folder / lock.RUN).exists()
        rank = holder_in(folder, lock.RUN)
    # The launcher is gone, the rank is not: the next launcher waits for it.
    threading.Timer(1, kill, (rank,)).start()
    begin = time.monotonic()
    with lock.hold(folder, *BOTH):
        assert time.monotonic() - begin > 0.8


@pytest.mark.parametrize("seconds", [1.5, 30])
def test_a_requeued_run_waits_for_one_that_is_about_to_end(tmp_path, monkeypatch, caplog, seconds):
    monkeypatch.setattr(lock, "WAIT", 3)
    process = holder_in(tmp_path / "run", *BOTH, seconds_to_end=seconds)
    process.terminate()
    time.sleep(0.5)
    begin = time.monotonic()
    if seconds < lock.WAIT:
        with lock.hold(tmp_path / "run", *BOTH):
            assert 0.5 < time.monotonic() - begin < lock.WAIT
    else:
        with pytest.raises(UserError, match=str(process.pid)), lock.hold(tmp_path / "run", *BOTH):
            pass
        assert time.monotonic() - begin >= lock.WAIT
        assert f"process {process.pid}" in caplog.text and "3 s" in caplog.text
    kill(process)


def test_a_holder_that_ends_removes_its_description_first(tmp_path):
    process = holder_in(tmp_path / "run", *BOTH, seconds_to_end=3)
    process.terminate()
    time.sleep(0.5)
    threading.Timer(1.5, (tmp_path / "run" / f"{lock.LAUNCH}.json").unlink).start()
    with lock.hold(tmp_path / "run", *BOTH):
        pass
    kill(process)


def test_a_holder_on_another_machine_may_be_dead(tmp_path, monkeypatch, stranger):
    """The server of the file system releases its lock after a while; until then nobody can know."""
    monkeypatch.setattr(lock, "_MACHINE", "other")
    monkeypatch.setattr(lock, "WAIT_FOR_SERVER", 1)
    begin = time.monotonic()
    says = f"process {stranger.pid} .* if that process is dead, remove {tmp_path / 'run' / lock.LAUNCH}"
    with pytest.raises(UserError, match=says), lock.hold(tmp_path / "run", *BOTH):
        pass
    assert time.monotonic() - begin > 0.9
    threading.Timer(0.5, kill, (stranger,)).start()
    with lock.hold(tmp_path / "run", *BOTH):
        pass


@pytest.fixture
def no_flock(monkeypatch):
    def missing(*_):
        raise OSError(errno.ENOSYS, "Function not implemented")

    monkeypatch.setattr(fcntl, "flock", missing)


def test_without_flock_a_file_is_the_lock(no_flock, tmp_path):
    process = holder_in(tmp_path / "run", *BOTH)
    with pytest.raises(UserError, match=f"process {process.pid} .* remove"), lock.hold(tmp_path / "run", *BOTH):
        pass
    kill(process)
    with lock.hold(tmp_path / "run", *BOTH):  # a dead process of this machine
        assert json.loads((tmp_path / "run" / f"{lock.RUN}.json").read_text())["pid"] == os.getpid()
    assert list((tmp_path / "run").iterdir()) == []


@pytest.mark.slow
@pytest.mark.parametrize("has_flock", [True, False])
def test_one_of_many_gets_it(tmp_path, has_flock, request):
    if not has_flock:
        request.getfixturevalue("no_flock")
    inside, most, failures = fork.Value("i", 0), fork.Value("i", 0), fork.Value("i", 0)

    def work():
        try:
            with lock.hold(tmp_path / "run", *BOTH):
                with inside:
                    inside.value += 1
                    most.value = max(most.value, inside.value)
                time.sleep(3)
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
    with lock.hold(tmp_path / "run", *BOTH):
        child = fork.Process(target=time.sleep, args=(30,), daemon=True)
        child.start()
    with lock.hold(tmp_path / "run", *BOTH):
        pass
    assert child.is_alive()
    kill(child)


@pytest.mark.parametrize("kind", ["a file", "below a file", "no permission", "a link to nowhere"])
def test_a_folder_that_cannot_be_written(tmp_path, kind):
    (tmp_path / "file").touch()
    (tmp_path / "link").symlink_to("nowhere")
    names = {"a file": "file", "below a file": "file/run", "no permission": "/proc/run", "a link to nowhere": "link"}
    folder = tmp_path / names[kind]
    with pytest.raises(UserError, match=f"run.folder={folder} is not a writable folder"), lock.hold(folder, *BOTH):
        pass
    assert sorted(path.name for path in tmp_path.iterdir()) == ["file", "link"]


# Commands


@pytest.mark.parametrize(("program", "size"), [(("pretrain",), 1), (("fmoe", "train"), 2)])
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
