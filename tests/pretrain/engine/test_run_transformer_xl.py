"""Runs with memory: no split changes them, a resumed run is bit-equal, and evaluation has the trainer's memory."""

import json
from dataclasses import replace

import numpy as np
import pytest
from compare import assert_close
from engines import STEADY, Samples, assert_split_equals_one, engine_of
from forks import values
from runs import steps, train

from pretrain.config import ParallelConfig, load_recipe
from pretrain.interchange import export_checkpoint

XL = {"position.encoding": "transformer_xl", "position.memory_length": 24}  # more than a sequence of 16
SPLITS = {
    "tensor and sequence": {"tensor": 2},
    "tensor alone": {"tensor": 2, "sequence": False},
    "expert": {"expert": 2},
    "data": {"data": 2},
    "data, recomputed": {"data": 2, "recompute": "full"},
    "data, overlapped": {"data": 2, "overlap_gradients": True, "overlap_parameters": True},
    "pipeline": {"pipeline": 2},
    "virtual pipeline": {"pipeline": 2, "virtual_pipeline": 2},
}


@pytest.mark.by_default("tensor and sequence")
@pytest.mark.parametrize("split", SPLITS)
def test_two_processes_equal_one(forks, split):
    """Losses, weights, moments and the memory itself, with queries in groups and dropout keyed by token."""
    layers = {"num_layers": 4} if "virtual" in split else {}
    model = STEADY.model.with_values(
        {**XL, "attention.num_heads": 4, "attention.num_query_groups": 2, "dropout": 0.1, **layers}
    )
    alone = replace(STEADY, model=model)
    shard = "optimizer" if "overlapped" in split else "none"
    recipe = replace(alone, parallel=ParallelConfig(**SPLITS[split], shard=shard))
    assert_split_equals_one(forks, recipe, alone, "memory/layers.2", "biases.content", "linear_position")


@pytest.mark.slow
def test_muon_has_the_projection_of_distances_whole(forks):
    alone = replace(STEADY, model=STEADY.model.with_values(XL), optimizer=replace(STEADY.optimizer, name="muon"))
    recipe = replace(alone, parallel=ParallelConfig(tensor=2))
    assert_split_equals_one(forks, recipe, alone, "momentum_buffer/decoder.layers.1.self_attention.linear_position")


def poisoned(recipe):
    """Streams with memory after each step; the weights of the second step are not finite."""
    import torch

    engine = engine_of(recipe)
    found = []
    weight = engine.gpt.decoder.final_layernorm.weight
    for step in range(3):
        value = weight.detach().clone()
        if step == 1:
            weight.data.fill_(torch.nan)
        result = engine.train_step(step, Samples(), lambda loss, _: None if np.isfinite(loss) else "the loss")
        if step == 1:
            weight.data.copy_(value)
        found.append((result.skipped, sorted(engine.memories[0].states)))
    return found


def test_a_step_that_is_not_finite_leaves_no_memory(forks):
    recipe = replace(STEADY, model=STEADY.model.with_values(XL))
    (found,) = values(forks.run(1, poisoned, recipe))
    assert found == [(None, [0, 2, 4, 6]), ("the loss", []), (None, [0, 2, 4, 6])]


def held_bytes(recipe):
    """(a dry run's bytes of memory and checkpoint, those that two data parallel ranks have)"""
    from pretrain.dryrun.holding import hold
    from pretrain.engine import state

    engine = engine_of(recipe)
    for step in range(3):
        engine.train_step(step, Samples())
    told = hold(engine)
    own = sum(x.nbytes for memory in engine.memories for states in memory.states.values() for x in states)
    return told.memories, own, told.saved, sum(piece.data.nbytes for piece in state.pieces(engine))


def test_a_dry_run_counts_the_memory(forks):
    recipe = replace(STEADY, model=STEADY.model.with_values(XL), parallel=ParallelConfig(data=2))
    found = values(forks.run(2, held_bytes, recipe))
    for told, own, _, _ in found:
        assert told == own == 4 * 24 * 32 * 2 * 4
    assert {saved for _, _, saved, _ in found} == {sum(pieces for *_, pieces in found)}


MODEL = {
    "model": {**XL, "dropout": 0.1, "moe.gate": "naive", "moe.capacity_factor": None, "moe.eval_capacity_factor": None}
}
TRAIN = {"steps": 6, "validation_every": 3, "validation_sequences": 8}


