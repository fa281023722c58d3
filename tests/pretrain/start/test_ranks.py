"""How `fmoe train` handles its ranks: a small program replaces each of them."""

import os
import signal
import subprocess
import sys
import threading
import time
from dataclasses import replace
from pathlib import Path

import pytest

import pretrain
from fmoe.errors import UserError
from pretrain.config import Recipe, RunConfig
from pretrain.start import launch, ranks
from pretrain.start.codes import EXIT_DIVERGED, EXIT_HANG, EXIT_REQUEUE
from pretrain.start.job import Job

# `life` is the number of restarts; `fail` writes a traceback, as `ranks.keep_error` does.
PROGRAM = """
import os, signal, sys, time
rank, life, folder = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"]), os.environ["FMOE_LAUNCHER"]

def write(name, text=""):
    with open(os.path.join(folder, name), "w") as file:
        file.write(text)

def fail():
    write(f"error-{rank}", f"Traceback of rank {rank}\\n")
    sys.exit(1)

def follow():
    while not os.path.exists(folder + "/error-3"):
        time.sleep(0.001)
    time.sleep(0.02)  # file times are coarse
    fail()

def lost():
    signal.signal(signal.SIGTERM, lambda *_: fail())
    time.sleep(60)

def kill(number):
    os.kill(os.getpid(), number)

write("began")
"""


def run(body, *, size=2, log=None, **options):
    job = Job("quickstart", Recipe(), processes_per_node=size, **options)
    return ranks.run(job, os.environ, log, [sys.executable, "-S", "-c", f"{PROGRAM}\n{body}"])


# What each rank does, then the exit code of the run, with one restart.
CODES = {
    "success": ("pass", 0),
    "stopped by a signal": ("sys.exit(75)", EXIT_REQUEUE),
    "diverged": ("sys.exit(65)", EXIT_DIVERGED),
    "refused on one rank": ("sys.exit(2) if rank else time.sleep(60)", 2),
    "a hang": ("sys.exit(70)", EXIT_HANG),
    "a hang, then success": ("sys.exit(0 if life else 70)", 0),
    "a hang, then an error": ("fail() if life else sys.exit(70)", 1),
    "an error, then stopped": ("sys.exit(75) if life else fail()", EXIT_REQUEUE),
    "errors": ("sys.exit(3)", 1),
    "killed": ("kill(signal.SIGKILL)", 1),
    "one killed, then success": ("life or time.sleep(60) if rank else life or kill(signal.SIGKILL)", 0),
    "SIGUSR1 before there is a handler": ("kill(signal.SIGUSR1); sys.exit(75)", EXIT_REQUEUE),
}


@pytest.mark.parametrize("name", CODES)
def test_the_code_is_that_of_the_last_start(name, monkeypatch):
    monkeypatch.setattr(ranks, "_SECONDS_TO_REFUSE", 0.5)
    body, code = CODES[name]
    assert run(body, max_restarts=1) == code


def test_variables_are_those_of_torchrun(tmp_path):
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "TORCHELASTIC_RESTART_COUNT")
    body = f"open({str(tmp_path)!r} + f'/{{rank}}', 'w').write(' '.join(os.environ[name] for name in {names}))"
    assert run(body, nodes=2, node_rank=1) == 0
    assert {path.name: path.read_text() for path in tmp_path.iterdir()} == {"2": "2 0 4 2 0", "3": "3 1 4 2 0"}


def test_messages_name_the_command(capfd):
    assert run("kill(signal.SIGKILL) if rank else time.sleep(60)", program="fmoe evaluate") == 1
    assert capfd.readouterr().err.startswith("fmoe evaluate: error: rank 1 ")


# When a signal comes, and what the first rank makes of it.
BEGINS = {
    "no handler": "",
    "in a restart": "life or fail()",
}


