"""The shell scripts of pretrain/, as a user starts them: real bash, real ranks, a Slurm of three small scripts."""

import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import tomllib
from pathlib import Path

import pytest

from fmoe.kernels import cache
from pretrain.start.codes import EXIT_REQUEUE
from pretrain.tracking import read_metrics

FOLDER = Path(__file__).parents[3] / "pretrain"
SCRIPTS = {path.name: path for path in (*FOLDER.glob("pretrain_*.sh"), FOLDER / "slurm.sbatch")}
TIMEOUT = 400
VARIABLES = (
    *("RECIPE", "RUN_FOLDER", "RESUME", "TOKENIZER", "TRAIN_DATA", "VALIDATION_DATA", "MAX_RESTARTS", "DRY_RUN"),
    *("PYTHON", "NNODES", "NODE_RANK", "MASTER_ADDR", "MASTER_PORT", "NPROC_PER_NODE"),
)


@pytest.fixture
def environment():
    """Environment of a user without settings, whose Python is this one."""
    kept = {
        key: value
        for key, value in os.environ.items()
        if not key.startswith(("WANDB_", "RANK", "LOCAL_", "WORLD_", "SLURM_", "FMOE_SCRIPTS")) and key not in VARIABLES
    }
    kept |= {"PYTHON": sys.executable, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    return kept | {"FMOE_CACHE": str(cache.writable())}  # what the session has built: nothing is compiled again


@pytest.fixture
def bash(environment, tmp_path):
    """``bash(script, *argv, VARIABLE=value)`` runs a script of pretrain/ to its end, in a folder whose modules it must
    not import."""
    folder = tmp_path / "elsewhere"
    folder.mkdir()
    for name in ("pretrain", "fmoe", "torch", "random"):
        (folder / f"{name}.py").write_text("raise SystemExit(0)")

    def run(script, *argv, **variables):
        return subprocess.run(
            ["bash", str(SCRIPTS.get(script, script)), *map(str, argv)],
            cwd=folder,
            env=environment | variables,
            capture_output=True,
            text=True,
            stdin=subprocess.DEVNULL,
            timeout=TIMEOUT,
        )

    return run


def tiny(corpus, **sections):
    """Options that make a recipe train in seconds, on the tests' corpus."""
    keys = {
        "model": {"num-layers": 2, "hidden-size": 32, "ffn-hidden-size": 32, "sequence-length": 16, "vocab-size": 384},
        "attention": {"num-heads": 2},
        "moe": {"num-experts": 4},
        "data": {"tokenizer": corpus.tokenizer, "train": corpus.train, "validation": corpus.validation},
        "train": {"steps": 3, "global-batch": 4, "micro-batch": 2, "validation-every": 3, "validation-sequences": 4},
        "optimizer": {"warmup-steps": 1},
        "checkpoint": {"every": 2},
    }
    options = ["--tracking.no-wandb"]
    for section in keys | sections:
        for key, value in (keys.get(section, {}) | sections.get(section, {})).items():
            options += [f"--{section}.{key}", str(value)]
    return options


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.mark.parametrize("name", SCRIPTS)
def test_help_lists_every_variable_with_its_default(bash, name):
    end = bash(name, "--help", PYTHON="/no/such/python")
    assert end.returncode == 0 and end.stderr == "", end.stderr
    listed = {line.split()[0]: line for line in end.stdout.splitlines() if line.startswith("  ") and line.endswith("]")}
    text = SCRIPTS[name].read_text() + (FOLDER / "common.sh").read_text()
    read = {word for word in VARIABLES if f"${word}" in SCRIPTS[name].read_text() or f"variable {word}" in text}
    used = {word for word in read if word in SCRIPTS[name].read_text()} | set(VARIABLES[:9])
    assert used <= listed.keys(), used - listed.keys()
    default = {"pretrain_switch_t5.sh": "t5", "pretrain_bert_moe.sh": "bert"}.get(name, "quickstart")
    assert listed["RECIPE"].endswith(f"[{default}]") and listed["DRY_RUN"].endswith("[0]")


# Without training


def test_a_wrong_python_and_a_recipe_without_name_are_a_line(bash):
    end = bash("pretrain_gpt_moe.sh", PYTHON="/no/such/python")
    assert end.returncode == 2 and end.stderr.count("\n") == 1 and "PYTHON=/no/such/python" in end.stderr
    end = bash("pretrain_gpt_moe.sh", "--recipe")
    assert end.returncode == 2 and end.stderr == "pretrain_gpt_moe.sh: error: --recipe needs a name\n"


DRY = {
    "pretrain_gpt_moe.sh": ([], "10.4M", "world size 2, 1 node of 2"),
    "pretrain_switch_t5.sh": (["--recipe", "switch-c"], "1.57T", "world size 2,048, 256 nodes of 8"),
    "pretrain_bert_moe.sh": (
        ["--parallel.data", "2", "--train.micro-batch", "4"],
        "6.34M",
        "world size 4, 1 node of 4",
    ),
    "pretrain_multinode.sh": ([], "10.4M", "world size 2, 2 nodes of 1"),
    "slurm.sbatch": (["--recipe=switch-c"], "1.57T", "world size 2,048, 64 nodes of 32"),
}


@pytest.mark.slow
@pytest.mark.parametrize("name", DRY)
def test_dry_run(bash, name):
    argv, total, grid = DRY[name]
    begin = time.monotonic()
    end = bash(name, *argv, DRY_RUN="1", NNODES="2", SLURM_JOB_NUM_NODES="64")
    print(f"{time.monotonic() - begin:.1f} s")  # 10 s on two idle cores
    assert end.returncode == 0 and end.stderr == "", end.stderr
    assert f"{total} parameters in total" in end.stdout and grid in end.stdout and "largest rank:" in end.stdout, (
        end.stdout
    )
    assert "[model]" in end.stdout and " parameters (" in end.stdout


def test_scripts_are_shipped():
    settings = tomllib.loads((FOLDER.parent / "pyproject.toml").read_text())
    assert {"*.sh", "*.sbatch"} <= set(settings["tool"]["setuptools"]["package-data"]["pretrain"])


# Runs


RUNS = {
    "pretrain_gpt_moe.sh": {},
    "pretrain_switch_t5.sh": {"model": {"num-decoder-layers": 2}},
    "pretrain_bert_moe.sh": {"moe": {"every": 2}},
}


@pytest.mark.slow
@pytest.mark.parametrize("name", RUNS)
def test_a_run_of_two_processes(bash, tiny_corpus, tmp_path, name):
    """Its data come from the environment."""
    options = [word for word in tiny(tiny_corpus, **RUNS[name]) if str(tiny_corpus.folder) not in word]
    options = [word for word in options if not word.startswith("--data.")]
    data = {
        "TOKENIZER": tiny_corpus.tokenizer,
        "TRAIN_DATA": tiny_corpus.train,
        "VALIDATION_DATA": tiny_corpus.validation,
    }
    variables = {key: str(value) for key, value in data.items()} | {"RUN_FOLDER": str(tmp_path / "run")}
    end = bash(name, *options, **variables)
    assert end.returncode == 0, end.stderr
    assert "finished at step 3" in end.stdout
    assert json.loads((tmp_path / "run" / "run.json").read_text())["world_size"] == 2
    assert [row["step"] for row in read_metrics(tmp_path / "run" / "metrics.jsonl")] == [0, 1, 2, 3]


@pytest.mark.slow
def test_two_nodes_and_a_process_that_dies(environment, tiny_corpus, tmp_path):
    """One process a node. The one on node 1 dies in step 3; both are started again and go on from step 2."""
    hook = tmp_path / "hook"
    hook.mkdir()
    (hook / "sitecustomize.py").write_text(DIES_ONCE)
    port, folder = free_port(), tmp_path / "run"
    command = ["bash", SCRIPTS["pretrain_multinode.sh"], *tiny(tiny_corpus), "--checkpoint.no-asynchronous"]
    nodes = []
    for rank in range(2):
        variables = {"NNODES": "2", "NODE_RANK": str(rank), "MASTER_PORT": str(port), "NPROC_PER_NODE": "1"}
        variables |= {"RUN_FOLDER": str(folder), "MAX_RESTARTS": "1", "DIED": str(tmp_path / "died")}
        variables["PYTHONPATH"] = os.pathsep.join([str(hook), environment.get("PYTHONPATH", "")])
        output = (tmp_path / f"node-{rank}").open("w")
        nodes.append(
            subprocess.Popen(
                command, env=environment | variables, stdout=output, stderr=subprocess.STDOUT, cwd=tmp_path
            )
        )
    try:
        codes = [node.wait(TIMEOUT) for node in nodes]
    finally:
        for node in nodes:
            node.kill()
    texts = [(tmp_path / f"node-{rank}").read_text() for rank in range(2)]
    assert codes == [0, 0], "\n".join(texts)
    assert (tmp_path / "died").read_text() == "1"
    assert "finished at step 3" in texts[0] and "rank 1 holds experts 2-3" in texts[0]
    assert "step " not in texts[1].replace("step-", "")  # rank 0 is on node 0, and alone says how it goes
    assert [row["step"] for row in read_metrics(folder / "metrics.jsonl")] == [0, 1, 2, 3]


DIES_ONCE = """
import os, signal, sys

class Finder:
    def find_spec(self, name, path=None, target=None):
        if name == "pretrain.start.run" and os.environ.get("RANK") == "1" and not os.path.exists(os.environ["DIED"]):
            sys.meta_path.remove(self)
            from pretrain.trainer import Trainer

            step = Trainer._step

            def dying(trainer, *args):
                if trainer.step == 2:
                    with open(os.environ["DIED"], "w") as file:
                        file.write(os.environ["RANK"])
                    os.kill(os.getpid(), signal.SIGKILL)
                return step(trainer, *args)

            Trainer._step = dying
        return None

if "RANK" in os.environ:
    sys.meta_path.insert(0, Finder())
"""

# Slurm


SRUN = """#!/usr/bin/env bash
# A task a node, the numbers that Slurm gives them, signals handed on, the highest exit code of all.
while [[ $1 == --* ]]; do shift; done
tasks=() last=0
trap 'kill -USR1 "${tasks[@]}"' USR1
for ((node = 0; node < SLURM_JOB_NUM_NODES; node++)); do
    SLURM_NODEID=$node "$@" &
    tasks+=($!)
done
echo "${tasks[@]}" >"$FAKE/tasks.tmp" && mv "$FAKE/tasks.tmp" "$FAKE/tasks"
for task in "${tasks[@]}"; do
    wait "$task"; code=$?
    while kill -0 "$task" 2>/dev/null; do wait "$task"; code=$?; done
    wait "$task"; code=$?
    ((code > last)) && last=$code
done
exit "$last"
"""
SCONTROL = """#!/usr/bin/env bash
if [[ $1 == show ]]; then for ((n = 0; n < SLURM_JOB_NUM_NODES; n++)); do echo 127.0.0.1; done; exit; fi
echo "$@" >>"$FAKE/scontrol"
"""


@pytest.fixture
def slurm(environment, tmp_path):
    """Starts the template as Slurm does, a copy of it in a folder of Slurm's, in a job of two nodes."""
    commands, spool = tmp_path / "bin", tmp_path / "spool"
    for folder in (commands, spool):
        folder.mkdir()
    for name, text in (("srun", SRUN), ("scontrol", SCONTROL)):
        (commands / name).write_text(text)
        (commands / name).chmod(0o755)
    shutil.copy(SCRIPTS["slurm.sbatch"], spool / "slurm_script")
    started = []

    def start(*argv, **variables):
        of_job = {"SLURM_JOB_ID": "17", "SLURM_JOB_NUM_NODES": "2", "SLURM_JOB_NODELIST": "node[1-2]"}
        of_job |= {"SLURM_SUBMIT_DIR": str(FOLDER.parent), "FAKE": str(tmp_path), "MASTER_PORT": str(free_port())}
        of_job["PATH"] = f"{commands}{os.pathsep}{environment['PATH']}"
        output = (tmp_path / f"slurm-{len(started)}.out").open("w")
        (tmp_path / "tasks").unlink(missing_ok=True)
        started.append(
            subprocess.Popen(
                ["bash", spool / "slurm_script", *argv],
                env=environment | of_job | {key: str(value) for key, value in variables.items()},
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=tmp_path,
            )
        )
        return started[-1], Path(output.name)

    yield start
    for process in started:
        process.kill()


def wait_for_steps(folder, count, process, output):
    deadline = time.monotonic() + TIMEOUT
    while not ((folder / "metrics.jsonl").exists() and len(read_metrics(folder / "metrics.jsonl")) > count):
        assert process.poll() is None and time.monotonic() < deadline, output.read_text()
        time.sleep(0.05)


# Whom Slurm signals: the batch shell (--signal=B:USR1), the tasks alone, or every process of the step.
@pytest.mark.slow
@pytest.mark.parametrize("whom", ["batch shell", "tasks", "all processes"])
def test_a_preempted_job_saves_is_queued_again_and_goes_on(slurm, tiny_corpus, tmp_path, whom):
    from runs import descendants

    folder = tmp_path / "run"
    endless = tiny(tiny_corpus, train={"steps": 100_000, "validation-every": 50_000}, checkpoint={"every": 50_000})
    job, output = slurm(*endless, RUN_FOLDER=folder)
    wait_for_steps(folder, 3, job, output)
    tasks = [int(pid) for pid in (tmp_path / "tasks").read_text().split()]
    everyone = [below for task in tasks for below in (task, *descendants(task))]
    for pid in {"batch shell": [job.pid], "tasks": tasks, "all processes": everyone}[whom]:
        os.kill(pid, signal.SIGUSR1)
    code = job.wait(TIMEOUT)
    text = output.read_text()
    assert code == EXIT_REQUEUE, text
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"
    assert "stopped at step" in text and "job 17 goes back into the queue" in text
    assert "Traceback" not in text
    (checkpoint,) = (folder / "checkpoints").iterdir()
    last = read_metrics(folder / "metrics.jsonl")[-1]["step"]
    assert checkpoint.name == f"step-{last:08d}"

    rest = tiny(tiny_corpus, train={"steps": last + 2, "validation-every": 50_000}, checkpoint={"every": 50_000})
    again, output = slurm(*rest, RUN_FOLDER=folder)
    assert again.wait(TIMEOUT) == 0, output.read_text()
    assert f"finished at step {last + 2}" in output.read_text()
    assert (tmp_path / "scontrol").read_text() == "requeue 17\n"  # as before


STAND_IN = """#!/usr/bin/env bash
# What the template sees of a run: it ends when it is told to, or at once, with a code.
trap 'exit 75' USR1
echo "$NNODES $NODE_RANK $RESUME $*" >>"$FAKE/began"
[[ -z $END ]] || exit "$END"
while :; do sleep 0.02; done
"""
ENDS = {
    "a notice to the batch shell": ("", signal.SIGUSR1, 75, "requeue 17\n"),
    "a cancelled job": ("", signal.SIGTERM, 75, None),
    "notified without the batch shell": ("75", None, 75, "requeue 17\n"),
    "diverged": ("65", None, 65, None),
    "finished": ("0", None, 0, None),
}


@pytest.mark.by_default("a notice to the batch shell", "diverged")
@pytest.mark.parametrize("name", ENDS)
def test_which_jobs_are_queued_again(slurm, tmp_path, name):
    scripts = tmp_path / "scripts"
    scripts.mkdir()
    shutil.copy(FOLDER / "common.sh", scripts)
    variables = "NNODES=$SLURM_JOB_NUM_NODES NODE_RANK=$SLURM_NODEID\n"
    (scripts / "pretrain_multinode.sh").write_text(STAND_IN.replace("\n", f"\n{variables}", 1))
    end, number, code, queued = ENDS[name]
    job, output = slurm("--train.steps", "7", FMOE_SCRIPTS=scripts, END=end)
    began = tmp_path / "began"
    if number is not None:
        deadline = time.monotonic() + TIMEOUT
        while not (began.exists() and began.read_text().count("\n") == 2 and (tmp_path / "tasks").exists()):
            assert job.poll() is None and time.monotonic() < deadline, output.read_text()
            time.sleep(0.02)
        job.send_signal(number)
    assert job.wait(TIMEOUT) == code, output.read_text()
    assert sorted(began.read_text().splitlines()) == [f"2 {node} auto --train.steps 7" for node in range(2)]
    said = tmp_path / "scontrol"
    assert (said.read_text() if said.exists() else None) == queued


def test_a_job_whose_scripts_are_not_found_says_so(slurm, tmp_path):
    job, output = slurm(SLURM_SUBMIT_DIR=tmp_path)
    assert job.wait(TIMEOUT) == 2 and "FMOE_SCRIPTS=" in output.read_text()
