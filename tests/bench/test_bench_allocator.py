"""The benchmark of allocator settings: processes with exactly the settings asked for, paired round by round."""

import json
import subprocess
from types import SimpleNamespace

import pytest

from bench.studies import allocator
from fmoe.errors import UserError


@pytest.fixture
def seconds(monkeypatch):
    """Runs are made up: ``seconds[workload, precision]`` by setting."""
    asked = []

    def run(workload, precision, variables, arguments):
        asked.append((workload, precision, dict(variables)))
        name = next(name for name, of_it in allocator.SETTINGS.items() if of_it == variables)
        second = 1.0 if name == allocator.AS_IT_IS else 0.5
        return {"seconds": second, "cpu": 2.0, "system": 0.25, "faults": 1234.0, "peak": 5e8}

    monkeypatch.setattr(allocator, "_run", run)
    return asked


def test_settings_alternate_and_are_compared(seconds, tmp_path, capsys):
    chosen = ["huge pages by torch", "memory kept"]
    main = ["--rounds", "4", "--workloads", "layer A", "--precision", "fp32", "--out", str(tmp_path)]
    allocator.main([*main, "--settings", *chosen])
    assert len(seconds) == 4 * 3
    for begin in range(0, 12, 3):  # a round has each once, what the machine is like without them among them
        names = {json.dumps(variables) for _, _, variables in seconds[begin : begin + 3]}
        assert names == {json.dumps(allocator.SETTINGS[name]) for name in [allocator.AS_IT_IS, *chosen]}
    (row,) = json.loads((tmp_path / "allocator.json").read_text())["measurements"]
    assert row["reference"] == allocator.AS_IT_IS and row["seconds"]["memory kept"] == [0.5] * 4
    text = capsys.readouterr().out
    assert "2.000 [2.000, 2.000]" in text and "25.0%" in text and "1,234" in text


def test_a_process_has_the_settings_and_no_others(monkeypatch):
    environments = []

    def run(command, env, **_):
        environments.append(env)
        out = command[command.index("--child") + 1]
        with open(out, "w") as file:
            json.dump({"seconds": 1.0}, file)
        return subprocess.CompletedProcess(command, 0, "")

    monkeypatch.setattr(subprocess, "run", run)
    monkeypatch.setenv("MALLOC_TRIM_THRESHOLD_", "7")
    monkeypatch.setenv("THP_MEM_ALLOC_ENABLE", "0")
    arguments = SimpleNamespace(steps=1, threads=None)
    for name in (allocator.AS_IT_IS, "huge pages by glibc"):
        assert allocator._run("layer A", "fp32", allocator.SETTINGS[name], arguments) == {"seconds": 1.0}
    plain, huge = environments
    assert not plain.keys() & {"MALLOC_TRIM_THRESHOLD_", "THP_MEM_ALLOC_ENABLE", "GLIBC_TUNABLES"}
    assert huge == plain | {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}


def test_a_process_that_fails_is_told(monkeypatch):
    failed = subprocess.CompletedProcess([], 1, "no such thing")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(RuntimeError, match=r"layer A, bf16, .*: exit 1\nno such thing"):
        allocator._run("layer A", "bf16", {}, SimpleNamespace(steps=1, threads=None))


def test_a_process_writes_what_it_measured(monkeypatch, tmp_path):
    calls = []
    monkeypatch.setitem(allocator.WORKLOADS, "layer A", lambda precision: lambda: calls.append(precision))
    out = tmp_path / "result.json"
    argv = ["--workloads", "layer A", "--precision", "bf16", "--steps", "5", "--threads", "1", "--child", str(out)]
    allocator.main(argv)
    assert calls == ["bf16"] * (allocator._WARMUP + 5)
    result = json.loads(out.read_text())
    assert result.keys() == {"seconds", "cpu", "system", "faults", "peak"} and 0 <= result["system"] <= 1
    assert result["peak"] > 10e6


@pytest.mark.parametrize("option", ["--rounds", "--steps"])
def test_wrong_options(option):
    with pytest.raises(UserError, match=f"{option}=0 must be"):
        allocator.main([option, "0"])
