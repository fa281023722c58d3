"""The benchmark of allocator settings: processes with exactly the settings asked for."""

import json
import subprocess
from types import SimpleNamespace

from bench.studies import allocator


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
