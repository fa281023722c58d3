"""``python -m bench allocator``: effect of huge pages and allocator settings on a training step and on a layer.

A process reads these settings when it starts. Every run is therefore a new process, and a round starts one for each
setting, in a new random order. The time of a process is the median of its steps, after three untimed ones.
"""

import argparse
import ctypes.util
import json
import os
import random
import resource
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

from bench import frame, options, report
from bench.samples import Tokens

AS_IT_IS = "as it is"
_GIB = 1 << 30
_KEPT = {"MALLOC_MMAP_THRESHOLD_": str(_GIB), "MALLOC_TRIM_THRESHOLD_": str(8 * _GIB)}
_OF_TORCH = {"THP_MEM_ALLOC_ENABLE": "1"}
_OF_GLIBC = {"GLIBC_TUNABLES": "glibc.malloc.hugetlb=1"}
SETTINGS: dict[str, dict[str, str]] = {
    AS_IT_IS: {},
    "huge pages by torch": _OF_TORCH,
    "huge pages by glibc": _OF_GLIBC,
    "memory kept": _KEPT,
    "memory kept, huge pages by torch": _KEPT | _OF_TORCH,
    "memory kept, huge pages by glibc": _KEPT | _OF_GLIBC,
}
_WARMUP = 3


def settings() -> dict[str, dict[str, str]]:
    """Return the variables of every setting by name, including allocators that are installed on this machine."""
    found = dict(SETTINGS)
    for name in ("jemalloc", "tcmalloc"):
        library = ctypes.util.find_library(name)
        if library is not None:
            found[name] = {"LD_PRELOAD": library}
    return found


