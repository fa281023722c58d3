"""``python -m bench checkpoint``: how long a checkpoint stalls the training of a larger form of the quickstart's model.

Contenders: the synchronous save; the asynchronous one, timed until training may continue; and writing the same number
of bytes with an fsync, as ``dd conv=fsync`` does. Ratios are to the synchronous save. The slowdown of training while
the background thread writes is not measured.
"""

import os
import shutil
import tempfile
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np

from bench import frame, options, report
from bench.samples import Tokens
from pretrain.config import Recipe, load_recipe
from pretrain.start import process

SYNC = "synchronous"
ASYNC = "asynchronous"
RAW = "write and fsync"
# With the quickstart's SwiGLU experts 140 million parameters; with AdamW's moments 1.7 GB.
MODEL = {"num_layers": 9, "hidden_size": 512, "attention.num_heads": 8, "ffn_hidden_size": 1024, "moe.num_experts": 8}
MODEL |= {"sequence_length": 32, "vocab_size": 32768}


def main(argv: Sequence[str]) -> None:
    parser = options.parser("checkpoint", __doc__, rounds=5, warmup=1)
    parser.add_argument(
        "--folder", type=Path, default=Path("."), help="folder on the disk to measure; it is left unchanged"
    )
    for name, value in MODEL.items():
        option = name.rpartition(".")[2].replace("_", "-")
        parser.add_argument(f"--{option}", dest=name, type=int, default=value, help=f"{name} of the model")
    arguments = parser.parse_args(argv)
    from megatron_patch import cpu

    cpu.install()
    from pretrain.engine import init_parallel

    recipe = load_recipe("quickstart")
    model = recipe.model.with_values({name: getattr(arguments, name) for name in MODEL})
    train = replace(recipe.train, global_batch=1, micro_batch=1)
    recipe = replace(recipe, model=model, train=train, parallel=replace(recipe.parallel, expert=1, data=1))
    processes = process.start()
    folder = Path(tempfile.mkdtemp(prefix="bench-checkpoint-", dir=arguments.folder))
    try:
        init_parallel(recipe)
        row = _Savers(recipe, processes, folder).measure(arguments)
    finally:
        process.stop()
        shutil.rmtree(folder)
    report.write([row], arguments.out, "checkpoint")
    if (ratio := row.ratio(ASYNC)) is not None:
        print(f"the asynchronous save stalls training for {1 / ratio.estimate:.1%} of the synchronous save's time")


class _Savers:
    """The contenders, over one model that has made a step."""

    def __init__(self, recipe: Recipe, processes, folder: Path):
        from pretrain.checkpoint.background import BackgroundWriter
        from pretrain.checkpoint.host import HostBuffers
        from pretrain.engine import Engine, state

        self._recipe = recipe
        self._folder = folder
        self._state = state
        self._engine = Engine(recipe, processes)
        self._engine.train_step(0, Tokens(recipe))  # before it, the optimizer has no state
        self._writer = BackgroundWriter()
        self._buffers = HostBuffers()
        self._begun = 0.0
        self._durable: list[float] = []
        self._first: float | None = None
        self._nbytes = self._collect().nbytes
        # The trainer does this in the background thread, after its first step.
        self._buffers.reserve((piece.place, piece.data) for piece in state.pieces(self._engine))

    def measure(self, arguments) -> frame.Measurement:
        mib = self._nbytes / 2**20
        row = frame.measure(
            [
                frame.Contender(SYNC, lambda: self._synchronous, work=mib),
                frame.Contender(ASYNC, lambda: self._asynchronous),
                frame.Contender(RAW, lambda: self._raw, work=mib),
            ],
            rounds=arguments.rounds,
            warmup=arguments.warmup,
            reference=SYNC,
            seed=arguments.seed,
            label=f"{self._recipe.num_params() / 1e6:.0f}M parameters, {self._nbytes / 1e9:.2f} GB",
            unit="MiB",
            line_up=self._clear,
        )
        self._clear()
        if self._durable:
            row.facts[ASYNC] = {
                "on disk after": report.duration(float(np.median(self._durable))),
                "first save": report.duration(self._first),
            }
        return row

    def _collect(self, buffers=None):
        from pretrain.checkpoint import collect

        run_state = {"optimizer": self._state.optimizer_state(self._engine)}
        return collect(
            self._state.pieces(self._engine), run_state, self._state.rank_state(self._engine), buffers=buffers
        )

    def _synchronous(self) -> None:
        from pretrain.checkpoint import write

        write(self._folder / "steps", 1, self._collect())

    def _asynchronous(self) -> None:
        from pretrain.checkpoint import write

        self._begun = time.perf_counter()
        snapshot = self._collect(self._buffers)

        def work(group) -> None:
            write(self._folder / "steps", 1, snapshot, group=group)
            self._durable.append(time.perf_counter() - self._begun)

        self._writer.start(work)
        self._first = self._first or time.perf_counter() - self._begun

    def _raw(self) -> None:
        from pretrain.checkpoint.shard import bytes_of

        with open(self._folder / "raw", "wb") as file:
            for piece in self._collect().pieces:
                file.write(bytes_of(piece.data.contiguous()))
            file.flush()
            os.fsync(file.fileno())

    def _clear(self) -> None:
        """Wait for pending writes and empty the folder; called before each run."""
        self._writer.wait()
        for path in self._folder.iterdir():
            shutil.rmtree(path) if path.is_dir() else path.unlink()
