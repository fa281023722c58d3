"""A user's own parts: those of docs/plugins.md train, resume, are planned, compared and evaluated."""

import functools
import json
import re
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from engines import RECIPE, engine_of, figures
from forks import only, values
from runs import steps

from fmoe.errors import UserError, add_name
from fmoe.gates import NaiveRouter
from pretrain.compare.cli import main as compare
from pretrain.config import Recipe, build_recipe
from pretrain.config.imports import digests, import_plugins, import_stored
from pretrain.config.load import load_recipe, read_recipe, recipe_text, split_overrides

PAGE = Path(__file__).parents[2] / "docs" / "plugins.md"
PARTS = [
    *("--run.imports", "my_gates", "my_experts.py", "my_callbacks.py", "my_optimizers.py"),
    *("--run.callbacks", "router_norm", "--run.callback-options.router-norm.every", "2"),
    *("--moe.gate", "scaled_cosine", "--moe.gate-options.temperature", "0.3", "--moe.expert", "bilinear"),
    *("--optimizer.name", "lion", "--optimizer.lr", "1e-3", "--optimizer.min-lr", "1e-4"),
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A folder with the files of the page."""
    folder = tmp_path_factory.mktemp("plugins")
    for code in re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL):
        (folder / re.match(r'"""(\w+\.py): ', code)[1]).write_text(code)
    return folder


@pytest.fixture(scope="module")
def run(forks, folder, write_tiny_recipe):
    """``run(name, *options)`` trains the page's parts in ``folder/name``, and returns how each process ended."""
    recipe = write_tiny_recipe(folder / "recipe.toml", checkpoint={"every": 2})

    def start(name, *options, size=1, parts=PARTS):
        argv = [recipe, *parts, "--run.folder", folder / name, *options]
        return forks.command("pretrain", *argv, size=size, folder=folder)

    return start


@pytest.fixture(scope="module")
def whole(run, folder):
    ends = run("whole")
    assert [end.code for end in ends] == [0], ends
    return folder / "whole"


def test_the_pages_parts_train(whole, folder):
    rows = steps(whole)
    assert "router_norm" in rows[2] and "router_norm" in rows[4] and "router_norm" not in rows[3]
    stored = load_recipe(str(whole / "config.toml"))
    names = ("my_gates.py", "my_experts.py", "my_callbacks.py", "my_optimizers.py")
    assert stored.run.imports == tuple(str((folder / name).resolve()) for name in names)
    assert stored.model.moe.gate_options == {"temperature": 0.3}
    told = json.loads((whole / "run.json").read_text())
    assert set(told["imports"]) == set(stored.run.imports)
    assert all(len(digest) == 64 for digest in told["imports"].values())
    # Per layer of 4 experts: a router with a temperature, and three matrices without biases per expert.
    assert told["params"] - told["active_params"] == 2 * 3 * 3 * 32 * 32
    plain = replace(
        stored,
        model=stored.model.with_values(
            {"moe.gate": "naive", "moe.gate_options": {}, "moe.expert": "ffn", "gated": True}
        ),
    )
    assert told["params"] - plain.num_params() == 2


def test_two_processes_and_a_resume_at_another_split_equal_one(run, whole, folder):
    options = ["--parallel.expert", "2", "--train.steps", "2", "--optimizer.decay-steps", "4"]
    ends = run("split", *options, size=2)
    assert [end.code for end in ends] == [0, 0], ends
    ends = run("resumed", "--resume", folder / "split", "--optimizer.decay-steps", "4")
    assert [end.code for end in ends] == [0], ends
    assert f"resumes from {folder / 'split' / 'checkpoints' / 'step-00000002'}" in ends[0].out
    found = {**steps(folder / "split"), **steps(folder / "resumed")}
    for step, row in steps(whole).items():
        for name in {"loss", "val/loss", "router_norm", "moe/load_cv"} & row.keys():
            if name in found[step]:
                assert found[step][name] == pytest.approx(row[name], rel=1e-5), (step, name)
    assert "val/loss" in found[4]


def test_a_resume_names_a_file_that_changed(run, whole, folder):
    options = ["--resume", whole, "--train.steps", "5", "--optimizer.decay-steps", "4"]
    (end,) = run("same", *options)
    assert end.code == 0 and "train.steps=5" in end.out and "run.imports" not in end.out, end
    path = folder / "my_gates.py"
    text = path.read_text()
    path.write_text(text + "# another\n")
    (end,) = run("changed", *options)
    path.write_text(text)
    assert end.code == 0 and "my_gates.py of run.imports" in end.out, end


@pytest.mark.slow
def test_the_optimizers_state_is_sharded_and_resumes_bit_for_bit(run, folder):
    split = ["--parallel.data", "2", "--parallel.shard", "optimizer", "--optimizer.decay-steps", "4"]
    for name, options in {"a": [], "b": ["--train.steps", "2"], "c": ["--resume", folder / "b"]}.items():
        ends = run(name, *split, *options, size=2)
        assert [end.code for end in ends] == [0, 0], ends
    assert steps(folder / "c")[4]["loss"] == steps(folder / "a")[4]["loss"]
    assert steps(folder / "c")[4]["val/loss"] == steps(folder / "a")[4]["val/loss"]


def test_they_are_evaluated_compared_and_planned(forks, whole, run, folder, capsys):
    (end,) = forks.command("fmoe", "evaluate", whole, "--json", folder=folder)
    assert end.code == 0, end
    assert json.loads(end.out)["runs"][0]["loss"] == pytest.approx(steps(whole)[4]["val/loss"], rel=1e-6)
    assert run("other", "--train.seed", "5")[0].code == 0
    assert compare([str(whole), str(folder / "other")]) == 0
    told = json.loads((whole / "run.json").read_text())
    (row,) = [line for line in capsys.readouterr().out.splitlines() if re.match(r"\| .* \| 2 +\| 4 ", line)]
    assert f"{told['active_params'] / 1000:.1f} k" in row, row
    (end,) = forks.command(
        "pretrain.start.launch", folder / "recipe.toml", *PARTS, "--dry-run", "--json", folder=folder
    )
    assert end.code == 0, end
    plan = json.loads(end.out)
    assert (plan["parameters"], plan["active_parameters"]) == (told["params"], told["active_params"])


def registered_kind_and_exchange(recipe):
    """Train a registered kind of model through a registered exchange: shipped ones by another name."""
    import fmoe
    from fmoe.exchange.all_gather import AllGatherExchange
    from pretrain.engine.model import check_parts
    from pretrain.models import gpt, register_model

    class Mine(AllGatherExchange):
        """Exchange under a user's name."""

    fmoe.register_exchange("mine", Mine)
    register_model("own_gpt", gpt)
    check_parts(recipe)
    return figures(recipe)


def test_a_registered_kind_and_exchange_train(forks):
    alone = only(forks.run(1, figures, RECIPE))
    recipe = replace(
        RECIPE,
        model=replace(RECIPE.model, kind="own_gpt"),
        parallel=replace(RECIPE.parallel, expert=2, exchange="mine"),
    )
    for rank in values(forks.run(2, registered_kind_and_exchange, recipe)):
        assert rank["validation"] == pytest.approx(alone["validation"], rel=1e-5)


def reversed_blocks(recipe):
    """The first samples of a recipe's kind, and of one with its own samples, which is a GPT in all else."""
    from pretrain.data.inputs import open_inputs
    from pretrain.data.samples import MadeOfBlocks
    from pretrain.models import gpt, kind_of, register_model

    class Reversed(MadeOfBlocks):
        def __getitem__(self, n):
            return self.blocks[n][::-1]

    def samples(recipe, blocks, tokenizer, seed, length):
        return Reversed(blocks)

    register_model("reversed", SimpleNamespace(samples=samples))
    other = replace(recipe, model=replace(recipe.model, kind="reversed"))
    assert kind_of(other).build is gpt.build
    return open_inputs(recipe).train[0].tolist(), open_inputs(other).train[0].tolist()


def test_a_registered_kind_brings_its_own_samples(forks, recipe_file):
    plain, backwards = only(forks.run(1, reversed_blocks, load_recipe(str(recipe_file()))))
    assert backwards == plain[::-1] != plain


ERRORS = {
    "a module that is missing": (["--run.imports", "nowhere"], "run.imports=nowhere", "neither an installed module"),
    "a file that is missing": (["--run.imports", "./nowhere.py"], "run.imports=./nowhere.py", "not a file"),
    "a module that exits": (["--run.imports", "antigravity_quits"], "antigravity_quits", "SystemExit"),
    "a name that is too long": (["--run.imports", "a" * 300], "run.imports=aaa", "too long"),
    "an endless number": (["--moe.gate-options.bias", "1" * 5000], "moe.gate_options.bias=111", "cannot be read"),
    "a number as an activation": (
        ["--moe.expert-options.activation", "3"],
        "moe.expert_options.activation=3",
        "function",
    ),
    "groups that are kept of none": (
        ["--moe.gate", "naive", "--moe.gate-options.kept-groups", "2"],
        "moe.gate_options.kept_groups=2",
        "expert_groups",
    ),
    "slots that are no number": (
        ["--parallel.exchange", "padded", "--parallel.exchange-options.slots", "x"],
        "parallel.exchange_options.slots='x'",
        "positive",
    ),
    "relative positions recomputed": (
        ["--model.kind", "t5", "--position.encoding", "relative", "--parallel.recompute", "full"],
        "parallel.recompute=full",
        "position.encoding=relative",
    ),
    "a file that raises": (["--run.imports", "raises.py"], "raises.py raised ZeroDivisionError", "raises.py:2"),
    "a file that exits": (["--run.imports", "exits.py"], "exits.py raised SystemExit", "exits.py:1"),
    "a name that exists": (["--run.imports", "taken.py"], "gate='naive'", "fmoe.gates.naive.NaiveRouter"),
    "a metric that exists": (["--run.imports", "metric.py"], "metric='loss'", "declared already"),
    "an unknown gate": (["--moe.gate", "scaled_cosine"], "moe.gate='scaled_cosine'", "sigmoid"),
    "an option that the gate lacks": (
        ["--run.imports", "my_gates", "--moe.gate", "scaled_cosine", "--moe.gate-options.temperatur_", "1"],
        "moe.gate_options.temperatur_=1",
        "did you mean 'temperature'",
    ),
    "an option with a key of its own": (
        ["--moe.gate-options.jitter", "0.1"],
        "moe.gate_options.jitter=0.1",
        "moe.jitter",
    ),
    "an option of the wrong type": (
        ["--moe.gate", "naive", "--moe.gate-options.expert-groups", "two"],
        "moe.gate_options.expert_groups='two'",
        "is not a whole number",
    ),
    "unknown experts": (["--moe.expert", "swiglo"], "moe.expert='swiglo'", "did you mean 'swiglu'"),
    "an option that experts lack": (["--moe.expert-options.drop", "1"], "moe.expert_options.drop=1", "'dropout'"),
    "an unknown loss": (["--moe.loss-weights.balanced", "1"], "moe.loss_weights.balanced=1", "importance"),
    "a negative factor": (["--moe.loss-weights.load", "-1"], "moe.loss_weights.load=-1", "at least 0"),
    "an unknown exchange": (["--parallel.exchange", "all2all"], "parallel.exchange='all2all'", "all_to_all"),
    "an option that the exchange lacks": (
        ["--parallel.exchange-options.slots", "1"],
        "parallel.exchange_options.slots=1",
        "all_to_all",
    ),
    "an unknown kind": (["--model.kind", "gtp"], "model.kind='gtp'", "did you mean 'gpt'"),
    "an unknown optimizer": (["--optimizer.name", "adamv"], "optimizer.name='adamv'", "did you mean 'adamw'"),
    "an optimizer without state_names": (
        ["--run.imports", "optimizer.py", "--optimizer.name", "bare"],
        "optimizer.name=bare",
        "state_names",
    ),
    "an optimizer that needs whole tensors": (
        ["--run.imports", "optimizer.py", "--optimizer.name", "whole", "--parallel.shard", "optimizer"],
        "optimizer.name=whole",
        "parallel.shard=none",
    ),
    "an unknown callback": (["--run.callbacks", "router_norm"], "run.callbacks=router_norm", "valid names: none"),
    "an option that the callback lacks": (
        [
            *("--run.imports", "my_callbacks.py", "--run.callbacks", "router_norm"),
            *("--run.callback-options.router-norm.every_", "1"),
        ],
        "run.callback_options.router_norm.every_=1",
        "did you mean 'every'",
    ),
    "options of a callback that does not run": (
        ["--run.callback-options.router-norm.every", "1"],
        "run.callback_options.router_norm",
        "run.callbacks=[]",
    ),
    "a gate that needs token ids": (["--moe.gate", "hash"], "moe.gate=hash", "token ids"),
    "a global balance without the loss": (
        ["--moe.gate", "random", "--moe.balance-scope", "data_parallel"],
        "moe.balance_scope=data_parallel",
        "moe.gate=random",
    ),
    "a granularity that does not divide": (["--moe.granularity", "5"], "moe.granularity=5", "ffn_hidden_size=32"),
}
FILES = {
    "raises.py": "import math\nmath.inf / 0\n",
    "exits.py": "raise SystemExit(3)\n",
    "antigravity_quits.py": "raise SystemExit(0)\n",
    "taken.py": "import fmoe\nfmoe.register_gate('naive', lambda x, groups: None)\n",
    "metric.py": "from pretrain.tracking.metrics import Metric, register_metric\n"
    "register_metric(Metric('loss', '', 'mine'))\n",
    "optimizer.py": "import torch\nfrom pretrain.engine.optimizer import register_optimizer\n"
    "class Bare(torch.optim.SGD):\n    pass\n"
    "class Whole(torch.optim.SGD):\n    state_names = ('momentum_buffer',)\n"
    "register_optimizer('bare', lambda groups, recipe, **options: Bare(groups, **options))\n"
    "register_optimizer('whole', lambda groups, recipe, **options: Whole(groups, **options))\n",
}


@pytest.mark.by_default(0, 9, 15, 24, 30)
@pytest.mark.parametrize("what", ERRORS)
def test_a_wrong_part_is_one_line(forks, folder, run, what):
    for name, text in FILES.items():
        (folder / name).write_text(text)
    options, key, reason = ERRORS[what]
    (end,) = run("wrong", *options, parts=[])
    assert end.code == 2, end
    assert end.err.count("\n") == 1 and key in end.err and reason in end.err, end.err
    assert not (folder / "wrong").exists()


def test_a_table_of_options_comes_back_from_the_file(tmp_path):
    options = {"a": 1, "b": 2.5, "c": "text", "d": True, "e": [1, "x"], "f": {"g h": None}}
    recipe = Recipe()
    recipe = replace(recipe, run=replace(recipe.run, callback_options=options))
    path = tmp_path / "recipe.toml"
    path.write_text(recipe_text(recipe))
    assert read_recipe(str(path)) == recipe
    assert build_recipe(recipe.values()) == recipe


@pytest.mark.parametrize(
    ("words", "expected"),
    [
        (["--moe.gate-options.expert-groups", "4"], [("moe.gate_options.expert_groups", 4)]),
        (["--moe.gate_options.score=sigmoid"], [("moe.gate_options.score", "sigmoid")]),
        (["--moe.gate-options.no-bias", "true"], [("moe.gate_options.no_bias", True)]),
        (["--moe.gate-options.x", "none"], [("moe.gate_options.x", "none")]),
        (["--moe.gate-options.x", "[1, 2]"], [("moe.gate_options.x", [1, 2])]),
        (["--moe.gate-options", "{a = 1}"], [("moe.gate_options", {"a": 1})]),
    ],
)
def test_options_of_a_table_on_the_command_line(words, expected):
    assert split_overrides(words) == (expected, [])


def test_an_option_on_the_command_line_keeps_the_others_of_the_file(tmp_path):
    path = tmp_path / "recipe.toml"
    path.write_text('[moe]\ngate = "naive"\ngate_options = { expert_groups = 4, kept_groups = 2 }\n')
    recipe = load_recipe(str(path), ["--moe.gate-options.kept-groups", "3"])
    assert recipe.model.moe.gate_options == {"expert_groups": 4, "kept_groups": 3}


@pytest.mark.parametrize("value", ["2026-11-23", "{a = 07:32:00}"])
def test_a_date_is_no_option(value):
    with pytest.raises(UserError, match=r"moe\.gate_options"):
        load_recipe("quickstart", ["--moe.gate-options.x", value])


def with_imports(*entries):
    recipe = Recipe()
    return replace(recipe, run=replace(recipe.run, imports=entries))


def test_a_file_imports_its_neighbour_and_hides_no_module(tmp_path, monkeypatch):
    (tmp_path / "random.py").write_text("import neighbour\nseen = neighbour.VALUE\n")
    (tmp_path / "neighbour.py").write_text("VALUE = 7\n")
    monkeypatch.chdir(tmp_path)
    (found,) = import_plugins(with_imports("random.py")).run.imports
    assert found == str(tmp_path / "random.py")
    import random

    assert hasattr(random, "Random") and str(tmp_path) not in sys.path
    sys.modules.pop("neighbour")


def test_a_file_beside_the_recipe_is_found(tmp_path, monkeypatch):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "beside.py").write_text("")
    monkeypatch.chdir(tmp_path)
    recipe = with_imports("beside")
    assert import_plugins(recipe, tmp_path / "recipes").run.imports == (str(tmp_path / "recipes" / "beside.py"),)
    with pytest.raises(UserError, match=r"run\.imports=beside"):
        import_plugins(recipe)


