"""``fmoe train RECIPE --dry-run``: what it counts is what ranks hold, and it needs neither data nor their number."""

import json
import time
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist
from engines import engine_of
from forks import only, values
from model_kinds import RECIPE
from patience import within

from pretrain.config import ParallelConfig, load_recipe
from pretrain.config.load import RECIPES
from pretrain.dryrun.text import describe, summary
from pretrain.formats import count_text


def recipe_with(model=None, parallel=None, optimizer=None, train=None):
    recipe = replace(
        RECIPE,
        model=RECIPE.model.with_values({"num_layers": 4, "vocab_size": 64, **(model or {})}),
        parallel=ParallelConfig(**(parallel or {})),
        optimizer=replace(RECIPE.optimizer, **(optimizer or {})),
        train=replace(RECIPE.train, global_batch=32, validation_sequences=32, **(train or {})),
    )
    recipe.check()
    return recipe


BF16 = {"precision": "bf16"}
T5 = {"kind": "t5", "num_decoder_layers": 2, "moe.every": 2, "sequence_length": 32}
LEARNED = {"position.encoding": "learned_absolute", "tie_embeddings": False, "gated": True, "activation": "silu"}
LOCAL = {
    "attention.sinks": True,
    "attention.output_bias": True,
    "attention.sliding_window": 9,
    "attention.sliding_layers": (1, 4),
}
LOCAL |= {
    "attention.num_heads": 4,
    "attention.num_query_groups": 2,
    "attention.qkv_bias": True,
    "activation": "swiglu_oai",
    "gated": True,
}
GRIDS = {
    "one process": {},
    "tensor 2, expert 4, data 2": {
        "parallel": {"tensor": 2, "expert": 4, "data": 2, "shard": "optimizer"},
        "train": BF16,
    },
    "tensor 2, context 2, expert 4": {
        "parallel": {"tensor": 2, "context": 2, "expert": 4, "shard": "optimizer"},
        "model": {"attention.num_heads": 4},
    },
    "expert tensor 2, expert 2": {"parallel": {"tensor": 2, "expert_tensor": 2, "expert": 2, "shard": "optimizer"}},
    "expert 2, data 2, ZeRO-2": {"parallel": {"expert": 2, "data": 2, "shard": "gradients"}},
    "expert 2, data 2, ZeRO-3": {"parallel": {"expert": 2, "data": 2, "shard": "parameters"}, "train": BF16},
    "pipeline 4": {"parallel": {"pipeline": 4}, "model": {"moe.layers": (2, 3)}, "train": BF16},
    "pipeline 2 of 2 chunks, expert 2": {
        "parallel": {"pipeline": 2, "virtual_pipeline": 2, "expert": 2, "shard": "optimizer"},
    },
    "pipeline 2, tensor 2, untied": {"parallel": {"pipeline": 2, "tensor": 2}, "model": LEARNED, "train": BF16},
    "t5, tensor 2, expert 4": {
        "parallel": {"tensor": 2, "expert": 4, "shard": "optimizer"},
        "model": T5,
        "train": BF16,
    },
    "t5, pipeline 4": {
        "parallel": {"pipeline": 4, "data": 2, "shard": "optimizer"},
        "model": {**T5, "num_decoder_layers": 4, "position.encoding": "relative"},
        "train": BF16,
    },
    "bert, pipeline 2, data 2": {
        "parallel": {"pipeline": 2, "data": 2, "shard": "optimizer"},
        "model": {"kind": "bert"},
    },
    "windows and sinks, pipeline 2, tensor 2": {"parallel": {"pipeline": 2, "tensor": 2}, "model": LOCAL},
    "windows and sinks, context 2, expert 2": {
        "parallel": {"context": 2, "expert": 2, "shard": "optimizer"},
        "model": LOCAL,
        "train": BF16,
    },
    "dense, tensor 4": {"parallel": {"tensor": 4}, "model": {"moe.num_experts": 0, "attention.num_heads": 4}},
}


def _of_every_rank(recipe):
    """The plan, and of every rank what it holds and the elements that it steps of the whole model, its part of those
    that several ranks step."""
    from megatron.core import parallel_state

    from megatron_patch.optimizer import shards
    from pretrain.dryrun import make_plan
    from pretrain.dryrun.holding import build, hold
    from pretrain.engine.meta import as_rank

    dist.destroy_process_group()  # the fork server's
    plan, holdings, stepped = make_plan(recipe), [], 0.0
    for rank in range(recipe.parallel.world_size):
        with as_rank(recipe, rank) as processes:
            engine = build(recipe, processes)
            holdings.append(hold(engine))
            for shard in shards(engine.optimizer):
                parameter = shard.parameter
                if getattr(parameter, "shared", False):  # the last stage's copy of the embedding
                    continue
                is_expert = not getattr(parameter, "allreduce", True)
                data = parallel_state.get_data_parallel_world_size()
                tensor = parallel_state.get_tensor_model_parallel_world_size()
                copies = 1 if shard.is_sharded else data
                if is_expert:
                    copies = 1 if shard.is_sharded else parallel_state.get_expert_data_parallel_world_size()
                elif not getattr(parameter, "tensor_model_parallel", False):
                    copies *= tensor
                stepped += (shard.stop - shard.start) / copies
    return plan, holdings, stepped