@pytest.mark.parametrize("name", BEGINS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_while_nobody_trains_ends_all_ranks(name, number, tmp_path, monkeypatch, capfd):
    body = f"{BEGINS[name]}\nwrite(f'waiting-{{rank}}')\ntime.sleep(60)"
    code, text = run_with_signals(body, [number], tmp_path, monkeypatch, capfd)
    assert code == (130 if number == signal.SIGINT else EXIT_REQUEUE)
    line = text.splitlines()[-1]
    assert line.startswith(f"fmoe train: {number.name} ") and "Traceback" not in line


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1, signal.SIGINT])
def test_a_signal_stops_a_run_by_one_of_its_ranks(number, tmp_path, monkeypatch, capfd):
    body = """
if rank == 0:
    signal.signal(signal.SIGTERM, lambda *_: (write("asked"), sys.exit(75)))
write(f"waiting-{rank}")
while not os.path.exists(folder + "/asked"):
    time.sleep(0.01)
sys.exit(75)
"""
    assert run_with_signals(body, [number], tmp_path, monkeypatch, capfd) == (EXIT_REQUEUE, "")


def test_a_second_interrupt_kills_all_ranks(tmp_path, monkeypatch, capfd):
    body = "signal.signal(signal.SIGTERM, signal.SIG_IGN); write(f'waiting-{rank}'); time.sleep(60)"
    code, text = run_with_signals(body, [signal.SIGINT, signal.SIGINT], tmp_path, monkeypatch, capfd)
    assert code == 130 and "SIGINT" in text


def run_with_signals(body, numbers, tmp_path, monkeypatch, capfd):
    """(code, stderr) of a run that gets signals once both ranks wait."""
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def send():
        while len(list(tmp_path.glob("fmoe-*/waiting-*"))) < 2:
            time.sleep(0.01)
        for number in numbers:
            os.kill(os.getpid(), number)
            time.sleep(0.3)

    sender = threading.Thread(target=send)
    sender.start()
    before = {number: signal.getsignal(number) for number in numbers}
    code = run(body, max_restarts=1)
    sender.join()
    assert {number: signal.getsignal(number) for number in numbers} == before
    return code, capfd.readouterr().err


def test_other_programs_than_ours_are_an_error():
    with pytest.raises(UserError, match="nothing was done"):
        ranks.run(Job("quickstart", Recipe()), os.environ, None, [sys.executable, "-S", "-c", "pass"])


# What each of four ranks does: rank 3 dies, others lose the connection or wait. Then what is printed, and what not.
DEATHS = {
    "out of memory": (
        "time.sleep(0.3) or kill(signal.SIGKILL) if rank == 3 else lost()",
        "rank 3",
        "SIGKILL: ",
        "out of memory",
    ),
    "an error": ("fail() if rank == 3 else follow()", "rank 3", "code 1", ""),
    "native code": ("kill(signal.SIGSEGV) if rank == 3 else time.sleep(60)", "rank 3", "SIGSEGV", "native code"),
    "bus error": ("kill(signal.SIGBUS) if rank == 3 else time.sleep(60)", "rank 3", "SIGBUS", "/dev/shm"),
    "a signal without name": ("kill(signal.SIGRTMIN + 1) if rank == 3 else time.sleep(60)", "rank 3", "signal 35", ""),
}


@pytest.mark.parametrize("name", DEATHS)
def test_the_rank_that_died_first_is_printed_and_the_others_are_in_a_file(name, tmp_path, capfd):
    body, rank, ending, cause = DEATHS[name]
    log = tmp_path / "errors.log"
    assert run(body, size=4, log=log) == 1
    text = capfd.readouterr().err
    assert f"fmoe train: error: {rank} (process " in text and ending in text and cause in text, text
    assert "ended after it     ranks " in text and text.count("\n") <= 4
    assert (f"Traceback of {rank}" in text) == (name == "an error")
    if name == "out of memory":
        assert log.read_text().count("Traceback of rank") == 3 and str(log) in text and "Traceback" not in text


def test_a_refused_run_leaves_no_log(tmp_path, capfd):
    assert run("sys.exit(2)", log=tmp_path / "errors.log") == 2
    assert list(tmp_path.iterdir()) == [] and capfd.readouterr().err == ""


