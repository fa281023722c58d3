"""`fmoe checkpoint export` and `import`: tensors equal bit for bit, in folders that torch's own readers open."""

import pickle
import random
import shutil
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from forks import only, values
from huggingface_folders import save_random, saved_at
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch.distributed.checkpoint.format_utils import dcp_to_torch_save

from fmoe.cli import run
from fmoe.errors import UserError
from pretrain.checkpoint import TensorPiece, codec, open_checkpoint, save, save_parts
from pretrain.checkpoint.cli import main
from pretrain.config import AttentionConfig, ModelConfig, MoEConfig, ParallelConfig, Recipe, TrainConfig, load_recipe
from pretrain.interchange import import_folder, transfer
from pretrain.interchange.dcp import DcpFolder
from pretrain.interchange.transfer import export_tensors, open_folder, stored_tensors

MODEL = ModelConfig(
    num_layers=2,
    hidden_size=16,
    ffn_hidden_size=12,
    vocab_size=40,
    gated=True,
    activation="silu",
    tie_embeddings=False,
    attention=AttentionConfig(num_heads=2),
    moe=MoEConfig(num_experts=4, top_k=2, gate="sigmoid", num_shared_experts=1),
)
RECIPE = Recipe(model=MODEL, train=TrainConfig(precision="bf16"))
pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")
RANK_STATES = [{"rng": torch.arange(3)}, {"rng": b"second"}]


def alone(function, *args):
    """In a process without a group, like the command's."""
    if dist.is_initialized():
        dist.destroy_process_group()
    return function(*args)


def shapes_of(recipe):
    from pretrain.engine.meta import checkpoint_layouts

    return {name: shape for name, (shape, _) in checkpoint_layouts(recipe).items()}


def importing(*argv):
    """Exit code of ``fmoe checkpoint import``."""
    return alone(command, "import", *argv)


def command(*argv):
    return run("fmoe checkpoint", lambda: main([str(argument) for argument in argv]))


def tensors_of(checkpoint):
    return {name: checkpoint.read(name) for name in checkpoint.names()}


def assert_same(found, expected):
    assert found.keys() == expected.keys()
    for name, value in expected.items():
        assert (found[name].dtype, found[name].shape) == (value.dtype, value.shape), name
        assert found[name].contiguous().view(-1).view(torch.uint8).equal(value.contiguous().view(-1).view(torch.uint8))


@pytest.fixture(scope="module")
def trained(forks, tmp_path_factory):
    """A step folder with weights in bf16, masters and one moment, of two ranks."""
    shapes, draw = only(forks.run(1, alone, shapes_of, RECIPE)), torch.Generator().manual_seed(3)
    pieces = []
    for prefix, dtype in (("model/", torch.bfloat16), ("optimizer/master/", torch.float32)):
        for name, shape in shapes.items():
            value = torch.randn(shape, generator=draw).to(dtype)
            for row, part in enumerate(value.split(3)):
                offset = (3 * row, *(0 for _ in shape[1:]))
                pieces.append(TensorPiece(f"{prefix}{name}", shape, offset, tuple(part.shape), part))
    state = {"recipe": RECIPE.values(), "step": 7, "schedule": {"num_steps": 7, "tuple": (1, 2.5)}}
    state |= {"optimizer": {"step": 7.0}, "data": {"next_sample": 56, "samples_per_epoch": 64, "corpora": [None]}}
    folder = tmp_path_factory.mktemp("trained")
    return save_parts(folder, 7, pieces, state, nbytes=0, part_bytes=8000, rank_states=RANK_STATES)


@pytest.fixture(scope="module")
def exported(trained, tmp_path_factory):
    """Folders by format and whether they have the optimizer's states."""
    folder = tmp_path_factory.mktemp("exported")
    found = {(form, optimizer): folder / f"{form}{optimizer}" for form in FORMS for optimizer in (False, True)}
    for (form, optimizer), out in found.items():
        export_tensors(trained, out, form, optimizer=optimizer, slice_bytes=500, shard_bytes=4000)
    return found


