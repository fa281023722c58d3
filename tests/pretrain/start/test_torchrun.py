"""How `fmoe train` handles its child: a small program replaces torchrun and its ranks."""

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
from pretrain.start import launch, torchrun
from pretrain.start.codes import EXIT_HANG, EXIT_REQUEUE
from pretrain.start.job import Job

# The lives of workers that torchrun starts again: what each says, then how torchrun ends.
PROGRAM = """
import os, signal, sys, time

def say(**told):
    for name, value in told.items():
        path = os.path.join(os.environ["FMOE_LAUNCHER"], name.replace("_", "-"))
        with open(path, "w") as file:
            file.write(str(value))

{}
"""
LIVES = {
    "stopped by a signal": ("say(life=0, code_0=75)", EXIT_REQUEUE),
    "a hang": ("say(life=0, code_0=70); sys.exit(1)", EXIT_HANG),
    "a hang, then the end": ("say(life=0, code_0=70); say(life=1)", 0),
    "a hang, then an error": ("say(life=0, code_0=70); say(life=1); sys.exit(1)", 1),
    "an error, then stopped": ("say(life=0); say(life=1, code_1=75)", EXIT_REQUEUE),
    "nobody said anything": ("sys.exit(3)", 3),
    "killed": ("os.kill(os.getpid(), signal.SIGKILL)", 128 + signal.SIGKILL),
    "SIGUSR1 to torchrun": ("os.kill(os.getpid(), signal.SIGUSR1); say(life=0, code_0=75)", EXIT_REQUEUE),
}


def program(body):
    return [sys.executable, "-c", PROGRAM.format(body)]


@pytest.mark.parametrize("name", LIVES)
def test_the_code_is_what_the_last_workers_say(name):
    body, code = LIVES[name]
    assert torchrun.run(program(body), os.environ) == code


# torchrun that says what it got; a worker of its first life that is gone.
WAITS = """
def end(number, frame):
    print(number, flush=True)
    sys.exit(1)

signal.signal(signal.SIGTERM, end)
{}
say(waiting=1)
time.sleep(60)
"""
BEGINS = {
    "before workers are there": "",
    "when those that were there are gone": (
        "gone = os.fork() or os._exit(0); os.waitpid(gone, 0); say(life=0, pid_0=gone)"
    ),
    "before those of a second life are ready": "say(life=0, pid_0=1); say(life=1)",
}


@pytest.mark.parametrize("name", BEGINS)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_a_signal_while_nobody_trains_ends_torchrun(name, number, tmp_path, monkeypatch, capfd):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))

    def send():
        while not list(tmp_path.glob("fmoe-*/waiting")):
            time.sleep(0.01)
        os.kill(os.getpid(), number)

    sender = threading.Thread(target=send)
    sender.start()
    before = signal.getsignal(number)
    assert torchrun.run(program(WAITS.format(BEGINS[name])), os.environ) == EXIT_REQUEUE
    sender.join()
    assert signal.getsignal(number) is before
    line = capfd.readouterr().err
    assert line.startswith(f"fmoe train: {number.name} ") and line.count("\n") == 1


def test_other_programs_than_ours_are_an_error():
    with pytest.raises(UserError, match="nothing was trained"):
        torchrun.run(program("pass"), os.environ)


# Ranks that died: code of torchrun's, what of which rank died, how the line begins.
KILLED = {"rank": 3, "pid": 77, "code": -signal.SIGKILL, "time": 20.0}
LOST = {"rank": 0, "pid": 70, "code": 1, "time": 10.0}
ENDED = {"rank": 1, "pid": 71, "code": -signal.SIGTERM, "time": 5.0}
DEATHS = {
    "out of memory": (
        [LOST, KILLED, ENDED],
        "rank 3 (process 77) was killed by SIGKILL: ",
        "out of memory",
        "ranks 0, 1",
    ),
    "an error": (
        [ENDED, LOST | {"rank": 2}, LOST | {"time": 9.0}],
        "rank 0 (process 70) ended with code 1",
        "",
        "2, 1",
    ),
    "native code": (
        [KILLED | {"code": -signal.SIGSEGV}],
        "rank 3 (process 77) was killed by SIGSEGV",
        "native code",
        "",
    ),
    "bus error": ([KILLED | {"code": -signal.SIGBUS}], "rank 3 (process 77) was killed by SIGBUS", "/dev/shm", ""),
    "a signal without name": ([KILLED | {"code": -99}], "rank 3 (process 77) was killed by signal 99", "", ""),
    "torchrun itself": (None, "torchrun ended with code 1", "", ""),
}


@pytest.mark.parametrize("name", DEATHS)
def test_who_died_is_a_line_and_torchruns_pages_a_file(name, tmp_path, capfd):
    failed, line, cause, others = DEATHS[name]
    body = f"""
folder = os.environ["FMOE_LAUNCHER"]
open(folder + "/torchrun.log", "w").write("pages\\n")
open(folder + "/error-0", "w").write("Traceback of rank 0\\n")
if {failed!r} is not None:
    import json
    open(folder + "/failed.json", "w").write(json.dumps({[dict(one, code=int(one["code"])) for one in failed or []]!r}))
say(life=0)
sys.exit(1)
"""
    assert torchrun.run(program(body), os.environ, tmp_path / "torchrun.log") == 1
    said = capfd.readouterr().err
    assert f"fmoe train: error: {line}" in said and cause in said and others in said, said
    assert str(tmp_path / "torchrun.log") in said and "pages" not in said
    is_first = failed is not None and "rank 0" in line
    log = (tmp_path / "torchrun.log").read_text()
    assert "pages" in log and ("Traceback of rank 0" in said) == is_first
    assert said.count("\n") <= 4
    if failed and not is_first and any(one["rank"] == 0 for one in failed):
        assert "Traceback of rank 0" in log


def test_a_refused_run_leaves_no_log(tmp_path):
    body = 'open(os.environ["FMOE_LAUNCHER"] + "/torchrun.log", "w").write("pages"); say(life=0, code_0=2); sys.exit(1)'
    assert torchrun.run(program(body), os.environ, tmp_path / "torchrun.log") == 2
    assert list(tmp_path.iterdir()) == []


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


def test_one_process_that_may_restart_needs_torchrun(monkeypatch, tmp_path):
    started = []

    def run(command, environment, log, job):
        started.append((" ".join(command), job.resume))
        return 0

    monkeypatch.setattr(launch, "_is_finished", lambda job: False)
    monkeypatch.setattr(launch.torchrun, "run", run)
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    options = ["--run.folder", str(tmp_path / "run"), "--resume", "auto", "--max-restarts", "2"]
    assert launch.main(["quickstart", "--parallel.expert", "1", *options]) == 0
    ((command, resume),) = started
    assert command.endswith(" --nproc-per-node 1 --max-restarts 2 -m pretrain") and resume == "auto"


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