@pytest.fixture(scope="module")
def run(forks, write_tiny_recipe, tmp_path_factory):
    """A recipe with memory, and the folder of its run, with a checkpoint in the middle."""
    folder = tmp_path_factory.mktemp("memory")
    recipe = write_tiny_recipe(folder / "recipe.toml", **MODEL, train=TRAIN, checkpoint={"every": 3, "keep": 0})
    train(forks, recipe, "--run.folder", folder / "run")
    return recipe, folder / "run"


def test_a_resumed_run_is_bit_equal_and_the_loss_is_that_of_evaluate(forks, run, tmp_path):
    recipe, whole = run
    resumed = tmp_path / "resumed"
    expected = steps(whole)
    train(forks, recipe, "--run.folder", resumed, "--resume", whole / "checkpoints" / "step-00000003")
    assert steps(resumed) == {step: row for step, row in expected.items() if step > 3}
    (end,) = forks.command("fmoe", "evaluate", whole, "--json")
    assert end.code == 0, end.err
    (found,) = json.loads(end.out)["runs"]
    assert found["sequences"] == 8 and found["loss"] == pytest.approx(expected[6]["val/loss"], rel=1e-6)


@pytest.mark.slow
def test_a_run_resumes_at_another_split_and_through_another_format(forks, run, tmp_path):
    recipe, whole = run
    middle = whole / "checkpoints" / "step-00000003"
    expected = steps(whole)
    (end,) = forks.command("fmoe", "checkpoint", "export", middle, tmp_path / "dcp", "--optimizer")
    assert end.code == 0, end.err
    (end,) = forks.command("fmoe", "checkpoint", "import", tmp_path / "dcp", tmp_path / "back")
    assert end.code == 0, end.err
    for name, where, options in (
        ("EP2", middle, ["--parallel.expert", "2"]),
        ("TP2", middle, ["--parallel.tensor", "2"]),
        ("PP2", middle, ["--parallel.pipeline", "2"]),
        ("micro batches", middle, ["--train.micro-batch", "1"]),
        ("imported", tmp_path / "back", []),
    ):
        size = 2 if name.endswith("P2") else 1
        train(forks, recipe, "--run.folder", tmp_path / name, "--resume", where, *options, size=size)
        for step, row in steps(tmp_path / name).items():
            for key in {"loss", "val/loss"} & row.keys():
                assert row[key] == pytest.approx(expected[step][key], rel=1e-5), f"{key} of step {step} of {name}"


@pytest.mark.slow
@pytest.mark.parametrize("precision", ["bf16", "fp16"])
def test_a_run_of_16_bits_resumes_bit_equal_and_starts_warm(forks, write_tiny_recipe, tmp_path, precision):
    sections = {**MODEL, "train": {**TRAIN, "precision": precision}, "checkpoint": {"every": 3, "keep": 0}}
    recipe = write_tiny_recipe(tmp_path / "recipe.toml", **sections)
    whole, resumed, warm = (tmp_path / name for name in ("whole", "resumed", "warm"))
    train(forks, recipe, "--run.folder", whole)
    middle = whole / "checkpoints" / "step-00000003"
    train(forks, recipe, "--run.folder", resumed, "--resume", middle)
    assert steps(resumed) == {step: row for step, row in steps(whole).items() if step > 3}
    train(forks, recipe, "--run.folder", warm, "--train.init-from", middle)
    assert steps(warm)[0]["val/loss"] == pytest.approx(steps(whole)[3]["val/loss"], rel=1e-6)


def upcycled():
    """Logits of three segments, of a dense model and of its upcycled copy."""
    import torch

    from megatron_patch import fmoefy
    from megatron_patch.transformer_xl import StreamMemory

    model = engine_of(
        replace(STEADY, model=STEADY.model.with_values({**XL, "moe.num_experts": 0, "moe.top_k": 1}))
    ).gpt.eval()
    found = []
    for _ in range(2):
        memory = StreamMemory(model, XL["position.memory_length"], 1)
        logits = []
        for segment in range(3):
            memory.enter(0)
            tokens = torch.as_tensor(Samples()[segment])[None]
            logits.append(model(tokens, torch.arange(tokens.shape[1])[None], None).detach())
        memory.leave()
        found.append(torch.cat(logits))
        if not found[1:]:
            fmoefy(model, 4, upcycle=True, gate="naive", top_k=2)
    return found


