"""Tasks of lm-evaluation-harness on a GPT in training. Needs the package lm_eval.

The figures are those of the harness's backend ``hf`` on the exported model, with batch size 1: texts are encoded, cut
to the sequence length and scored in the same way.

Shape letters: B sequences, S tokens of each, V vocabulary.
"""

import contextlib
import difflib
import logging
import random
from collections.abc import Iterator, Sequence
from itertools import groupby
from numbers import Real
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lm_eval import evaluator, utils
from lm_eval.api import task as task_module
from lm_eval.api.model import TemplateLM
from lm_eval.models.utils import normalize_gen_kwargs, postprocess_generated_text
from lm_eval.tasks import TaskManager
from torch import Tensor
from torch.nn import functional as F

from fmoe.errors import UserError, one_line
from fmoe.gates.router import Router
from pretrain.config import Recipe
from pretrain.data.opening import bos_of
from pretrain.data.tokenizers import Tokenizer
from pretrain.data.tokenizers.base import read_declared
from pretrain.engine import Engine
from pretrain.inference.decoding import GPTDecoder, generate
from pretrain.inference.sampling import Sampling
from pretrain.inference.stages import run_stages
from pretrain.models.batch import to_device

logger = logging.getLogger(__name__)
# On every rank, it would warn of each setting that it applies, and show the progress of the tasks, at every evaluation.
logging.getLogger("lm_eval").setLevel(logging.ERROR)
task_module.tqdm = lambda docs, **_: docs

# Seeds of the harness's command line: Python's generator, the others, and the choice of examples for prompts.
_SEED = 0
_OTHER_SEED = 1234
_MAX_NEW_TOKENS = 256  # unless a task sets its own number, as in the backend hf
_GREEDY_SETTINGS = {"until", "max_gen_toks", "do_sample", "temperature", "top_p", "top_k"}


class Tasks:
    """The tasks of ``evaluation.tasks``, with their documents.

    Raises:
        UserError: a task is unknown or cannot be loaded; it runs code that a model wrote, has images, samples its
            answers, or needs a longer sequence; or the model cannot generate.
    """

    def __init__(self, recipe: Recipe):
        self._limit = recipe.evaluation.limit
        with _seeded():
            self._loaded = _load(recipe)
        for name, task in self._loaded["tasks"].items():
            _check(name, task, recipe)
            wanted = recipe.evaluation.num_fewshot
            own = task.get_config("num_fewshot")
            if own is None or (wanted is not None and own != 0):  # the harness respects a task's own 0
                task.set_config("num_fewshot", wanted or 0)

    def evaluate(self, model: "HarnessModel") -> dict[str, float]:
        """Return the figures of all tasks and groups: ``eval/TASK/METRIC``, or ``eval/TASK/METRIC/FILTER``.

        The state of the training does not change. Collective over all ranks, which must have the same tasks.
        """
        for chunk in model.engine.model:  # training switches back
            chunk.eval()
        with torch.no_grad(), _seeded():
            for task in self._loaded["tasks"].values():
                task.set_fewshot_seed(seed=_OTHER_SEED)
            found = evaluator.evaluate(model, self._loaded, limit=self._limit, bootstrap_iters=0, log_samples=False)
        figures = {}
        for task, values in found["results"].items():
            for key, value in values.items():
                metric, _, name = key.partition(",")
                if name and isinstance(value, Real) and not metric.endswith("_stderr"):
                    figures[f"eval/{task}/{metric}" + ("" if name == "none" else f"/{name}")] = float(value)
        return figures


def _load(recipe: Recipe) -> Any:
    """Return the harness's ``TaskDict`` of the recipe's tasks."""
    names = list(recipe.evaluation.tasks)
    folder = recipe.evaluation.task_path
    if folder is not None and not Path(folder).is_dir():
        raise UserError(f"evaluation.task_path={folder} is not a folder")
    try:
        manager = TaskManager(include_path=folder, include_defaults=False) if folder else None
        if manager is None or not set(names) <= set(manager.all_subtasks):  # its own tasks take seconds to find
            manager = TaskManager(include_path=folder)
        for name in names:
            if name not in manager.all_tasks:
                near = difflib.get_close_matches(name, manager.all_tasks, n=1)
                hint = f"; did you mean {near[0]}?" if near else ""
                raise UserError(f"evaluation.tasks={name} is not a task of lm-evaluation-harness{hint}")
        return manager.load(names)
    except UserError:
        raise
    except Exception as error:  # of a task's file, its code, or the library that reads its documents
        raise UserError(f"evaluation.tasks={names} cannot be loaded: {one_line(error, with_type=True)}") from error