@pytest.mark.parametrize("entry", ["{run}/evil.py", "run/evil.py", "evil", "run.evil"])
@pytest.mark.parametrize("where", ["outside", "inside"])
@pytest.mark.parametrize("is_searched", [False, True])
def test_a_stored_run_brings_no_code(tmp_path, monkeypatch, entry, where, is_searched):
    """Wherever the command runs, and even if Python searches the current folder."""
    folder = tmp_path / "run"
    folder.mkdir()
    (folder / "evil.py").write_text(f"open({str(tmp_path / 'seen')!r}, 'w')\n")
    monkeypatch.chdir(folder if where == "inside" else tmp_path)
    for name in ("run", "run.evil", "evil"):  # of other cases
        monkeypatch.delitem(sys.modules, name, raising=False)
    if is_searched:
        monkeypatch.syspath_prepend(str(Path.cwd()))
    with pytest.raises(UserError, match=r"run\.imports"):
        import_stored(with_imports(entry.format(run=folder)), folder)
    assert not (tmp_path / "seen").exists()


def test_a_module_of_the_current_folder_is_a_file_even_if_python_searches_it(tmp_path, monkeypatch):
    (tmp_path / "gates_of_this_test.py").write_text("")
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    recipe = import_plugins(with_imports("gates_of_this_test"))
    assert recipe.run.imports == (str(tmp_path / "gates_of_this_test.py"),)
    assert list(digests(recipe)) == list(recipe.run.imports)