@pytest.mark.by_default("expert tensor 2, expert 2", "t5, tensor 2, expert 4", "bert, pipeline 2, data 2")
@pytest.mark.parametrize("name", GRIDS)
def test_what_is_counted_is_the_whole_model_once(forks, name):
    recipe = recipe_with(**GRIDS[name])
    plan, holdings, stepped = only(forks.run(1, _of_every_rank, recipe))
    assert plan.parameters == recipe.num_params() == round(stepped)
    assert sum(kind.count for kind in plan.kinds) == recipe.parallel.world_size == len(holdings)
    assert sorted(stage for kind in plan.kinds for stage in kind.stages) == list(range(recipe.parallel.pipeline))
    in_stage = len(holdings) // recipe.parallel.pipeline
    for kind in plan.kinds:
        for stage in kind.stages:
            for held in holdings[stage * in_stage : (stage + 1) * in_stage]:
                assert len(held.layers) == len(kind.holding.layers) and held.experts == kind.holding.experts
                for name in ("parameters", "weights", "gradients"):
                    assert getattr(held, name) == getattr(kind.holding, name)
    # Shards of flat buffers are equal but for what aligns parameters in them: to 64 elements, each with 12 bytes.
    assert max(held.total for held in holdings) <= plan.largest.holding.total + 64 * 12 * 8 * len(plan.kinds)
    layers = sorted({number for held in holdings for number in held.layers})
    assert layers == list(recipe.model.layer_numbers)


OPTIMIZERS = {
    "adamw": ("none", {}, {}),
    "adamw, bf16, sharded": ("optimizer", {}, BF16),
    "adamw, fp16": ("none", {"loss_scale": 1.0}, {"precision": "fp16"}),
    "lamb, sharded": ("optimizer", {"name": "lamb"}, {}),
    "lars, bf16": ("none", {"name": "lars"}, BF16),
    "muon, bf16, sharded": ("optimizer", {"name": "muon"}, BF16),
    "sgd, bf16, sharded": ("optimizer", {"name": "sgd"}, BF16),
    "adafactor, bf16": ("none", {"name": "adafactor"}, BF16),
    "adafactor, sharded": ("optimizer", {"name": "adafactor"}, {}),
    "adamw8bit, bf16": ("none", {"name": "adamw8bit"}, BF16),
    "adamw8bit, sharded": ("optimizer", {"name": "adamw8bit"}, {}),
}


def _held_for_real(recipe):
    """Bytes that live on this rank after a step, by kind, and bytes that it writes into a checkpoint."""
    from bench.samples import Tokens
    from bench.studies.memory import _bytes, tensors_of
    from pretrain.engine import state

    engine = engine_of(recipe)
    engine.train_step(0, Tokens(recipe))  # the optimizer has no state before
    held = {name: sum(map(_bytes, tensors)) for name, tensors in tensors_of(engine).items()}
    return held, sum(_bytes(piece.data) for piece in state.pieces(engine))


def _plan(recipe, nodes=1):
    from pretrain.dryrun import make_plan

    dist.destroy_process_group()
    return make_plan(recipe, nodes)


@pytest.mark.by_default("adamw, bf16, sharded")
@pytest.mark.parametrize("name", OPTIMIZERS)
def test_predicted_bytes_are_those_of_a_run(forks, name):
    if "8bit" in name:
        pytest.importorskip("torchao")
    shard, optimizer, train = OPTIMIZERS[name]
    wide = {"hidden_size": 64, "ffn_hidden_size": 64}  # matrices of which moments are 8-bit
    recipe = recipe_with(wide, {"expert": 2, "data": 2, "shard": shard}, optimizer, train)
    real = values(forks.run(4, _held_for_real, recipe))
    plan = only(forks.run(1, _plan, recipe))
    (kind,) = plan.kinds
    largest, _ = max(real, key=lambda held: sum(held[0].values()))
    print(largest, kind.holding)
    for name in ("weights", "gradients", "masters"):
        assert getattr(kind.holding, name) == pytest.approx(largest[name], rel=2e-3), name
    assert kind.holding.moments == pytest.approx(largest["state"], rel=1e-2)  # a step's number, of each tensor
    assert plan.checkpoint_bytes == sum(saved for _, saved in real)


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
def test_bytes_in_host_memory_are_those_of_a_run(forks, precision):
    parallel = {"expert": 2, "shard": "parameters"}
    recipe = recipe_with({}, parallel, {"cpu_offload": 1.0}, {"precision": precision})
    held = max(sum(of_rank.values()) for of_rank, _ in values(forks.run(2, _held_for_real, recipe)))
    (kind,) = only(forks.run(1, _plan, recipe)).kinds
    assert kind.holding.on_host == pytest.approx(held, rel=1e-2)  # a step's number, of each tensor
    assert 0 < kind.holding.total - kind.holding.on_host < kind.holding.parameters * 4


