"""The command ``fmoe train RECIPE``.

It starts the ranks that the recipe's ``[parallel]`` needs, or this node's share of them, and trains. With
``--dry-run``, it prints the plan of the run instead.
"""

from pretrain import leave_working_folder, safe_environment

if __name__ == "__main__":
    leave_working_folder()  # before anything else is imported

import contextlib
import dataclasses
import json
import os
import shlex
import signal
import sys
from collections.abc import Iterator, Sequence

from fmoe.cli import run
from fmoe.errors import EXIT_USAGE, UserError, one_line
from fmoe.runtime import launcher
from pretrain.start import lock, ranks
from pretrain.start.codes import EXIT_DIVERGED, EXIT_REQUEUE
from pretrain.start.job import Job, check, parse

# Torch and megatron-core are imported where they are needed: their imports take seconds.


def main(argv: Sequence[str]) -> int:
    """Check the recipe and its inputs, train, and return the exit code.

    A single rank trains in this process, unless ``--max-restarts`` is set. So does a rank that torchrun started.
    Nothing is trained with ``--dry-run``, or if the run is finished already.
    """
    job = parse(argv, "fmoe train")
    if job.dry_run:
        return dry_run(check(job))
    job.announce()
    job = check(job)
    if launcher.world_size() > 1 or (job.recipe.parallel.world_size == 1 and not job.max_restarts):
        from pretrain.__main__ import main as train

        return train(argv, job)
    return start_ranks(job)


def dry_run(job: Job) -> int:
    """Print the plan of the run: the resolved recipe, the process grid and the bytes per rank. Return exit code 0.

    Reads no data, writes no files and needs no GPU.
    """
    os.environ["CUDA_VISIBLE_DEVICES"] = ""  # sizes do not depend on GPUs, and everything is on the meta device
    from pretrain import dryrun

    plan = dryrun.make_plan(job.recipe, job.nodes)
    text = json.dumps(dryrun.as_json(plan), indent=1) + "\n" if job.json else dryrun.describe(plan)
    sys.stdout.write(text)
    return 0


_EXPLAINED = (0, EXIT_USAGE, EXIT_DIVERGED, EXIT_REQUEUE, 128 + signal.SIGINT)  # the run has printed what to do


def start_ranks(job: Job) -> int:
    """Start this node's ranks, wait for their end, and return the run's exit code."""
    with contextlib.ExitStack() as stack:
        environment = stack.enter_context(rendezvous(job))
        if job.node_rank == 0:
            try:
                stack.enter_context(lock.hold(job.folder, lock.LAUNCH))
                with lock.hold(job.folder, lock.RUN):
                    pass  # no rank of an earlier run is alive
            except UserError as error:
                if job.nodes == 1:
                    raise
                job = dataclasses.replace(job, refusal=str(error))
        if not job.refusal and _is_finished(job):
            return 0
        sys.stdout.flush()
        log = job.folder / (f"errors-{job.node_rank}.log" if job.node_rank else "errors.log")
        code = ranks.run(job, environment, log)
        if code not in _EXPLAINED:
            _print_how_to_resume(job)
        return code


@contextlib.contextmanager
def rendezvous(job: Job) -> Iterator[dict[str, str]]:
    """Open the store where the ranks meet, on node 0; yield the environment variables of this node's ranks.

    Raises:
        UserError: the port of ``job.rendezvous`` is not free.
    """
    host, _, port = job.rendezvous.rpartition(":")
    store = None
    if job.node_rank == 0:
        from torch.distributed import DistNetworkError, TCPStore

        try:
            store = TCPStore("127.0.0.1", int(port or 0), is_master=True, wait_for_workers=False)
        except DistNetworkError as error:
            raise UserError(f"--rendezvous={job.rendezvous}: the port is not free here: {one_line(error)}") from error
        port = str(store.port)
    environment = safe_environment() | {"MASTER_ADDR": host or "127.0.0.1", "MASTER_PORT": port}
    # All ranks together use as many threads as the machine has cores.
    threads = max(1, len(os.sched_getaffinity(0)) // job.processes_per_node)
    environment.setdefault("OMP_NUM_THREADS", str(threads))
    yield environment
    del store  # it ends with its object


def _is_finished(job: Job) -> bool:
    """Check the recipe's callbacks, tasks, data and checkpoint before any rank starts.

    If the run is finished already, print its summary and return True.
    """
    from pretrain.callbacks import TaskEvaluation, build_callbacks
    from pretrain.data.inputs import open_inputs
    from pretrain.engine.model import check_parts
    from pretrain.start.resume import Finished, choose_start
    from pretrain.start.run import summarize

    check_parts(job.recipe)
    build_callbacks(job.recipe)
    if job.recipe.evaluation.tasks:
        TaskEvaluation(job.recipe)  # ranks then find downloaded documents
    start = choose_start(job, open_inputs(job.recipe))
    if isinstance(start, Finished):
        summarize(job.recipe)
    return isinstance(start, Finished)


def _print_how_to_resume(job: Job) -> None:
    from pretrain.checkpoint import latest
    from pretrain.tracking.folder import CHECKPOINTS

    words: list[str] = []
    for word, previous in zip(job.argv, ["", *job.argv], strict=False):
        is_where = previous == "--resume" and not word.startswith("-")
        if word != "--resume" and not word.startswith("--resume=") and not is_where:
            words.append(word)
    if job.name not in words:  # given as --resume RECIPE
        words.insert(0, job.name)
    sys.stderr.write(
        f"  newest checkpoint  {latest(job.folder / CHECKPOINTS) or 'none: the run starts over'}\n"
        f"  to resume          {shlex.join(['fmoe', 'train', *words, '--resume', 'auto'])}\n"
    )
    sys.stderr.flush()


if __name__ == "__main__":  # for installations without the command fmoe: `python -m pretrain.start.launch`
    sys.exit(run("fmoe train", lambda: main(sys.argv[1:])))
