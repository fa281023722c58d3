"""New processes in milliseconds: one process imports torch and megatron-core, and forks for every call.

Each call gets processes that nobody used before, so that what a call leaves behind (Megatron's groups, the CPU runtime,
a killed rank) touches no other test. They see no GPU: what is tested with them is the CPU runtime and gloo.
"""

import gc
import importlib
import os
import pickle
import select
import selectors
import signal
import sys
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rank_pool import DIED, Raised, die_with_parent, warm_context

from fmoe.errors import UserError

IMPORTS = [
    "pretrain.start.run",
    "pretrain.models.bert",
    "pretrain.models.gpt",
    "pretrain.models.t5",
    "rich._emoji_codes",
]
# A rank that returned stays for as many seconds, or until all ranks have ended: gloo's constructor fails if a peer that
# it is still connecting to, for a group that this test needs no more, ends.
LINGER = 5
TIMEOUT = 240  # seconds for one call: a hang fails the test instead of blocking it


@dataclass(frozen=True)
class Ended:
    """Result of a command: exit code (minus the signal's number if it was killed) and output."""

    code: int
    out: str
    err: str


def values(results: list[Any]) -> list[Any]:
    """The results of `ForkServer.run` or `RankPool.run`, none of which may be a `Raised` or `DIED`."""
    for rank, result in enumerate(results):
        if isinstance(result, Raised):
            raise AssertionError(f"rank {rank}:\n{result.trace}")
        if isinstance(result, str) and result == DIED:
            raise AssertionError(f"rank {rank} died")
    return results


def only(results: list[Any]) -> Any:
    """The one value of a run of one rank."""
    (value,) = values(results)
    return value


def refusal(results: list[Any]) -> str:
    """The message of the `fmoe.UserError` that every rank raised; it has one line."""
    for result in results:
        assert isinstance(result, Raised), f"it was accepted: {result}"
        assert issubclass(result.kind, UserError) and "\n" not in result.message, result.trace
    return results[0].message


class ForkServer:
    """``with ForkServer(tmp_path) as forks: forks.run(2, function, *args)``, ``forks.command("fmoe", "train", ...)``.

    Functions travel by their module and name, as with `RankPool`.
    """

    def __init__(self, folder: Path):
        context = warm_context()
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=_serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        self._folder = folder
        self._calls = 0
        self._sent = 0

    def run(self, size: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """``function(*args)`` in ``size`` processes with a gloo group between them; one result a rank.

        A function that raises gives a `Raised`, a process that ends `DIED`.
        """
        ends = self._call(size, _run_rank, (str(self._next_path()), function, args))
        return [DIED if data is None else pickle.loads(data) for _, data in ends]  # noqa: S301 - our own process wrote it

    def command(
        self,
        program: str,
        *argv: object,
        size: int = 1,
        folder: Path | None = None,
        environment: Mapping[str, str] | None = None,
        before: Callable[[], Any] | None = None,
    ) -> list[Ended]:
        """``python -m PROGRAM ARGV...`` in ``size`` processes, with torchrun's environment if there are two or more.

        Args:
            program: a module, or a file by its path.
            folder: to run in; by default an empty one.
            environment: variables beside those of this process.
            before: called in each process first, e.g. to break something.
        """
        path = self._next_path()
        path.mkdir()
        variables = dict(environment or {})
        store = None
        if size > 1:
            from torch.distributed import TCPStore

            # As torchrun does: a store that the workers only connect to, so that nobody has to guess a free port.
            store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
            variables |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port), "WORLD_SIZE": str(size)}
            variables["TORCHELASTIC_USE_AGENT_STORE"] = "True"
        arguments = (program, [str(a) for a in argv], str(folder or path), variables, before, str(path))
        ends = self._call(size, _run_command, arguments)
        del store
        return [
            Ended(code, (path / f"{rank}.out").read_text(), (path / f"{rank}.err").read_text())
            for rank, (code, _) in enumerate(ends)
        ]

    def _next_path(self) -> Path:
        self._calls += 1
        return self._folder / f"call{self._calls}"

    def _call(self, size: int, target: Callable, args: tuple) -> list[tuple[int, bytes | None]]:
        self._sent += 1
        self._pipe.send((self._sent, size, target, args))
        number = 0
        end = time.monotonic() + 2 * TIMEOUT
        while number != self._sent:  # others are of calls that a timeout of their test interrupted
            if not self._pipe.poll(max(0.0, end - time.monotonic())):
                raise TimeoutError("the fork server did not answer")
            number, ends = self._pipe.recv()
        if ends is None:
            raise TimeoutError(f"{target.__name__}{args} did not end in {TIMEOUT} s")
        return ends

    def __enter__(self) -> "ForkServer":
        return self

    def __exit__(self, *_: object) -> None:
        self._pipe.close()
        self._process.join(5)
        if self._process.is_alive():
            self._process.kill()
            self._process.join()