def test_upcycling_leaves_a_model_with_memory_unchanged(forks):
    (dense, sparse), *_ = values(forks.run(1, upcycled))
    assert_close(sparse, dense, 1e-5, "logits")


def test_commands_have_the_memory_or_refuse_it_in_one_line(forks, run, tiny_corpus):
    _, whole = run
    text = tiny_corpus.validation.with_suffix(".jsonl")

    def command(*argv):
        (end,) = forks.command("fmoe", *argv)
        return end

    losses = []
    for options in ([], ["--memory-length", "1"]):
        end = command("evaluate", whole, "--data", text, "--max-sequences", "40", "--json", *options)
        assert end.code == 0, end.err
        losses.append(json.loads(end.out)["runs"][0]["bits_per_byte"])
    assert losses[0] != losses[1]
    end = command("generate", whole, "--prompt", "def", "--max-tokens", "40", "--json")
    assert end.code == 0 and json.loads(end.out)["samples"][0]["tokens"], end.err
    for argv, parts in (
        (["evaluate", whole, "--data", text, "--stride", "8"], ["--stride 8", "position.memory_length=24"]),
        (["generate", whole, "--prompt", "def", "--no-cache"], ["--no-cache", "position.memory_length=24"]),
        (["evaluate", whole, "--memory-length", "0"], ["--memory-length 0"]),
    ):
        end = command(*argv)
        assert end.code == 2 and end.err.count("\n") == 1 and all(part in end.err for part in parts), end


@pytest.mark.slow
def test_relative_positions_alone_train_evaluate_and_generate(forks, write_tiny_recipe, tmp_path):
    model = {**MODEL["model"], "position.memory_length": 0}
    recipe = tmp_path / "recipe.toml"
    write_tiny_recipe(recipe, model=model, train={"steps": 3}, checkpoint={"every": 3})
    train(forks, recipe, "--run.folder", tmp_path / "run")
    (end,) = forks.command("fmoe", "evaluate", tmp_path / "run", "--json")
    assert json.loads(end.out)["runs"][0]["loss"] == pytest.approx(steps(tmp_path / "run")[3]["val/loss"], rel=1e-6)
    (end,) = forks.command("fmoe", "generate", tmp_path / "run", "--prompt", "def", "--max-tokens", "30", "--json")
    assert end.code == 0 and json.loads(end.out)["samples"][0]["tokens"], end.err
    (end,) = forks.command("fmoe", "evaluate", tmp_path / "run", "--memory-length", "8")
    assert end.code == 2 and "--memory-length 8" in end.err and "position.memory_length=0" in end.err, end


@pytest.mark.slow
def test_an_export_generates_the_same_text_beyond_its_memory(forks, write_tiny_recipe, tiny_corpus, tmp_path):
    """Of a checkpoint that also holds the memory of its streams, and whose large weights make a varied text."""
    import transformers

    import pretrain.interchange.modeling_fmoe  # noqa: F401 - registers

    recipe = tmp_path / "recipe"
    run = tmp_path / "run"
    model = {**MODEL["model"], "init_std": 0.3, "tie_embeddings": False}
    write_tiny_recipe(recipe, model=model, train={**TRAIN, "steps": 3}, checkpoint={"every": 3})
    train(forks, recipe, "--run.folder", run)
    options = ("--prompt", "def", "--max-tokens", "60", "--temperature", "0", "--json")
    (end,) = forks.command("fmoe", "generate", run, *options)
    assert end.code == 0, end.err
    expected = json.loads(end.out)["samples"][0]["tokens"]
    assert len(set(expected)) > 5 and len(expected) > XL["position.memory_length"]
    export_checkpoint(run, tmp_path / "out", tokenizer=str(tiny_corpus.tokenizer))
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    prompt = transformers.AutoTokenizer.from_pretrained(tmp_path / "out")("def", return_tensors="pt")["input_ids"]
    found = model.generate(prompt, max_new_tokens=60, do_sample=False)
    assert found[0, prompt.shape[1] :].tolist() == expected


def test_experts_multiply_the_parameters_at_equal_flops():
    """512-2048-512 against the two of 64 experts of 512-1024-512 that a token uses, and their router."""
    dense = load_recipe("transformer-xl-dense")
    sparse = load_recipe("transformer-xl-64")
    assert 20 <= sparse.num_params() / dense.num_params() <= 22
    router = 6 * 12 * 512 * 64
    assert sparse.flops_per_token() - router == dense.flops_per_token()
