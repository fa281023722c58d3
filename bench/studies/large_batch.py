"""``python -m bench large_batch``: loss at 32 times the batch and equal tokens, by optimizer.

The model is a small Mixture-of-Experts GPT on Python's standard library. Every run is a ``fmoe train`` of
`large_batch.toml` with a contender's options. Each contender's learning rate is swept at the first seed, starting from
equally many rates in factors of 2. The sweep continues beyond an end as long as the best rate is there; the other seeds
run at the best rate.

At the end the mean gap of each contender of ``--gap-of`` to the base batch must be at most ``--gap``; otherwise the
exit code is 1.

The figures of finished runs are kept, so the same command resumes; an interrupted run starts again.
"""

import json
import math
import os
import resource
import shutil
import sys
import sysconfig
from collections.abc import Iterator, Sequence
from contextlib import redirect_stderr, redirect_stdout
from dataclasses import asdict, dataclass
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch

from bench import options, report
from bench.studies import sweep
from fmoe.errors import UserError
from fmoe.files import write_atomically
from pretrain.config import Recipe, load_recipe
from pretrain.data.corpus import write_python_library
from pretrain.data.prepare import prepare
from pretrain.data.tokenizers import train_tokenizer
from pretrain.start import ranks
from pretrain.start.codes import EXIT_DIVERGED
from pretrain.tracking import read_metrics

RECIPE = Path(__file__).with_suffix(".toml")
BASE_BATCH = 4
FACTOR = 32
WARMUP = 0.1  # of the tokens, for every contender
SMALL = "adamw"


@dataclass(frozen=True)
class Contender:
    """An optimizer with its options, factor of the base batch, and learning rates with which its sweep begins."""

    name: str
    title: str
    factor: int
    rates: tuple[float, ...]
    options: tuple[str, ...] = ()


_ADAMW_RATES = (2e-3, 4e-3, 8e-3)  # of the base batch
_SCALED = ("--optimizer.base-batch", str(BASE_BATCH), "--optimizer.lr-scaling")
CONTENDERS = (
    # beta2 and eps are those of the LAMB paper's experiments.
    Contender(
        "lamb",
        "LAMB",
        FACTOR,
        (1e-2, 2e-2, 4e-2),
        ("--optimizer.name", "lamb", "--optimizer.beta2", "0.999", "--optimizer.eps", "1e-6"),
    ),
    # LARS's decay is in the gradient, where 1e-4 is usual.
    Contender(
        "lars", "LARS", FACTOR, (4.0, 8.0, 16.0), ("--optimizer.name", "lars", "--optimizer.weight-decay", "1e-4")
    ),
    # Moonlight's scale takes AdamW's rates: those of a batch of this size.
    Contender("muon", "Muon", FACTOR, (8e-3, 1.6e-2, 3.2e-2), ("--optimizer.name", "muon")),
    Contender("adamw-linear", "AdamW, rate x 32", FACTOR, _ADAMW_RATES, (*_SCALED, "linear")),
    Contender("adamw-sqrt", "AdamW, rate x sqrt(32)", FACTOR, _ADAMW_RATES, (*_SCALED, "sqrt")),
    Contender(SMALL, "AdamW, base batch", 1, _ADAMW_RATES),
)


@dataclass(frozen=True)
class Size:
    """Size of the study."""

    steps: int = 6400  # at the base batch
    seeds: tuple[int, ...] = (1, 2, 3)  # sweeps use the first
    rates: int = 3  # with which a sweep begins
    beyond: int = 4  # rates that a sweep may add
    validation: int = 1024  # sequences
    library: str = ""  # folder below the standard library to read
    gap: float = 0.25  # most nats per token above the base batch


QUICK = Size(steps=64, seeds=(1, 2), rates=1, beyond=0, validation=128, library="importlib", gap=math.inf)


@dataclass(frozen=True)
class Figure:
    """Result of a run; ``loss`` is the validation loss at the end, in nats per token, or None if the run diverged."""

    contender: str
    rate: float
    seed: int
    loss: float | None
    cpu_seconds: float