def test_a_plugin_imports_another_plugin_without_running_it_again(tmp_path, monkeypatch):
    (tmp_path / "first_plugin.py").write_text("import builtins\nbuiltins.runs = getattr(builtins, 'runs', 0) + 1\n")
    (tmp_path / "second_plugin.py").write_text("import first_plugin\n")
    monkeypatch.chdir(tmp_path)
    import builtins

    import_plugins(with_imports("first_plugin.py", "second_plugin.py"))
    assert builtins.runs == 1 and "first_plugin" not in sys.modules
    del builtins.runs


def test_a_changed_file_of_a_package_changes_its_digest(tmp_path, monkeypatch):
    package = tmp_path / "my_package"
    package.mkdir()
    (package / "__init__.py").write_text("")
    (package / "gates.py").write_text("")
    monkeypatch.chdir(tmp_path)
    recipe = import_plugins(with_imports("my_package"))
    before = digests(recipe)
    (package / "gates.py").write_text("# another\n")
    assert digests(recipe) != before


@pytest.mark.parametrize("name", ["naive", "mine"])
def test_a_name_is_never_replaced_by_something_else(name, monkeypatch):
    table = {"naive": NaiveRouter, "mine": lambda x, groups: 1}
    add_name(table, "gate", name, table[name])
    with pytest.raises(UserError, match=f"gate='{name}' is registered already"):
        add_name(table, "gate", name, lambda x, groups: 2)
    with pytest.raises(UserError, match="gate='naive'"):
        add_name(table, "gate", "naive", functools.partial(NaiveRouter, bias=True))