# The command


def test_what_is_said_without_data_and_without_a_trace(forks, tmp_path):
    (end,) = forks.command("pretrain.start.launch", "t5", "--dry-run", "--resume", "auto", folder=tmp_path)
    assert end.code == 0 and end.err == "", end.err
    assert list(tmp_path.iterdir()) == []
    recipe = load_recipe("t5")
    text, _, summary = end.out.partition("\n\n12.8M parameters in total (12,796,160), 4.54M active per token")
    assert summary, end.out
    path = tmp_path / "recipe.toml"
    path.write_text(text)
    assert load_recipe(str(path)) == recipe
    assert "process grid: world size 2, 1 node of 2" in summary
    assert "experts: expert tensor 1 x expert 2 x data 1 x pipeline 1" in summary
    assert "largest rank: 0, 8.08M parameters (8,077,568)\n" in summary
    assert "optimizer (masters and moments) 61.6 MiB, total 123 MiB (129,241,088 bytes)" in summary
    assert "5,024 tokens per step" in summary and f"{recipe.tokens_per_sequence * 16:,}" == "5,024"


def test_json_has_every_figure(forks, recipe_file):
    recipe = recipe_file(parallel={"data": 2, "pipeline": 2, "shard": "optimizer"})
    (end,) = forks.command("pretrain.start.launch", recipe, "--dry-run", "--json", "--nodes", 2)
    told = json.loads(end.out)
    assert told["parameters"] == load_recipe(str(recipe)).num_params()
    assert told["grid"]["nodes"] == told["grid"]["processes_per_node"] == 2
    assert [kind["stages"] for kind in told["kinds"]] == [[0], [1]]
    assert told["largest"] in told["kinds"]
    assert told["recipe"]["parallel"]["pipeline"] == 2


WRONG = {
    "a split that cannot be": ["--parallel.expert", "3"],
    "nodes": ["--nodes", "3", "--node-rank", "0", "--rendezvous", "127.0.0.1:29500"],
    "processes of a node": ["--processes-per-node", "3"],
    "an unknown key": ["--model.num-expert", "3"],
    "an exchange": ["--parallel.exchange", "hierarchical", "--parallel.expert", "4", "--parallel.node-size", "3"],
    "a gate": ["--moe.gate", "no-such-gate"],
}


@pytest.mark.by_default("a split that cannot be", "an exchange")
@pytest.mark.parametrize("name", WRONG)
def test_what_cannot_be_is_the_same_line_as_in_training(forks, recipe_file, tmp_path, name):
    recipe = recipe_file(run={"folder": str(tmp_path / "run")}, parallel={"expert": 2})
    ends = [forks.command("pretrain.start.launch", recipe, *WRONG[name], *dry)[0] for dry in ([], ["--dry-run"])]
    assert [end.code for end in ends] == [2, 2], ends
    assert ends[0].err == ends[1].err and ends[0].err.count("\n") == 1
    assert ends[1].err.startswith("fmoe train: error: ")
    assert not (tmp_path / "run").exists()


BIG = {"switch-c": ("1.57T", 2048), "gshard-600b": ("619B", 2048)}


@pytest.mark.parametrize("name", ["switch-c", pytest.param("gshard-600b", marks=pytest.mark.slow)])
def test_the_largest_recipes_at_their_real_world_size(forks, name):
    """Seconds, and no memory."""
    recipe = load_recipe(name)
    begin, limit = time.monotonic(), within(30)
    plan, peak = only(forks.run(1, _plan_and_peak, recipe))
    seconds = time.monotonic() - begin
    print(f"{seconds:.1f} s, {peak / 2**20:.0f} MiB more")
    total, size = BIG[name]
    assert recipe.parallel.world_size == plan.grid.world_size == plan.kinds[0].count == size
    assert plan.parameters == recipe.num_params()
    assert count_text(plan.parameters) == total
    # A lower bound by hand: bf16 weights and fp32 gradients and masters of the rank's experts.
    model, held = recipe.model, plan.largest.holding
    experts = len(model.layers_with_experts) * 2 * model.hidden_size * model.ffn_hidden_size
    assert held.parameters > experts
    assert held.weights + held.gradients + held.masters > 10 * experts
    assert seconds < limit and peak < 2**30
    if name == "switch-c":
        assert summary(plan) in (Path(__file__).parents[3] / "docs" / "launch.md").read_text()


def _plan_and_peak(recipe):
    import resource

    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    plan = _plan(recipe, 256)
    return plan, 1024 * (resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)


@pytest.mark.by_default("switch-base")
@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_every_recipe_has_a_plan(forks, path):
    recipe = load_recipe(path.stem)
    plan = only(forks.run(1, _plan, recipe))
    assert plan.parameters == recipe.num_params() and plan.active_parameters == recipe.num_active_params()
    text = describe(plan)
    (line,) = [line for line in text.splitlines() if "parameters in total" in line]
    assert line.startswith(f"{count_text(recipe.num_params())} parameters in total ({recipe.num_params():,})")