def _check(name: str, task: Any, recipe: Recipe) -> None:
    key = f"evaluation.tasks={name}"
    if getattr(task, "UNSAFE_CODE", False):
        raise UserError(f"{key} runs code that the model writes, which is not supported during training")
    if getattr(task, "MULTIMODAL", False):
        raise UserError(f"{key} has inputs that are not text, which is not supported")
    if task.OUTPUT_TYPE != "generate_until":
        return
    settings = normalize_gen_kwargs(task.config.generation_kwargs or {}, _MAX_NEW_TOKENS)
    length = recipe.model.sequence_length
    if settings["do_sample"] or not settings.keys() <= _GREEDY_SETTINGS:
        more = ", ".join(sorted(settings.keys() - _GREEDY_SETTINGS)) or "do_sample"
        raise UserError(f"{key} sets {more} for generation: only greedy decoding is supported during training")
    if settings["max_gen_toks"] >= length:
        raise UserError(
            f"{key} generates up to {settings['max_gen_toks']} tokens, which must be less than "
            f"model.sequence_length={length}"
        )
    if recipe.model.moe.gate == "expert_choice" and recipe.model.layers_with_experts:
        raise UserError(f"{key} generates text, which moe.gate=expert_choice does not support")
    if recipe.model.position.encoding == "transformer_xl":
        raise UserError(f"{key} generates text, which position.encoding=transformer_xl does not support here")


@contextlib.contextmanager
def _seeded() -> Iterator[None]:
    """Seed the random number generators as the harness's command line does, and restore them after the block."""
    python = random.getstate()
    legacy = np.random.get_state()  # noqa: NPY002 - the harness draws from the global one
    devices = [torch.cuda.current_device()] if torch.cuda.is_available() else []
    with torch.random.fork_rng(devices):
        random.seed(_SEED)
        np.random.seed(_OTHER_SEED)  # noqa: NPY002
        torch.manual_seed(_OTHER_SEED)
        try:
            yield
        finally:
            random.setstate(python)
            np.random.set_state(legacy)  # noqa: NPY002


