"""Every kind of damage is one line that names the file."""

import json
import shutil

import pytest
import torch
from pieces import whole

from fmoe.errors import UserError
from pretrain.checkpoint import open_checkpoint, save
from pretrain.checkpoint.manifest import seal

NAMES = ["manifest.json", "rank-00000.json", "shard-00000.safetensors", "state.json"]


@pytest.fixture
def path(tmp_path):
    pieces = [whole("w", torch.randn(64, 8)), whole("b", torch.randn(8))]
    return save(tmp_path / "checkpoints", 2, pieces, {"tokens": 1024}, {"rng": torch.get_rng_state()})


def use(path):
    checkpoint = open_checkpoint(path)
    checkpoint.rank_state(0)
    for name in checkpoint.names():
        checkpoint.read(name)


def raised(function, *args):
    with pytest.raises(UserError) as caught:
        function(*args)
    assert "\n" not in str(caught.value)
    return str(caught.value)


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.parametrize("damage", ["truncated", "longer", "missing", "folder", "empty"])
def test_a_file_of_another_size_is_named_on_opening(path, name, damage):
    file = path / name
    content = file.read_bytes()
    file.unlink()
    match damage:
        case "truncated":
            file.write_bytes(content[:-1])
        case "longer":
            file.write_bytes(content + b"\0")
        case "folder":
            file.mkdir()
        case "empty":
            file.write_bytes(b"")
    assert name in raised(open_checkpoint, path)


@pytest.mark.parametrize("name", NAMES)
def test_a_flipped_bit_anywhere_is_named(path, name):
    file = path / name
    content = file.read_bytes()
    for position in range(0, len(content), max(1, len(content) // 40)):
        damaged = bytearray(content)
        damaged[position] ^= 1 << position % 8
        file.write_bytes(damaged)
        assert name in raised(use, path)
        assert name in raised(lambda: open_checkpoint(path).verify())
    file.write_bytes(content)
    use(path)


def test_only_touched_files_are_verified_and_each_once(path, monkeypatch):
    from pretrain.checkpoint import load

    read, check = [], load.content_problem
    monkeypatch.setattr(load, "content_problem", lambda p, record: read.append(p.name) or check(p, record))
    checkpoint = open_checkpoint(path)
    assert read == ["state.json"]
    for name in checkpoint.names() * 2:
        checkpoint.read(name)
    assert read == ["state.json", "shard-00000.safetensors"]


def test_verification_can_be_left_out(path):
    shard = path / "shard-00000.safetensors"
    content = bytearray(shard.read_bytes())
    content[-1] ^= 1
    shard.write_bytes(content)
    open_checkpoint(path, verify=False).read("w")
    content[8] ^= 1  # the header: the library refuses it
    shard.write_bytes(content)
    assert shard.name in raised(open_checkpoint(path, verify=False).read, "w")


def test_swapped_files_are_named(path):
    other = save(path.parent, 3, [whole("w", torch.randn(64, 8))], {"tokens": 2048}, {})
    shutil.copy(other / "state.json", path / "state.json")
    assert "state.json" in raised(open_checkpoint, path)
    shutil.copy(path / "manifest.json", other / "manifest.json")
    assert "manifest.json is of step 2" in raised(open_checkpoint, other)


def reseal(path, change):
    document = json.loads((path / "manifest.json").read_bytes())
    del document["sha256"]
    change(document)
    (path / "manifest.json").write_bytes(seal(document))


@pytest.mark.parametrize(
    "name", ["../secret", "/etc/passwd", "a/b", "..", ".hidden", "", "a\\b", "manifest.json", "a\n"]
)
def test_file_names_outside_the_folder_are_refused(path, name):
    (path.parent / "secret").write_bytes(b"{}")
    reseal(path, lambda document: document["files"].update({name: {"size": 2, "sha256": "0"}}))
    assert "malformed (ValueError: file '" in raised(open_checkpoint, path)


def test_a_link_is_refused(path):
    state = path / "state.json"
    state.rename(path.parent / "elsewhere.json")
    state.symlink_to(path.parent / "elsewhere.json")
    assert "state.json is not a regular file" in raised(open_checkpoint, path)


def piece_of(document):
    return document["tensors"]["w"]["pieces"][0]


@pytest.mark.parametrize(
    "change, message",
    [
        (lambda d: d.update(format=2), "format version 2"),
        (lambda d: d.pop("format"), "no format version"),
        (lambda d: d.update(step=-1), "malformed"),
        (lambda d: d.update(tensors=[]), "malformed"),
        (lambda d: d.pop("files"), "malformed"),
        (lambda d: d["files"].pop("state.json"), "state.json is not among its files"),
        (lambda d: d["files"].pop("shard-00000.safetensors"), "shard-00000.safetensors"),
        (lambda d: d["tensors"]["w"].update(dtype="float7"), "unknown dtype"),
        (lambda d: d["tensors"]["w"].update(dtype="int32"), "w differs in shape or dtype from manifest.json"),
        (lambda d: d["tensors"]["w"].update(shape=[64, True]), "malformed"),
        (lambda d: d["tensors"]["w"].update(shape=[64, 9]), "64 of its 576 elements are missing"),
        (lambda d: d["tensors"]["w"].update(shape=[63, 8]), "tensor w: block (64, 8) at (0, 0)"),
        (lambda d: d["tensors"]["w"]["pieces"].append(piece_of(d)), "both hold the element at (0, 0)"),
        (lambda d: piece_of(d).update(start=0, stop=513), "is outside the block's 512"),
        (lambda d: piece_of(d).update(key="b"), "b differs in shape or dtype from manifest.json"),
        (lambda d: piece_of(d).update(key="c"), "shard-00000.safetensors cannot be read"),
    ],
)
def test_a_manifest_that_lies_is_refused(path, change, message):
    reseal(path, change)
    assert message in raised(use, path)


@pytest.mark.parametrize("content", [b"", b"[]", b"{", b'"x"', b"\xff\xfe", b"[" * 100_000])
def test_a_manifest_that_is_no_manifest(path, content):
    (path / "manifest.json").write_bytes(content)
    assert "manifest.json" in raised(open_checkpoint, path)


def test_what_is_no_checkpoint(path, tmp_path):
    unfinished = tmp_path / "step-00000009.tmp"
    shutil.copytree(path, unfinished)
    assert f"{unfinished} is not a complete checkpoint" in raised(open_checkpoint, unfinished)
    run = tmp_path / "run.tmp"  # only the name of a step marks an unfinished one
    shutil.copytree(path, run / "checkpoints" / path.name)
    assert open_checkpoint(run).path.parent.parent == run
    for place in (tmp_path / "nowhere", unfinished.parent / "empty", path / "state.json"):
        if place.name == "empty":
            place.mkdir()
        message = raised(open_checkpoint, place)
        assert f"{place} is not a checkpoint: it has no manifest.json" in message
