"""The script for the first hour on a GPU, rehearsed without one."""

import os
import re
import subprocess
import sys
import tarfile
import time
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from bench import gpu
from bench.__main__ import BENCHMARKS
from bench.__main__ import main as bench
from bench.layer.contenders import layers_on_cuda
from bench.layer.problem import SHAPES, Problem

SCRIPT = Path(gpu.__file__).with_name("gpu_hour.sh")
CALLS = ["layer", "tests", "train", "tune"]


def test_probe(capsys):
    assert bench(["gpu", "probe", "--rehearse"]) == 0
    out = capsys.readouterr().out
    assert f"torch {version('torch')}\n" in out and "apex is not installed" in out
    assert re.search(r"bf16 GEMM of 256: \S+ TFLOP/s\ncopy of 1048576 bytes: \S+ TB/s\n$", out)


def test_smoke(capsys):
    assert bench(["gpu", "smoke", "--rehearse"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert {line.split()[0] for line in lines[:-1]} == {"ok", "skipped"} and lines[-1] == "0 checks failed"
    assert sum(line.startswith("ok") for line in lines) >= 8 and "sigmoid: forward and backward" in "".join(lines)


def test_a_check_that_fails_does_not_stop_the_others(capsys, monkeypatch):
    def broken(device):
        raise RuntimeError("an illegal memory access\nand more")

    monkeypatch.setattr(gpu, "_router", broken)
    monkeypatch.setattr(gpu, "_batch", lambda device: gpu._near(torch.ones(2), torch.tensor([1.0, 1.1]), 1e-3))
    assert bench(["gpu", "smoke", "--rehearse"]) == 1
    out = capsys.readouterr().out
    assert "FAILED   the router multiplies 16 bits into float32: RuntimeError: an illegal memory access and more" in out
    assert "FAILED   batches are copied in one transfer: AssertionError: relative error" in out
    assert "ok       switch: forward and backward" in out and out.endswith("2 checks failed\n")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu(capsys):
    assert bench(["gpu", "smoke"]) == 2
    assert "--rehearse" in capsys.readouterr().err


# In place of Python: notes the variables and words of each call, and leaves what the command would.
STAND_IN = r"""#!/bin/bash
echo "FMOE_CUDA=${FMOE_CUDA:-} FMOE_TUNE=${FMOE_TUNE:-} $*" >>"$NOTES"
for out; do :; done
case "$*" in
*--list) echo "${LISTED:-fmoe cuda}" ;;
*"data corpus"*) mkdir -p "$out" && echo text >"$out/train.jsonl" ;;
*"data tokenizer"*) echo model >"$out" ;;
*"data prepare"*) echo index >"$out.idx" ;;
*"bench layer"* | *"bench step"*)
    while [ "$1" != --out ]; do shift; done
    mkdir -p "$2" && echo "| fmoe cuda | 1 ms |" >"$2/rows.md" ;;
*"bench gpu smoke"*) exit "${SMOKE:-0}" ;;
*test_gpu_gemms*)
    if [ -n "${HANGS:-}" ]; then
        sleep 60 & # holds the output open
        trap 'echo "===== 7 passed in 1 s ====="; exit 2' INT
        wait
    fi ;;
esac
"""


def hour(folder, *arguments, change=None, **variables):
    """Run the script, or a changed copy, where SIGINT is ignored; return it, the files it leaves, and the calls."""
    text = SCRIPT.read_text()
    if change is not None:
        assert text.count(change[0]) == 1, change
        text = text.replace(*change)
    (folder / "bench").mkdir()
    script, python, out = folder / "bench" / "gpu_hour.sh", folder / "python", folder / "out"
    script.write_text(text)
    python.write_text(STAND_IN)
    python.chmod(0o755)
    environment = os.environ | {"OUT": str(out), "SITE": str(folder / "site"), "PYTHON": str(python)}
    environment |= {"NOTES": str(folder / "notes"), "CORPUS": str(folder / "absent"), **variables}
    command = ["bash", "-c", 'trap "" INT; exec bash "$@"', "bash", str(script), *arguments]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=50)
    files = sorted(str(path.relative_to(out)) for path in out.rglob("*") if path.is_file())
    notes = folder / "notes"
    return done, files, notes.read_text().splitlines() if notes.exists() else []


def test_a_call_leaves_an_archive_and_prints_its_tables_last(tmp_path):
    done, files, calls = hour(tmp_path)
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert files == [f"gpu-{name}.tar.gz" for name in sorted(CALLS)]
    assert re.findall(r"^=== (\w+)$", done.stdout, re.MULTILINE) == CALLS
    assert done.stdout.splitlines()[-2:] == ["--- tune", "| fmoe cuda | 1 ms |"]
    with tarfile.open(tmp_path / "out" / "gpu-layer.tar.gz") as archive:
        assert {"./probe.log", "./smoke.log", "./layer.log", "./layer/rows.md"} <= {*archive.getnames()}
    trained = [call for call in calls if "-m pretrain" in call]
    assert [call.split()[0] for call in trained] == ["FMOE_CUDA=", "FMOE_CUDA=0"]
    assert any("FMOE_TUNE=1" in call and "bench layer" in call for call in calls)
    assert not list((tmp_path / "site").rglob("*.log"))


def test_the_commands_exist():
    """Benchmarks, shapes, contenders, recipes and folders that the script names."""
    text = SCRIPT.read_text()
    for name in re.findall(r"-m bench (\w+)", text):
        assert name in BENCHMARKS
    for shapes in re.findall(r"--shapes (\S+)", text):
        assert set(shapes.strip(")").split(",")) <= SHAPES.keys()
    for path in re.findall(r"tests/gpu\S*\.py", text):
        assert (SCRIPT.parent.parent / path).exists(), path
    for name in re.findall(r'"((?:fmoe|sorted) [^"]*)"', text.replace(r"\"", "")):
        assert name in layers_on_cuda(), name


def test_a_failure_does_not_stop_the_others(tmp_path):
    done, files, calls = hour(tmp_path, "layer", SMOKE="3")
    assert done.returncode == 1 and files == ["gpu-layer.tar.gz"] and "bench layer" in calls[-1]
    assert done.stdout.splitlines()[-1] == "== smoke ended with 3"


def test_tests_that_reach_the_limit_list_their_results(tmp_path):
    """Although a process of theirs holds the output open, and SIGINT is ignored, as in the background of a shell."""
    change = ("run tests 400", "run tests 1")
    begin = time.monotonic()
    done, files, _ = hour(tmp_path, "tests", change=change, HANGS="1")
    assert done.returncode == 1 and files == ["gpu-tests.tar.gz"] and time.monotonic() - begin < 30
    assert "--- tests\n===== 7 passed in 1 s =====\n" in done.stdout


def test_an_interrupt_keeps_what_there_is(tmp_path):
    """The archive has the logs so far, and nothing that the script started goes on."""
    (tmp_path / "bench").mkdir()
    (tmp_path / "bench" / "gpu_hour.sh").write_text(SCRIPT.read_text())
    python = tmp_path / "python"
    python.write_text(f'#!/bin/bash\necho "begun $$"\necho $$ >{tmp_path}/pid\nsleep 60\n')
    python.chmod(0o755)
    environment = os.environ | {"OUT": str(tmp_path / "out"), "SITE": str(tmp_path / "site"), "PYTHON": str(python)}
    script = subprocess.Popen(["bash", str(tmp_path / "bench" / "gpu_hour.sh"), "layer"], env=environment)
    wait_until(lambda: (tmp_path / "pid").exists() and (tmp_path / "pid").read_text())
    script.terminate()
    assert script.wait(20) == 130
    with tarfile.open(tmp_path / "out" / "gpu-layer.tar.gz") as archive:
        assert b"begun" in archive.extractfile("./probe.log").read()
    wait_until(lambda: not Path("/proc", (tmp_path / "pid").read_text().strip()).exists())


def wait_until(condition):
    for _ in range(400):
        if condition():
            return
        time.sleep(0.05)
    pytest.fail("the time is over")


def test_a_rehearsal_passes(tmp_path):
    done, files, calls = hour(tmp_path, "--rehearse")
    assert done.returncode == 0 and done.stderr == "", done.stdout + done.stderr
    assert files == [f"gpu-{name}.tar.gz" for name in sorted(CALLS)]
    measured = [call for call in calls if "--device cuda" in call]
    assert len(measured) == 5 and all(call.endswith("--list") for call in measured)
    assert any("-m pretrain" in call and "--train.steps 2" in call for call in calls)


@pytest.mark.parametrize(
    ("name", "change", "variables", "error"),
    [
        ("train", ('both prepare 30 "$PYTHON"', "both prepare 30 true"), {}, r"/corpus/train\.idx is missing"),
        ("train", ('both corpus 30 "$PYTHON"', "both corpus 30 false"), {}, "corpus ended with 1"),
        ("layer", None, {"LISTED": "fmoe torch"}, 'layer: no contender is "fmoe cuda"'),
        ("train", None, {"LISTED": "fmoe torch"}, 'step: no contender is "fmoe cuda"'),
        ("tune", None, {"LISTED": "megatron-core MoELayer"}, 'skew: no contender is "fmoe cuda"'),
        ("layer", ('--no-peak --out "$WORK/layer"', '--no-peak --out "$OUT"'), {}, "beside the archive: .*/rows.md"),
        ("layer", ("run layer 300", "run layer 400"), {}, "the limits of layer add up to 630 s, more than 540 s"),
        ("tests", ("run memcheck 110", "run memcheck 140"), {}, "the limits of tests add up to 560 s"),
        ("layer", ("MEGABYTES=16", "MEGABYTES=0"), {}, "the archive has more than 0 MiB"),
        ("layer", ('rehearse smoke "$PYTHON"', "rehearse smoke false"), {}, "the rehearsal of smoke failed"),
    ],
    ids=["index", "corpus", "layer", "step", "skew", "files", "limit", "limit of tests", "size", "command"],
)
def test_a_rehearsal_finds_an_omission(name, change, variables, error, tmp_path):
    done, _, _ = hour(tmp_path, "--rehearse", name, change=change, **variables)
    assert done.returncode == 1 and re.search(f"^== .*{error}", done.stdout, re.MULTILINE), done.stdout + done.stderr


@pytest.mark.parametrize("code", [0, 1])
def test_wheels_are_installed_once_or_are_a_failure(code, tmp_path):
    wheels, site = tmp_path / "wheels", tmp_path / "site"
    wheels.mkdir()
    (wheels / "some.whl").touch()
    change = None if code == 0 else ('"$PYTHON" -m pip install', "false")
    done, _, calls = hour(tmp_path, "--rehearse", "layer", change=change, WHEELS=str(wheels))
    assert done.returncode == code and (site / ".installed").exists() == (code == 0)
    assert sum("pip install" in call for call in calls) == 1 - code


def test_an_unknown_call(tmp_path):
    done, files, calls = hour(tmp_path, "layer", "perf")
    assert done.returncode == 2 and "CALL=perf is unknown" in done.stdout and not files and not calls


@pytest.mark.slow
def test_the_rehearsal(tmp_path):
    environment = os.environ | {"OUT": str(tmp_path / "out"), "SITE": str(tmp_path / "site"), "PYTHON": sys.executable}
    environment |= {"OMP_NUM_THREADS": "1", "CORPUS": str(tmp_path / "absent")}
    command = ["bash", str(SCRIPT), "--rehearse"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=550, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "0 checks failed" in done.stdout and "step 2/2" in done.stdout
    with tarfile.open(tmp_path / "out" / "gpu-tests.tar.gz") as archive:
        assert b"test_gpu_layer.py::test_values" in archive.extractfile("./tests.log").read()


def test_profiles(capsys):
    assert bench(["gpu", "profile", "--rehearse"]) == 0
    assert "aten::" in capsys.readouterr().out


def test_weights_of_a_problem_do_not_depend_on_its_other_weights():
    problem, other = (Problem(SHAPES["tiny"], torch.float32, seed=seed) for seed in (0, 1))
    assert problem.w_in_EPD.shape == (4, 48, 32) and problem.router_ED.shape == (4, 32)
    assert abs(float(problem.w_in_EPD.std()) * 32**0.5 - 1) < 0.05
    assert not torch.equal(problem.w_in_EPD, other.w_in_EPD)
    assert not torch.equal(problem.w_in_EPD[0], problem.w_in_EPD[1])