class Study:
    """The runs of a study, in a folder.

    Args:
        folder: folder of corpus, runs and figures.
        size: size of the study.
        threads: number of threads of a run.
    """

    def __init__(self, folder: Path, size: Size, threads: int):
        self.folder = folder
        self.size = size
        self._threads = threads
        self.figures: list[Figure] = []

    def read(self) -> None:
        """Load the figures of finished runs.

        Raises:
            UserError: a figure belongs to another recipe or size of the study.
        """
        for contender in CONTENDERS:
            for path in sorted((self.folder / "figures").glob(f"{contender.name}_*.json")):
                values = json.loads(path.read_text())
                figure = Figure(**values["figure"])
                if values["recipe"] != _comparable(self._recipe(contender, figure.rate, figure.seed)):
                    raise UserError(
                        f"{path} belongs to another recipe or size of study: choose another --out, or delete it"
                    )
                self.figures.append(figure)

    def run(self) -> None:
        """Make the corpus, and all runs that are missing."""
        # On the host everywhere: so small a model is no faster on a GPU, which a forked child could not open anyway.
        os.environ["CUDA_VISIBLE_DEVICES"] = ""
        self._make_corpus()
        import pretrain.start.run  # noqa: F401  megatron-core, once for all children

        for contender, rate, seed in self._missing():
            figure = self._run(contender, rate, seed)
            self.figures.append(figure)
            shown = "diverged" if figure.loss is None else f"validation loss {figure.loss:.4f}"
            print(
                f"{len(self.figures):3} {contender.title}, {rate:g}, seed {seed}: {shown} "
                f"({figure.cpu_seconds:.0f} s of CPU)",
                flush=True,
            )

    def sweep_of(self, contender: Contender) -> dict[float, float | None]:
        """Return the loss by rate at the first seed, in the order of rates."""
        found = {f.rate: f.loss for f in self.figures if (f.contender, f.seed) == (contender.name, self.size.seeds[0])}
        return dict(sorted(found.items()))

    def of_seeds(self, contender: Contender) -> dict[int, float | None]:
        """Return the loss by seed at the best rate."""
        rate = sweep.best(self.sweep_of(contender))
        return {f.seed: f.loss for f in self.figures if (f.contender, f.rate) == (contender.name, rate)}

    def _missing(self) -> Iterator[tuple[Contender, float, int]]:
        size = self.size
        for contender in CONTENDERS:
            rates = contender.rates[: size.rates]
            while left := sweep.missing(rates, self.sweep_of(contender), most=size.beyond):
                yield contender, left[0], size.seeds[0]
        for seed in size.seeds[1:]:
            for contender in CONTENDERS:
                rate = sweep.best(self.sweep_of(contender))
                if rate is not None and seed not in self.of_seeds(contender):
                    yield contender, rate, seed

    def _options(self, contender: Contender, rate: float, seed: int) -> list[str]:
        batch = BASE_BATCH * contender.factor
        steps = self.size.steps // contender.factor
        tokens = self.size.steps * BASE_BATCH * load_recipe(str(RECIPE)).model.sequence_length
        corpus = self.folder / "corpus"
        values: dict[str, Any] = {
            "run.folder": self.folder / "runs" / _name(contender, rate, seed),
            "data.tokenizer": corpus / "tokenizer.model",
            "data.train": corpus / "train",
            "data.validation": corpus / "validation",
            "train.global-batch": batch,
            "train.micro-batch": batch,  # few large products are cheaper than many small ones
            "train.steps": steps,
            "train.seed": seed,
            "train.validation-sequences": self.size.validation,
            "optimizer.lr": rate,
            "optimizer.warmup-tokens": math.ceil(WARMUP * tokens),
        }
        return [word for key, value in values.items() for word in (f"--{key}", str(value))] + list(contender.options)

    def _recipe(self, contender: Contender, rate: float, seed: int) -> Recipe:
        return load_recipe(str(RECIPE), self._options(contender, rate, seed))

    def _run(self, contender: Contender, rate: float, seed: int) -> Figure:
        name = _name(contender, rate, seed)
        recipe = self._recipe(contender, rate, seed)
        folder = Path(recipe.run.folder)
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        log = folder / "log.txt"
        before = _cpu_seconds()
        # A child for each run: process groups are made once in a process. Forked, it need not import all again.
        options = [str(RECIPE), *self._options(contender, rate, seed)]
        child = get_context("fork").Process(target=_train, args=(options, log, self._threads), daemon=True)
        child.start()
        child.join()
        if child.exitcode not in (0, EXIT_DIVERGED):
            raise UserError(f"run {name} ended with code {child.exitcode}: {_last_line(log)} ({log})")
        loss = None
        if child.exitcode == 0:
            last = [record["val/loss"] for record in read_metrics(folder / "metrics.jsonl") if "val/loss" in record][-1]
            loss = last if math.isfinite(last) else None
        figure = Figure(contender.name, rate, seed, loss, _cpu_seconds() - before)
        path = self.folder / "figures" / f"{name}.json"
        path.parent.mkdir(exist_ok=True)
        values = {"figure": asdict(figure), "recipe": _comparable(recipe)}
        write_atomically(path, (json.dumps(values, indent=1) + "\n").encode())
        return figure

    def _make_corpus(self) -> None:
        corpus = self.folder / "corpus"
        if not (corpus / "validation.idx").exists():
            print(f"preparing the corpus in {corpus}", flush=True)
            library = Path(sysconfig.get_path("stdlib")) / self.size.library
            splits = write_python_library(corpus, library)
            train_tokenizer(
                [splits["train"].path], corpus / "tokenizer.model", load_recipe(str(RECIPE)).model.vocab_size
            )
            for split in ("train", "validation"):
                prepare([splits[split].path], corpus / "tokenizer.model", corpus / split, num_workers=1)


def _train(arguments: list[str], log: Path, threads: int) -> None:
    ranks.die_with_parent()
    torch.set_num_threads(threads)
    from fmoe.cli import run
    from pretrain.start.launch import main as train

    with log.open("w") as file, redirect_stdout(file), redirect_stderr(file):
        code = run("fmoe train", lambda: train(arguments))
    sys.exit(code)