def main(argv: Sequence[str]) -> None:
    parser = options.parser("allocator", __doc__, rounds=6, warmup=None)
    known = settings()
    parser.add_argument("--settings", nargs="+", choices=list(known), default=list(known))
    parser.add_argument("--workloads", nargs="+", choices=list(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--precision", nargs="+", choices=["fp32", "bf16"], default=["fp32", "bf16"])
    parser.add_argument("--steps", type=int, default=8, help="timed steps of each process")
    parser.add_argument("--threads", type=int, default=None, help="threads of each process; by default all cores")
    parser.add_argument("--child", type=Path, help=argparse.SUPPRESS)  # marks a measured process
    arguments = parser.parse_args(argv)
    if arguments.child is not None:
        _child(arguments)
        return
    options.at_least(arguments, rounds=2, steps=1)
    names = list(dict.fromkeys([AS_IT_IS, *arguments.settings]))
    rows = []
    for workload in arguments.workloads:
        for precision in arguments.precision:
            rows.append(_measure(workload, precision, {name: known[name] for name in names}, arguments))
            print(rows[-1].label, {name: str(rows[-1].ratio(name)) for name in names}, flush=True)
    notes = [
        "* `CPU per step`: CPU time of all threads; `system`: its share in the kernel; `faults`: page faults per step.",
        "* `peak`: maximum resident memory of the process, including everything that is loaded.",
        f"* transparent huge pages of this machine: {_huge_pages()}.",
    ]
    machine = report.describe_machine() | {"threads": _threads(arguments)}
    report.write(rows, arguments.out, "allocator", machine, notes)


def _threads(arguments) -> int:
    """Return the number of threads of the measured processes."""
    return arguments.threads or len(os.sched_getaffinity(0))


def _measure(workload: str, precision: str, chosen: Mapping[str, Mapping[str, str]], arguments) -> frame.Measurement:
    order = random.Random(arguments.seed)
    results: dict[str, list[dict]] = {name: [] for name in chosen}
    for _ in range(arguments.rounds):
        for name in order.sample(list(chosen), len(chosen)):
            results[name].append(_run(workload, precision, chosen[name], arguments))
    facts = {}
    for name, of_setting in results.items():
        mean = {key: statistics.median(result[key] for result in of_setting) for key in of_setting[0]}
        facts[name] = {
            "CPU per step": report.duration(mean["cpu"]),
            "system": f"{mean['system']:.1%}",
            "faults": f"{mean['faults']:,.0f}",
            "peak, MB": f"{mean['peak'] / 1e6:,.0f}",
        }
    return frame.Measurement(
        label=f"{workload}, {precision}",
        reference=AS_IT_IS,
        rounds=arguments.rounds,
        warmup=_WARMUP,
        seed=arguments.seed,
        min_seconds=None,
        unit="tokens",
        seconds={name: [result["seconds"] for result in of_setting] for name, of_setting in results.items()},
        calls=dict.fromkeys(results, arguments.steps),
        facts=facts,
    )


def _run(workload: str, precision: str, variables: Mapping[str, str], arguments) -> dict[str, float]:
    every = {variable for setting in settings().values() for variable in setting}
    environment = {key: value for key, value in os.environ.items() if key not in every} | dict(variables)
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder) / "result.json"
        command = [sys.executable, "-W", "ignore", "-m", "bench", "allocator", "--child", str(out)]
        command += ["--workloads", workload, "--precision", precision, "--steps", str(arguments.steps)]
        if arguments.threads is not None:
            command += ["--threads", str(arguments.threads)]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
        if done.returncode:
            raise RuntimeError(f"{workload}, {precision}, {dict(variables)}: exit {done.returncode}\n{done.stdout}")
        return json.loads(out.read_text())


def _child(arguments) -> None:
    import torch

    from pretrain.start import process

    torch.set_num_threads(_threads(arguments))
    try:
        step = WORKLOADS[arguments.workloads[0]](arguments.precision[0])
        for _ in range(_WARMUP):
            step()
        before = resource.getrusage(resource.RUSAGE_SELF)
        seconds = []
        for _ in range(arguments.steps):
            begin = time.perf_counter()
            step()
            seconds.append(time.perf_counter() - begin)
        after = resource.getrusage(resource.RUSAGE_SELF)
    finally:
        process.stop()
    system = after.ru_stime - before.ru_stime
    user = after.ru_utime - before.ru_utime
    result = {
        "seconds": statistics.median(seconds),
        "cpu": (user + system) / arguments.steps,
        "system": system / max(system + user, 1e-9),
        "faults": (after.ru_minflt - before.ru_minflt) / arguments.steps,
        "peak": after.ru_maxrss * 1024,
    }
    arguments.child.write_text(json.dumps(result))


def _training_step(precision: str) -> Callable[[], object]:
    """Return a step of the quickstart's model, in one process."""
    from dataclasses import replace

    from megatron_patch import cpu
    from pretrain.config import load_recipe
    from pretrain.start import process

    processes = process.start()
    cpu.install()
    from pretrain.engine import Engine, init_parallel

    recipe = load_recipe("quickstart")
    recipe = replace(
        recipe,
        parallel=replace(recipe.parallel, expert=1, data=1),
        train=replace(recipe.train, precision=precision),
    )
    init_parallel(recipe)
    engine = Engine(recipe, processes)
    samples = Tokens(recipe)
    step = -1

    def run() -> None:
        nonlocal step
        step += 1
        engine.train_step(step, samples)
        engine.routing()

    return run


def _layer_step(name: str) -> Callable[[str], Callable[[], object]]:
    """Return the workload of forward and backward of our layer at a shape of ``bench layer``."""

    def setup(precision: str) -> Callable[[], object]:
        from bench.layer.contenders import OURS, layer_step, layers
        from bench.layer.problem import SHAPES, Problem
        from bench.layer.rows import PRECISIONS

        known = layers()
        ours = next(known[ours] for ours in OURS if ours in known)
        return layer_step(ours, Problem(SHAPES[name], PRECISIONS[precision]), backward=True)

    return setup


WORKLOADS: dict[str, Callable[[str], Callable[[], object]]] = {
    "training step": _training_step,
    "layer A": _layer_step("A"),
    "layer D": _layer_step("D"),
}


def _huge_pages() -> str:
    """Return the kernel's setting of huge pages, e.g. madvise; "none" if it has no such setting."""
    try:
        text = Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
    except OSError:
        return "none"
    return text.partition("[")[2].partition("]")[0]