FORMS = ("dcp", "safetensors")


def test_the_folders_are_those_of_torch_and_safetensors(trained, exported, tmp_path):
    checkpoint = open_checkpoint(trained)
    everything = tensors_of(checkpoint)
    weights = {name: value for name, value in everything.items() if name.startswith("model/")}
    for optimizer, expected in ((False, weights), (True, everything)):
        path = exported["dcp", optimizer]
        dcp_to_torch_save(path, tmp_path / "saved.pt")
        assert_same(torch.load(tmp_path / "saved.pt", weights_only=True), expected)
        state = {name: torch.zeros_like(value) for name, value in expected.items()}
        dcp.load(state, storage_reader=dcp.FileSystemReader(path), no_dist=True)
        assert_same(state, expected)
        path = exported["safetensors", optimizer]
        files = sorted(path.glob("*.safetensors"))
        assert len(files) > 2 and (path / "model.safetensors.index.json").exists()
        assert_same({name: value for file in files for name, value in load_file(file).items()}, expected)
    for (_, optimizer), path in exported.items():
        assert load_recipe(str(path / "recipe.toml")) == RECIPE
        assert (path / "state.json").exists() == optimizer
        assert not [name for name in path.rglob("*") if "tmp" in name.name]


def test_torch_reads_chunks_at_its_own_split(trained, exported):
    """Chunks of at most ``slice_bytes`` or a row; a reader may ask for any part of a tensor."""
    name = "model/decoder.layers.0.mlp.experts.weight_in"
    folder = DcpFolder(exported["dcp", False])
    assert [chunk.shape for chunk in folder.tensors[name].chunks] == [(1, 24, 16)] * 4
    other = "model/output_layer.weight"
    assert [chunk.shape for chunk in folder.tensors[other].chunks] == [(15, 16), (15, 16), (10, 16)]
    expected = open_checkpoint(trained).read(other)
    found = torch.cat([folder.read(other, chunk) for chunk in folder.tensors[other].chunks])
    assert torch.equal(found, expected)


def test_equal_tensors_give_equal_files(trained, exported, tmp_path):
    export_tensors(trained, tmp_path / "again", slice_bytes=500)
    for path in exported["dcp", False].iterdir():
        assert path.read_bytes() == (tmp_path / "again" / path.name).read_bytes(), path.name


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("optimizer", [False, True], ids=["weights", "with optimizer"])
def test_there_and_back(forks, trained, exported, tmp_path, form, optimizer):
    path = exported[form, optimizer]
    assert only(forks.run(1, importing, path, tmp_path / "run")) == 0
    before, after = open_checkpoint(trained), open_checkpoint(tmp_path / "run")
    after.verify()
    expected = tensors_of(before)
    if not optimizer:
        expected = {name: value for name, value in expected.items() if name.startswith("model/")}
    assert_same(tensors_of(after), expected)
    recipe = load_recipe(str(tmp_path / "run" / "config.toml"))
    assert recipe.model == RECIPE.model and recipe.run.folder == str(tmp_path / "run")
    if optimizer:
        assert (after.step, after.state, after.num_ranks) == (7, before.state, 2)
        assert torch.equal(after.rank_state(0)["rng"], RANK_STATES[0]["rng"])
        assert after.rank_state(1) == RANK_STATES[1]
    else:
        assert after.state["weights_only"] and after.step == 0 and recipe.train.init_from == str(tmp_path / "run")