def _name(contender: Contender, rate: float, seed: int) -> str:
    return f"{contender.name}_{rate:g}_{seed}"


def _comparable(recipe: Recipe) -> dict[str, Any]:
    """Return a recipe without the paths of its files, as JSON represents it."""
    values = recipe.values()
    return json.loads(json.dumps({key: value for key, value in values.items() if key not in ("run", "data")}))


def _last_line(log: Path) -> str:
    lines = [line.strip() for line in log.read_text(errors="replace").splitlines() if line.strip()]
    return lines[-1] if lines else "no output"


def _cpu_seconds() -> float:
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def tables(study: Study) -> str:
    """Return the results so far as Markdown: the seeds at the best rates, then the sweeps."""
    small = next(contender for contender in CONTENDERS if contender.name == SMALL)
    cells = [["contender", "steps", "rate", "validation loss", "over the base batch", "seeds", "CPU per run"]]
    swept = [["contender", "rate: loss at the first seed, the best in bold"]]
    for contender in reversed(CONTENDERS):
        losses = study.sweep_of(contender)
        of_seeds = study.of_seeds(contender)
        rate = sweep.best(losses)
        if losses:
            each = (f"{r:g}: {_shown(loss)}" for r, loss in losses.items())
            swept.append(
                [contender.title, ", ".join(f"**{t}**" if r == rate else t for r, t in zip(losses, each, strict=True))]
            )
        if rate is not None:
            seconds = [f.cpu_seconds for f in study.figures if (f.contender, f.rate) == (contender.name, rate)]
            cells.append(
                [
                    contender.title,
                    f"{study.size.steps // contender.factor:,}",
                    f"{rate:g}" + ("" if sweep.is_inside(losses) else " (end of the sweep)"),
                    _with_spread(sweep.mean_and_spread(list(of_seeds.values()))),
                    "" if contender is small else _with_spread(sweep.gap(of_seeds, study.of_seeds(small)), "+"),
                    ", ".join(_shown(of_seeds[seed]) for seed in sorted(of_seeds)),
                    f"{sum(seconds) / len(seconds):.0f} s",
                ]
            )
    notes = "Nats per token; mean and sample standard deviation over the seeds; differences are taken seed by seed."
    return "\n".join([*report.table(cells), "", notes, "", *report.table(swept)]) + "\n"


def verdicts(study: Study, names: Sequence[str], most: float) -> tuple[str, bool]:
    """Return a line per contender that says whether its mean gap to the base batch is at most ``most``, and whether all
    gaps are. A contender without all seeds misses it.
    """
    titles = {contender.name: contender for contender in CONTENDERS}
    small = study.of_seeds(titles[SMALL])
    lines = []
    met = []
    for name in names:
        of_seeds = study.of_seeds(titles[name])
        is_complete = set(of_seeds) == set(small) == set(study.size.seeds)
        gap = sweep.gap(of_seeds, small) if is_complete else None
        met.append(gap is not None and gap[0] <= most)
        shown = _with_spread(gap, "+") if is_complete else "seeds are missing"
        lines.append(f"* {titles[name].title}: {shown}, {'met' if met[-1] else 'missed'}: at most +{most:g}\n")
    return "".join(lines), all(met)


def _shown(loss: float | None) -> str:
    return "diverged" if loss is None else f"{loss:.3f}"


def _with_spread(values: tuple[float, float] | None, sign: str = "") -> str:
    return "diverged" if values is None else f"{values[0]:{sign}.3f} ± {values[1]:.3f}"


def main(argv: Sequence[str]) -> int:
    parser = options.bare_parser("large_batch", __doc__)
    parser.add_argument("--quick", action="store_true", help="run a small slice of the study, to test it")
    parser.add_argument("--report", action="store_true", help="run nothing; print the tables of the finished runs")
    parser.add_argument("--threads", type=int, default=1, help="threads of each run")
    names = [contender.name for contender in CONTENDERS if contender.name != SMALL]
    parser.add_argument(
        "--gap", type=float, default=None, help=f"most nats above the base batch; None: {Size.gap}, or inf with --quick"
    )
    parser.add_argument("--gap-of", nargs="+", choices=names, default=["lamb", "adamw-linear"], help="held to --gap")
    arguments = parser.parse_args(argv)
    options.at_least(arguments, threads=1)
    if arguments.gap is not None and math.isnan(arguments.gap):
        raise UserError("--gap=nan must be a number")
    study = Study(arguments.out / "large_batch", QUICK if arguments.quick else Size(), arguments.threads)
    study.read()
    if not arguments.report:
        study.run()
    elif not study.figures:
        raise UserError(f"no run has finished in {study.folder}")
    verdict, is_met = verdicts(study, arguments.gap_of, study.size.gap if arguments.gap is None else arguments.gap)
    text = f"{tables(study)}\n{verdict}"
    (arguments.out / "large_batch.md").write_text(text)
    print(text)
    return 0 if is_met else 1