@pytest.mark.skipif(sys.platform != "linux", reason="PR_SET_PDEATHSIG")
def test_ranks_end_with_their_launcher(tmp_path):
    program = f"""
import os, sys
from pretrain.config import Recipe
from pretrain.start import ranks
from pretrain.start.job import Job
body = "import os, time; open({str(tmp_path)!r} + '/' + str(os.getpid()), 'w'); time.sleep(60)"
ranks.run(Job("quickstart", Recipe(), processes_per_node=2), os.environ, None, [sys.executable, "-S", "-c", body])
"""
    launcher = subprocess.Popen([sys.executable, "-c", program], cwd=Path(pretrain.__file__).parents[1])
    while len(pids := list(tmp_path.iterdir())) < 2:
        assert launcher.poll() is None
        time.sleep(0.02)
    launcher.kill()
    launcher.wait()
    deadline = time.monotonic() + 10
    while any(Path(f"/proc/{path.name}/cmdline").exists() for path in pids):
        assert time.monotonic() < deadline
        time.sleep(0.02)


def test_the_command_that_goes_on(tmp_path, capsys):
    recipe = replace(Recipe(), run=RunConfig(folder=str(tmp_path)))
    for argv in (
        ["my.toml", "--run.folder", "a b"],
        ["my.toml", "--resume", "--run.folder", "a b"],
        ["--resume", "run", "my.toml", "--run.folder", "a b"],
        ["my.toml", "--resume=auto", "--run.folder", "a b"],
        ["--resume", "my.toml", "--run.folder", "a b"],
        ["--run.folder", "a b", "--resume=my.toml"],
    ):
        launch._print_how_to_resume(Job("my.toml", recipe, tuple(argv)))
        said = capsys.readouterr().err
        assert "fmoe train my.toml --run.folder 'a b' --resume auto\n" in said and "none" in said


def test_one_process_that_may_restart_has_a_launcher(monkeypatch, tmp_path):
    started = []

    def run(job, environment, log):
        started.append((job.processes_per_node, job.max_restarts, job.resume))
        return 0

    monkeypatch.setattr(launch, "_is_finished", lambda job: False)
    monkeypatch.setattr(launch.ranks, "run", run)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    options = ["--run.folder", str(tmp_path / "run"), "--resume", "auto", "--max-restarts", "2"]
    assert launch.main(["quickstart", "--parallel.expert", "1", *options]) == 0
    assert started == [(1, 2, "auto")]


def test_workers_import_nothing_from_the_working_folder(tmp_path):
    for name in ("random", "torch", "numpy", "fmoe", "megatron_patch", "multiprocessing"):
        (tmp_path / f"{name}.py").write_text("raise SystemExit(0)")
    (tmp_path / "wandb").mkdir()
    root = str(Path(pretrain.__file__).parents[1])
    environment = {k: v for k, v in os.environ.items() if k != "PYTHONSAFEPATH"}
    done = subprocess.run(
        [sys.executable, "-m", "pretrain"],
        cwd=tmp_path,
        env=environment | {"PYTHONPATH": root},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and "no recipe" in done.stderr, done


def test_another_packages_fmoe_is_named(tmp_path):
    (tmp_path / "fmoe.py").touch()
    root = str(Path(pretrain.__file__).parents[1])
    path = os.pathsep.join([str(tmp_path), root])
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pretrain"],
        env=os.environ | {"PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 2 and done.stderr.count("\n") == 1 and str(tmp_path) in done.stderr, done


@pytest.mark.parametrize("is_clone", [False, True])
def test_the_environment_of_workers(tmp_path, monkeypatch, is_clone):
    root = str(Path(pretrain.__file__).resolve().parents[1])
    monkeypatch.chdir(root if is_clone else tmp_path)
    monkeypatch.setenv("PYTHONPATH", "/mine")
    environment = pretrain.safe_environment()
    assert environment["PYTHONSAFEPATH"] == "1"
    assert environment["PYTHONPATH"] == (f"{root}{os.pathsep}/mine" if is_clone else "/mine")