@pytest.mark.slow
def test_what_torch_saved_anew_comes_in(forks, trained, exported, tmp_path):
    """Read and written by torch, with other chunks and objects beside the tensors."""
    weights = {name: value for name, value in tensors_of(open_checkpoint(trained)).items() if "model/" in name}
    dcp.save(weights | {"lr": 0.1, "epoch": torch.Size([3])}, checkpoint_id=tmp_path / "theirs", no_dist=True)
    shutil.copy(exported["dcp", False] / "recipe.toml", tmp_path / "mine.toml")
    out = tmp_path / "run"
    assert only(forks.run(1, importing, tmp_path / "theirs", out, "--recipe", tmp_path / "mine.toml")) == 0
    assert_same(tensors_of(open_checkpoint(out)), weights)


@pytest.mark.slow
@pytest.mark.parametrize("parallel", [ParallelConfig(tensor=2), ParallelConfig(expert=2), ParallelConfig(pipeline=2)])
def test_any_split(forks, tmp_path, parallel):
    """Of a real engine, with its optimizer."""
    save_random(tmp_path / "theirs", "mixtral")
    import_folder(tmp_path / "theirs", tmp_path / "run")
    values(forks.run(2, saved_at, tmp_path / "run", tmp_path / "saved", parallel, "fp32"))
    for form in FORMS:
        export_tensors(tmp_path / "saved", tmp_path / form, form, optimizer=True)
        assert only(forks.run(1, importing, tmp_path / form, tmp_path / f"{form} run")) == 0
        before, after = open_checkpoint(tmp_path / "saved"), open_checkpoint(tmp_path / f"{form} run")
        assert_same(tensors_of(after), tensors_of(before))
        assert any(name.startswith("optimizer/") for name in after.names())
        assert (after.state, after.num_ranks) == (before.state | {"step": 1}, 2)


@pytest.mark.slow
@pytest.mark.parametrize("form", FORMS)
def test_a_run_resumes_from_what_came_back(forks, recipe_file, tmp_path, form):
    """On the same split, its last checkpoint is that of the run itself, bit for bit."""
    recipe = recipe_file(checkpoint={"every": 2, "keep": 0}, parallel={"expert": 2}, train={"steps": 6})

    def train(*argv):
        ends = forks.command("pretrain", *argv, size=2)
        assert [end.code for end in ends] == [0, 0], ends

    train(recipe, "--run.folder", tmp_path / "run")
    export_tensors(tmp_path / "run/checkpoints/step-00000004", tmp_path / "out", form, optimizer=True)
    assert only(forks.run(1, importing, tmp_path / "out", tmp_path / "again")) == 0
    train(tmp_path / "again/config.toml", "--resume")
    found, expected = (open_checkpoint(tmp_path / name) for name in ("again", "run"))
    assert found.step == expected.step == 6
    assert_same(tensors_of(found), tensors_of(expected))


@pytest.mark.parametrize(
    "value",
    [
        torch.tensor(2.5),
        torch.empty(0, 3),
        torch.randn(5, 3).to(torch.float8_e4m3fn),
        torch.arange(7),
        torch.tensor([True, False]),
        torch.randn(3, 2, 2, dtype=torch.float64),
    ],
    ids=lambda value: str(value.dtype),
)
def test_every_dtype_and_shape(tmp_path, value):
    """A checkpoint of one tensor; and a tensor with other strides that begins later in its storage."""
    shape = tuple(value.shape)
    state = {"recipe": RECIPE.values()}
    save(tmp_path, 1, [TensorPiece("model/w", shape, (0,) * len(shape), shape, value)], state, {})
    for form in FORMS:
        export_tensors(tmp_path, tmp_path / form, form, slice_bytes=8)
        found = torch.empty_like(value)
        for piece in stored_tensors(open_folder(tmp_path / form)).pieces():
            index = tuple(slice(o, o + n) for o, n in zip(piece.offset, piece.block, strict=True))
            found[index] = piece.data
        assert_same({"w": found}, {"w": value})
    strange = torch.randn(6, 4).t()[1:]
    dcp.save({"w": strange}, checkpoint_id=tmp_path / "strange dcp", no_dist=True)
    (piece,) = stored_tensors(open_folder(tmp_path / "strange dcp")).pieces()
    assert torch.equal(piece.data, strange)