class HarnessModel(TemplateLM):
    """The model of an engine, as the harness calls it.

    Every rank runs all requests, in the same order, and gets the results of one rank. All ranks thus take part in the
    exchanges of experts, and make the same decisions.

    Args:
        engine: an engine without context or sequence parallelism or virtual pipeline stages.
        tokenizer: the tokenizer of the training data.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer):
        super().__init__()
        self.engine = engine
        self._tokens = tokenizer
        self._length = engine.recipe.model.sequence_length
        bos = bos_of(engine.recipe, tokenizer)
        self._begin = [] if bos is None else [bos]
        self._prefix = tokenizer.end_of_document if bos is None else bos
        if tokenizer.bos is not None and "bos" in read_declared(tokenizer.path).names:  # an export declares it too
            self._prefix = tokenizer.bos

    @property
    def eot_token_id(self) -> int:
        return self._tokens.end_of_document

    @property
    def prefix_token_id(self) -> int:
        return self._prefix

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **_: Any) -> list[int]:
        ids = self._tokens.encode(string)
        return ids if add_special_tokens is False else [*self._begin, *ids]

    def loglikelihood(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[tuple[float, bool]]:
        return super().loglikelihood(requests, disable_tqdm=True)

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[float]:
        windows = []
        owners = []
        for number, request in enumerate(requests):
            ids = self.tok_encode(request.args[0])
            for window in utils.get_rolling_token_windows(ids, self._prefix, self._length, context_len=1):
                windows.append((None, *utils.make_disjoint_window(window)))
                owners.append(number)
        totals = [0.0] * len(requests)
        for number, (value, _) in zip(owners, self._loglikelihood_tokens(windows), strict=True):
            totals[number] += value
        return totals

    def _loglikelihood_tokens(self, requests: Sequence[Any], **_: Any) -> list[tuple[float, bool]]:
        """Return log-probability and "is greedy" of (text, context, continuation); the last two are token ids."""
        rows = []
        starts = []
        for _text, context, continuation in requests:
            tokens = [*context, *continuation][-(self._length + 1) :]
            rows.append(tokens)
            starts.append(max(len(tokens) - 1 - len(continuation), 0))
        longest = max((len(continuation) for *_, continuation in requests), default=0)
        if longest > self._length:
            logger.warning("a continuation has %d tokens: only the last %d are scored", longest, self._length)
        found = torch.zeros(len(rows), 2, dtype=torch.float64, device=self.engine.processes.device)
        for numbers in _of_equal_length(rows, self.engine.recipe.train.micro_batch):
            tokens_BS = torch.tensor([rows[number] for number in numbers], dtype=torch.int64, device="cpu")
            labels_BS = tokens_BS[:, 1:].to(found.device)
            logits_BSV = self._logits(tokens_BS[:, :-1].contiguous())
            if logits_BSV is None:
                continue
            nats_BS = F.cross_entropy(logits_BSV.transpose(1, 2), labels_BS, reduction="none")
            is_greedy_BS = logits_BSV.argmax(-1) == labels_BS
            for number, nats_S, is_greedy_S in zip(numbers, nats_BS, is_greedy_BS, strict=True):
                found[number, 0] = -nats_S[starts[number] :].double().sum()
                found[number, 1] = is_greedy_S[starts[number] :].all()
        size = dist.get_world_size()
        dist.broadcast(found, size - size // self.engine.recipe.parallel.pipeline)  # from the last stage's first rank
        return [(value, bool(is_greedy)) for value, is_greedy in found.tolist()]

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = True) -> list[str]:
        names = {number: name for name, number in self._tokens.ids.items()}
        with _without_drops(self.engine):
            return [self._generate(request.args, names[self.eot_token_id]) for request in requests]

    def _generate(self, request: tuple[str, dict[str, Any]], end: str) -> str:
        context, options = request
        settings = normalize_gen_kwargs(options, _MAX_NEW_TOKENS)
        count = settings["max_gen_toks"]
        stops = [*settings["until"], end]
        prompt = self.tok_encode(context)[-(self._length - count) :] or [self._prefix]
        decoder = GPTDecoder(self.engine.chunks[0], self._length)

        def decode(tokens_NS: Tensor) -> Tensor:
            self.engine.on_progress()
            return decoder(tokens_NS)

        drawn: list[int] = []
        text = ""
        for tokens in generate(
            decode,
            prompt,
            Sampling(temperature=0.0),
            max_tokens=count,
            end=self.eot_token_id,
            vocab_size=self._tokens.vocab_size,
            device=self.engine.processes.device,
        ):
            drawn += [token for token in tokens if token is not None]
            text = self._tokens.decode(drawn)
            if any(stop and stop in text for stop in stops):
                break
        return str(postprocess_generated_text(text, stops, None))

    def _logits(self, tokens_BS: Tensor) -> Tensor | None:
        """Return the logits of all tokens, float32 [B, S, V], on the last pipeline stage; None on the others."""
        engine = self.engine
        engine.on_progress()
        batch = to_device({"tokens": tokens_BS}, engine.processes.device)
        vocab_size = engine.recipe.model.vocab_size
        logits_BSV = run_stages(
            engine.model[0], lambda stage: engine.kind.forward(stage, batch), batch["tokens"], vocab_size
        )
        return None if logits_BSV is None else logits_BSV.float()


def _of_equal_length(rows: Sequence[Sequence[int]], size: int) -> Iterator[list[int]]:
    """Yield the indices of up to ``size`` rows of equal length, which need no padding."""

    def length(number: int) -> int:
        return len(rows[number])

    for _, group in groupby(sorted(range(len(rows)), key=length), key=length):
        numbers = list(group)
        for start in range(0, len(numbers), size):
            yield numbers[start : start + size]


@contextlib.contextmanager
def _without_drops(engine: Engine) -> Iterator[None]:
    """Lift the capacity limits of experts, as ``fmoe generate`` and an export's ``generate`` do."""
    gates = [module for module in engine.gpt.modules() if isinstance(module, Router)]
    factors = [gate.eval_capacity_factor for gate in gates]
    try:
        for gate in gates:
            gate.eval_capacity_factor = None
        yield
    finally:
        for gate, factor in zip(gates, factors, strict=True):
            gate.eval_capacity_factor = factor