def test_callbacks_of_one_class_have_states_of_their_own(monkeypatch):
    from pretrain.callbacks import Callback, base, build_callbacks

    monkeypatch.setattr(base, "CALLBACKS", {"a": lambda recipe: Callback(), "b": lambda recipe: Callback()})
    recipe = Recipe()
    a, b = build_callbacks(replace(recipe, run=replace(recipe.run, callbacks=("a", "b"))))
    assert (a.state_key, b.state_key, Callback().state_key) == ("run.callbacks.a", "run.callbacks.b", "Callback")


def test_an_entry_point_is_imported_and_its_failure_names_the_package(tmp_path, monkeypatch):
    info = tmp_path / "their_gates-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: their-gates\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[fmoe.plugins]\ntheirs = their_gates_for_fmoe\n")
    (tmp_path / "their_gates_for_fmoe.py").write_text("import torch\nDONE = torch.zeros(1)\n1 / 0\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(UserError, match=r"their_gates_for_fmoe.*their-gates.*ZeroDivisionError"):
        import_plugins(Recipe())
    (tmp_path / "their_gates_for_fmoe.py").write_text("DONE = True\n")
    import_plugins(Recipe())


def test_switchs_initialisation(forks):
    """Truncated at two standard deviations sqrt(0.1 / inputs), except in the embedding."""
    recipe = replace(RECIPE, model=replace(RECIPE.model, init="switch", tie_embeddings=False))
    found = only(forks.run(1, initial_weights, recipe))
    for name, weight in found.items():
        if weight.dim() < 2 or "embedding" in name or "output_layer" in name:
            continue
        std = (0.1 / weight.shape[-1]) ** 0.5
        assert weight.abs().max() <= 2 * std * 1.0001, name
        assert weight.float().std() == pytest.approx(0.88 * std, rel=0.2), name
    assert found["embedding.word_embeddings.weight"].std() == pytest.approx(RECIPE.model.init_std, rel=0.1)
    assert found["output_layer.weight"].std() == pytest.approx(RECIPE.model.init_std, rel=0.1)


def initial_weights(recipe):
    return {name: p.detach().clone() for name, p in engine_of(recipe).gpt.named_parameters()}


def test_granularity_equals_more_and_narrower_experts(forks):
    fine = replace(RECIPE, model=RECIPE.model.with_values({"moe.granularity": 2}))
    same = replace(
        RECIPE, model=RECIPE.model.with_values({"moe.num_experts": 8, "moe.top_k": 4, "ffn_hidden_size": 12})
    )
    assert fine.num_params() == same.num_params() and fine.num_active_params() == same.num_active_params()
    found = only(forks.run(1, figures, fine))
    expected = only(forks.run(1, figures, same))
    for name, value in expected.items():
        assert torch.equal(torch.as_tensor(found[name]), torch.as_tensor(value)), name


@pytest.mark.by_default("2")
@pytest.mark.parametrize("expert", [1, 2])
def test_balance_over_data_parallel_ranks_equals_one_process(forks, expert):
    """One process with a micro batch of all sequences in a single routing group counts the same loads."""
    model = RECIPE.model.with_values(
        {"moe.balance_scope": "data_parallel", "moe.capacity_factor": None, "moe.eval_capacity_factor": None}
    )
    alone = replace(RECIPE, model=model, train=replace(RECIPE.train, micro_batch=8))
    split = {"expert": 2} if expert == 2 else {"data": 2}
    both = replace(
        RECIPE,
        model=model,
        parallel=replace(RECIPE.parallel, **split),
        train=replace(RECIPE.train, micro_batch=4),
    )
    expected = only(forks.run(1, figures, alone))
    for rank in values(forks.run(2, figures, both)):
        for name in expected:
            if name.startswith(("loss", "balance", "gradient norm", "validation")):
                assert rank[name] == pytest.approx(expected[name], rel=1e-5), name


def test_callbacks_end_also_after_one_that_fails(monkeypatch):
    from pretrain.callbacks import Callback
    from pretrain.trainer import Trainer

    monkeypatch.setattr("pretrain.trainer.peak_flops", lambda device, precision: 1.0)
    ended = []

    class Ends(Callback):
        def on_end(self, trainer, error):
            ended.append(self)
            if self is failing:
                raise RuntimeError("callback 1")

    first, failing, last = callbacks = [Ends(), Ends(), Ends()]
    trainer = SimpleNamespace(
        callbacks=callbacks,
        inputs=SimpleNamespace(unigram_entropy=0.0),
        is_last=True,
        processes=SimpleNamespace(device=torch.device("cpu"), is_main=False),
        recipe=Recipe(),
        step=0,
        _batches=SimpleNamespace(close=lambda: None),
    )
    with pytest.raises(RuntimeError, match="callback 1"):
        Trainer.run(trainer)
    assert ended == [first, failing, last]