# Bad input: one line, and nothing half-written.


def refusal(*argv, capsys):
    """The one line on stderr."""
    assert command(*argv) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def test_bad_arguments_of_an_export(trained, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "file").touch()
    assert "is not empty" in refusal("export", trained, tmp_path / "full", capsys=capsys)
    error = refusal("export", trained, tmp_path / "out", "--format", "onnx", capsys=capsys)
    assert "--format onnx" in error and "dcp, safetensors" in error
    assert "no manifest.json" in refusal("export", tmp_path / "full", tmp_path / "out", capsys=capsys)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["full"]


@pytest.mark.parametrize("form", FORMS)
def test_an_export_of_damage_leaves_nothing(trained, tmp_path, form, capsys):
    bad = tmp_path / "bad" / trained.name
    shutil.copytree(trained, bad)
    shard = sorted(bad.glob("shard-*"))[-1]
    data = bytearray(shard.read_bytes())
    data[-1] ^= 1
    shard.write_bytes(data)
    assert shard.name in refusal("export", bad, tmp_path / "out", "--format", form, "--optimizer", capsys=capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


@pytest.mark.parametrize("form", FORMS)
def test_a_full_disk_is_reported_before_a_byte_is_written(trained, tmp_path, form, capsys, monkeypatch):
    monkeypatch.setattr("pretrain.interchange.folder.free_bytes", lambda folder: 1000)
    error = refusal("export", trained, tmp_path / "out", "--format", form, capsys=capsys)
    assert "disk full" in error and "1000 are free" in error
    assert not list(tmp_path.iterdir())


def flip(path, at):
    data = bytearray(path.read_bytes())
    data[at] ^= 1
    path.write_bytes(data)


def cut(path):
    path.write_bytes(path.read_bytes()[:-100])


def change_metadata(path, change):
    metadata = pickle.loads((path / ".metadata").read_bytes())  # noqa: S301 - our own
    change(metadata)
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def storage_of(metadata, name):
    return next(info for index, info in metadata.storage_data.items() if index.fqn == name)


W = "model/output_layer.weight"
DAMAGES = {
    "no file": ("dcp", lambda p: (p / "__0_0.distcp").unlink(), "__0_0.distcp is missing"),
    "a short file": ("dcp", lambda p: cut(p / "__0_0.distcp"), "__0_0.distcp has"),
    "no metadata": ("dcp", lambda p: (p / ".metadata").unlink(), "unknown format"),
    "short metadata": ("dcp", lambda p: cut(p / ".metadata"), ".metadata is damaged"),
    "another pickle": ("dcp", lambda p: (p / ".metadata").write_bytes(pickle.dumps([1])), "no Metadata"),
    "a file elsewhere": (
        "dcp",
        lambda p: change_metadata(p, lambda m: setattr(storage_of(m, W), "relative_path", "../x")),
        "'../x'",
    ),
    "a chunk without data": (
        "dcp",
        lambda p: change_metadata(p, lambda m: m.storage_data.pop(next(iter(m.storage_data)))),
        "has no data",
    ),
    "a missing chunk": (
        "dcp",
        lambda p: change_metadata(p, lambda m: m.state_dict_metadata[W].chunks.pop()),
        "160 of 640 elements are missing",
    ),
    "a chunk twice": (
        "dcp",
        lambda p: change_metadata(
            p, lambda m: setattr(m.state_dict_metadata[W], "chunks", m.state_dict_metadata[W].chunks[:1] * 2)
        ),
        W,
    ),
    "an unknown dtype": (
        "dcp",
        lambda p: change_metadata(p, lambda m: setattr(m.state_dict_metadata[W].properties, "dtype", torch.complex64)),
        "complex64",
    ),
    "no safetensors file": ("safetensors", lambda p: sorted(p.glob("*.safetensors"))[1].unlink(), "model-00002-of"),
    "a short safetensors file": ("safetensors", lambda p: cut(sorted(p.glob("*.safetensors"))[0]), "model-00001-of"),
    "a broken index": ("safetensors", lambda p: cut(p / "model.safetensors.index.json"), "index.json"),
    "no recipe": ("dcp", lambda p: (p / "recipe.toml").unlink(), "--recipe"),
    "code": ("dcp", lambda p: (p / "recipe.toml").write_text('[run]\nimports = ["x.py"]'), "the recipe with --recipe"),
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_damage_is_one_line(exported, tmp_path, capsys, damage):
    form, break_it, word = DAMAGES[damage]
    shutil.copytree(exported[form, False], tmp_path / "bad")
    break_it(tmp_path / "bad")
    assert word in refusal("import", tmp_path / "bad", tmp_path / "out", capsys=capsys)
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]


def test_every_flipped_byte_of_a_tensor_is_found(exported, tmp_path):
    """By the CRC-32 of torch's zip, or because the zip is broken."""
    shutil.copytree(exported["dcp", False], tmp_path / "bad")
    folder = DcpFolder(tmp_path / "bad")
    chunk = folder.tensors[W].chunks[0]
    file = tmp_path / "bad" / chunk.file
    expected, missed = folder.read(W, chunk), 0
    for at in range(0, chunk.length, 23):
        flip(file, chunk.position + at)
        try:
            missed += not torch.equal(folder.read(W, chunk), expected)
        except UserError as error:
            assert W in str(error) and "\n" not in str(error)
        flip(file, chunk.position + at)
    assert missed == 0


def test_damaged_metadata_is_refused_or_has_the_same_tensors(exported, tmp_path):
    """Whatever it says then: no other error, and no file outside the folder."""
    shutil.copytree(exported["dcp", False], tmp_path / "bad")
    file, draw, refused = tmp_path / "bad" / ".metadata", random.Random(2), 0
    data = file.read_bytes()
    for _ in range(150):
        bad = bytearray(data)
        for _ in range(draw.randrange(1, 4)):
            bad[draw.randrange(len(bad))] = draw.randrange(256)
        file.write_bytes(bad)
        try:
            folder = DcpFolder(tmp_path / "bad")
            assert all("/" not in chunk.file for tensor in folder.tensors.values() for chunk in tensor.chunks)
        except UserError as error:
            assert "\n" not in str(error)
            refused += 1
    assert refused > 75


def imports_of(path, out, recipes):
    """What stderr has and what is left of the import of a folder, alone and with each recipe."""
    import contextlib
    import io

    found = []
    for recipe in recipes:
        with contextlib.redirect_stderr(io.StringIO()) as error:
            code = importing(path, out, *(["--recipe", recipe] if recipe else []))
        found.append((code, error.getvalue(), out.exists()))
    return found


def test_a_folder_that_is_not_the_recipes_model(forks, exported, tmp_path):
    text = (exported["dcp", False] / "recipe.toml").read_text()
    changes = {
        "num_layers = 2": "num_layers = 3",
        "num_layers = 2 ": "num_layers = 1",
        "vocab_size = 40": "vocab_size = 48",
    }
    recipes = []
    for number, (old, new) in enumerate(changes.items()):
        recipes.append(tmp_path / f"{number}.toml")
        recipes[-1].write_text(text.replace(old.strip(), new))
    more, fewer, other = only(forks.run(1, imports_of, exported["dcp", False], tmp_path / "out", recipes))
    for code, error, is_there in (more, fewer, other):
        assert code == 2 and error.count("\n") == 1 and not is_there
    assert "has no tensor model/decoder.layers.2." in more[1]
    assert "has the tensor model/decoder.layers.1." in fewer[1]
    assert "embedding.word_embeddings.weight has shape [40, 16]" in other[1] and "[48, 16]" in other[1]


STATES = {
    "it has no recipe": {"recipe": None},
    "model.depth": {"recipe": {"model": {"depth": 3}}},
    "model.num_layers=3": {"recipe": replace(RECIPE, model=replace(MODEL, num_layers=3)).values()},
    "weights_only=true": {"weights_only": True},
    "optimizer.step": {"optimizer": {}},
    "schedule.num_steps": {"schedule": None},
    "data.corpora": {"data": {"next_sample": 56, "samples_per_epoch": 64}},
}


def test_states_that_cannot_resume_are_refused(exported, tmp_path):
    state = codec.loads((exported["dcp", True] / "state.json").read_bytes())
    for word, changes in STATES.items():
        (tmp_path / "state.json").write_bytes(codec.dumps(state | changes, "state"))
        (tmp_path / "rank-00000.json").write_bytes(codec.dumps({"rng": 1}, "state"))
        with pytest.raises(UserError) as error:
            transfer._states(tmp_path, RECIPE)
        assert word in str(error.value) and "\n" not in str(error.value)
    (tmp_path / "state.json").write_bytes(codec.dumps(state, "state"))
    assert transfer._states(tmp_path, RECIPE)[0] == state
    (tmp_path / "rank-00000.json").write_bytes(b"{}")
    with pytest.raises(UserError, match=r"rank-00000.json is damaged: it has no rng"):
        transfer._states(tmp_path, RECIPE)


@pytest.mark.parametrize("dtype", [torch.int64, torch.float8_e4m3fn])
def test_a_tensor_of_another_dtype_than_a_precision_is_refused(forks, trained, exported, tmp_path, dtype):
    weights = {name: value for name, value in tensors_of(open_checkpoint(trained)).items() if "model/" in name}
    weights[W] = weights[W].to(dtype)
    dcp.save(weights, checkpoint_id=tmp_path / "bad", no_dist=True)
    shutil.copy(exported["dcp", False] / "recipe.toml", tmp_path / "bad")
    ((code, error, is_there),) = only(forks.run(1, imports_of, tmp_path / "bad", tmp_path / "out", [None]))
    assert code == 2 and error.count("\n") == 1 and not is_there
    assert f"{W} has dtype {str(dtype).removeprefix('torch.')}" in error


def test_damage_within_the_import_leaves_nothing(forks, exported, tmp_path):
    shutil.copytree(exported["dcp", True], tmp_path / "bad")
    chunk = DcpFolder(tmp_path / "bad").tensors[W].chunks[1]
    flip(tmp_path / "bad" / chunk.file, chunk.position + chunk.length // 2)
    ((code, error, is_there),) = only(forks.run(1, imports_of, tmp_path / "bad", tmp_path / "out", [None]))
    assert code == 2 and error.count("\n") == 1 and W in error and not is_there
    assert [path.name for path in tmp_path.iterdir()] == ["bad"]
    shutil.rmtree(tmp_path / "bad")
    shutil.copytree(exported["dcp", True], tmp_path / "bad")
    (tmp_path / "bad" / "rank-00000.json").unlink()
    ((code, error, is_there),) = only(forks.run(1, imports_of, tmp_path / "bad", tmp_path / "out", [None]))
    assert code == 2 and "rank-00000.json" in error and not is_there


def test_the_index_of_safetensors_has_every_tensor(exported):
    path = exported["safetensors", True]
    for file in path.glob("*.safetensors"):
        with safe_open(file, "pt") as opened:
            assert opened.metadata() == {"format": "pt"}
    assert transfer.OPTIMIZER + "master/output_layer.weight" in stored_tensors(open_folder(path)).layouts
    only_file = path.parent / "one file"
    only_file.mkdir()
    save_file({"model/w": torch.ones(2)}, only_file / "model.safetensors")
    assert stored_tensors(open_folder(only_file)).layouts == {"model/w": ((2,), torch.float32)}