def _serve(pipe) -> None:
    die_with_parent()
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1"}
    import torch

    torch.set_num_threads(1)  # a fork must not inherit a thread pool
    load = torch.storage._load_from_bytes
    for name in IMPORTS:
        importlib.import_module(name)
    # megatron-core replaces it from 0.17 on; tensors that a rank returns would bring megatron-core to their reader.
    torch.storage._load_from_bytes = load
    from fmoe.errors import BuildError
    from fmoe.kernels.native import build
    from pretrain.engine import flops

    with suppress(BuildError):
        build.library()
    flops._measure = lambda *_: 1e11  # FLOP/s, where a run would take 0.1 s to measure
    gc.freeze()  # a collection in a child would copy every page with an object on it

    while True:
        try:
            number, size, target, args = pipe.recv()
        except EOFError:
            os._exit(0)  # tearing down torch takes seconds
        pipe.send((number, _fork(size, target, args)))


def _fork(size: int, target: Callable, args: tuple) -> list[tuple[int, bytes | None]] | None:
    """(exit code, what it returned) of every rank; None after a timeout, with all of them killed."""
    pids = []
    pipes = []
    ended, end = os.pipe()  # `end` stays open until all ranks have ended
    for rank in range(size):
        read, write = os.pipe()
        pid = os.fork()
        if pid == 0:
            code = 1
            try:
                os.close(end)
                os.setsid()  # whatever it starts can be killed with it
                die_with_parent()
                data = target(rank, size, *args)
                with os.fdopen(write, "wb") as file:
                    file.write(pickle.dumps(data[1]))
                code = data[0]
                if not code and not isinstance(data[1], Raised):
                    select.select([ended], [], [], LINGER)
            except BaseException:
                traceback.print_exc()
            finally:
                sys.stdout.flush()
                sys.stderr.flush()
                os._exit(code)
        os.close(write)
        pids.append(pid)
        pipes.append(read)
    received = _read_all(pipes)
    os.close(end)
    os.close(ended)
    if received is None:
        for pid in pids:
            os.killpg(pid, signal.SIGKILL)
            os.waitpid(pid, 0)
        return None
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return [(code, data or None) for code, data in zip(codes, received, strict=True)]


def _read_all(pipes: Sequence[int]) -> list[bytes] | None:
    """Return the data from the pipes until all are closed; None if that takes longer than `TIMEOUT`."""
    received = {pipe: b"" for pipe in pipes}
    deadline = time.monotonic() + TIMEOUT
    with selectors.DefaultSelector() as selector:
        for pipe in pipes:
            selector.register(pipe, selectors.EVENT_READ)
        while selector.get_map():
            ready = selector.select(max(0.0, deadline - time.monotonic()))
            if not ready:
                break
            for key, _ in ready:
                data = os.read(key.fd, 1 << 16)
                received[key.fd] += data
                if not data:
                    selector.unregister(key.fd)
        is_complete = not selector.get_map()
    for pipe in pipes:
        os.close(pipe)
    return list(received.values()) if is_complete else None


def _run_rank(rank: int, size: int, rendezvous: str, function: Callable, args: tuple) -> tuple[int, Any]:
    import torch.distributed as dist

    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=size)
    dist.barrier()  # a rank that the function ends would break connections that other ranks still make
    try:
        return 0, function(*args)
    except Exception as error:
        return 0, Raised(type(error), str(error), traceback.format_exc())


def _run_command(
    rank: int, size: int, program: str, argv: list[str], folder: str, variables: dict, before, outputs: str
) -> tuple[int, None]:
    import runpy

    for number, suffix in ((1, "out"), (2, "err")):
        file = os.open(f"{outputs}/{rank}.{suffix}", os.O_WRONLY | os.O_CREAT | os.O_APPEND)
        os.dup2(file, number)
        os.close(file)
    os.environ |= variables
    if size > 1:
        os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    os.chdir(folder)
    sys.argv = [program, *argv]
    try:
        if before is not None:
            before()
        if program.endswith(".py"):
            runpy.run_path(program, run_name="__main__")
        else:
            runpy.run_module(program, run_name="__main__", alter_sys=True)
    except SystemExit as end:
        return end.code or 0, None
    return 0, None
