"""Content of the page, decoded as the page does."""

import base64
import json
import re
import zlib
from itertools import pairwise

import numpy as np
import pytest
from made_up import rows, write_run

from pretrain.report.page import page, policy, read_runs
from pretrain.report.payload import encode, summary
from pretrain.report.runs import RunFolder


class Decoded:
    """A payload as `data.js` reads it."""

    def __init__(self, payload):
        raw = zlib.decompress(payload)
        size = int.from_bytes(raw[:4], "little")
        self.header, self._arrays = json.loads(raw[4 : 4 + size]), raw[4 + size :]

    def array(self, index):
        kind, length, offset = self.header["arrays"][index]
        if kind == "u1":
            return np.frombuffer(self._arrays, np.uint8, length, offset)
        planes = np.frombuffer(self._arrays, np.uint8, 4 * length, offset).reshape(4, length)
        return planes.T.copy().view("<u4" if kind == "u4" else "<f4").reshape(-1)

    def curve(self, run, name, of="curves"):
        places = self.header["runs"][run][of][name]
        return np.cumsum(self.array(places["x"])), self.array(places["y"])


def test_short_runs_are_there_step_by_step(tmp_path):
    runs = read_runs([write_run(tmp_path / "a", 50), write_run(tmp_path / "b", 30, layers=3, experts=6, seed=1)])
    decoded = Decoded(encode(runs))
    assert [run["name"] for run in decoded.header["runs"]] == ["a", "b"]
    expected = [row for row in rows(50) if row["step"]]
    for name in ("loss", "grad_norm", "moe/entropy"):
        steps, values = decoded.curve(0, name)
        assert steps.tolist() == list(range(1, 51))
        assert values.tolist() == np.float32([row[name] for row in expected]).tolist()
    assert decoded.curve(0, "tokens")[1].tolist() == [row["tokens"] for row in expected]
    _, entropy = decoded.curve(0, "2/entropy", "layer_curves")
    assert entropy == pytest.approx([row["moe/layer_2/entropy"] for row in expected], rel=8e-6)

    loads = decoded.header["runs"][1]["loads"]
    assert (loads["layers"], loads["experts"]) == ([1, 2, 3], [6, 6, 6])
    assert loads["frames"] == [[step, step] for step in range(1, 31)]
    low, high = loads["log2"]
    codes = decoded.array(loads["codes"]).reshape(18, 30)
    shares = 2.0 ** (low + (codes[6:12, 4].astype(float) - 1) / 253 * (high - low)) / 6
    row = list(rows(30, 3, 6, seed=1))[5]
    assert shares == pytest.approx(row["moe/layer_2/load"], rel=0.02)


def test_every_curve_ends_with_the_value_that_was_logged_last(tmp_path, monkeypatch):
    """As many digits as float32 has, of the last step, also where spans of many steps are drawn."""
    monkeypatch.setattr("pretrain.report.payload.CURVE_POINTS", 1)
    folder = write_run(tmp_path / "run", 300)
    decoded = Decoded(encode(read_runs([folder])))
    *_, last = rows(300)
    assert len(decoded.curve(0, "loss")[0]) < 50
    for name, of, key in (
        ("loss", "curves", "loss"),
        ("val/loss", "curves", "val/loss"),
        ("moe/entropy", "curves", "moe/entropy"),
        ("1/z_loss", "layer_curves", "moe/layer_1/z_loss"),
        ("2/entropy", "layer_curves", "moe/layer_2/entropy"),
    ):
        steps, values = decoded.curve(0, name, of)
        assert (steps[-1], values[-1]) == (300, np.float32(last[key]))


def test_dead_experts_and_missing_loads_have_codes_of_their_own(tmp_path):
    def change(row):
        if row["step"] == 2:
            row["moe/layer_1/load"] = [0.0, 1.0, 0.0, 0.0]
        if row["step"] == 3:
            row |= {"moe/layer_1/load": [None] * 4, "moe/layer_1/load_nonfinite": ["nan"] * 4}
        return row

    decoded = Decoded(encode(read_runs([write_run(tmp_path / "run", 4, change=change)])))
    codes = decoded.array(decoded.header["runs"][0]["loads"]["codes"]).reshape(8, 4)
    assert codes[:4, 1].tolist() == [0, 254, 0, 0]  # 4 times an even share is the most there can be
    assert codes[:4, 2].tolist() == [255] * 4
    assert ((codes[4:] > 0) & (codes[4:] < 255)).all()


def test_the_numbers_of_a_run(tmp_path):
    (run,) = read_runs([write_run(tmp_path / "run", 40)])
    numbers = summary(run)
    last = list(rows(40))[-1]
    assert numbers["loss"] == last["loss"] and numbers["tokens"] == last["tokens"]
    assert (numbers["step"], numbers["total_steps"], numbers["world_size"]) == (40, 40, 2)
    assert numbers["tokens_per_second"] == pytest.approx(2e5, rel=0.05)
    assert numbers["skipped"] == 0 and "moe/dead_experts" in numbers


def test_many_runs_share_the_room(tmp_path, monkeypatch):
    monkeypatch.setattr("pretrain.report.payload.LOAD_CELLS", 400)
    folders = [write_run(tmp_path / str(n), 100, seed=n) for n in range(2)]
    header = Decoded(encode(read_runs(folders))).header
    frames = header["runs"][0]["loads"]["frames"]
    assert 12 <= len(frames) <= 25
    assert frames[0][0] == 1 and frames[-1][1] == 100
    assert all(a[1] + 1 == b[0] for a, b in pairwise(frames))


@pytest.mark.slow
def test_ten_thousand_steps_of_24_layers_with_128_experts_have_less_than_800_kilobytes(big_run):
    size = len(page(encode([big_run])).encode())
    print(f"{size:,} bytes")
    assert size < 800_000


def test_the_page_needs_nothing_else_and_may_do_nothing_else(tmp_path):
    text = page(encode(read_runs([write_run(tmp_path / "run", 5)])))
    style, script = (
        re.search(r"<style>(.*?)</style>", text, re.S)[1],
        re.search(r"<script>(.*?)</script>", text, re.S)[1],
    )
    rules = policy(style, script, live=False)
    assert f'http-equiv="Content-Security-Policy" content="{rules}"' in text
    assert "unsafe" not in rules and "default-src 'none'" in rules and "connect-src 'none'" in rules
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|\bsrc=|@import|url\(", text.replace(script, ""))
    assert "Leon Sorokin" in text and "MIT License" in text, "uPlot's licence goes with it"
    # No markup is made from text anywhere in our scripts.
    own = script[script.index("'use strict'") :]
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", own)


NAME = "</script><img src=x onerror=document.title='owned'>"


def test_no_byte_of_a_run_is_markup(tmp_path):
    folder = write_run(tmp_path / "run", 5, change=lambda row: row | {NAME: 1.0})
    run = RunFolder(folder)
    run.refresh()
    run.name = NAME
    text = page(encode([run]))
    assert "onerror=" not in text and NAME not in text
    data = re.search(r'<script id="data" type="application/octet-stream">([A-Za-z0-9+/=]+)</script>', text)[1]
    decoded = Decoded(base64.b64decode(data))
    assert decoded.header["runs"][0]["name"] == NAME and NAME in decoded.header["runs"][0]["curves"]


def test_what_was_finite_is_told_of_a_run_that_is_no_longer(tmp_path):
    def change(row):
        return row | {"loss": None, "loss_nonfinite": "nan"} if row["step"] > 12 else row

    (run,) = Decoded(encode(read_runs([write_run(tmp_path / "run", 20, change=change)]))).header["runs"]
    assert run["summary"]["loss"] == next(row["loss"] for row in rows(20) if row["step"] == 12)
    assert run["lost"] == {"loss": 12}
    assert [(e["step"], e["text"]) for e in run["events"]] == [(13, "loss is not finite")], "told once"


def test_a_loss_that_comes_back_and_goes_is_told_twice(tmp_path):
    def change(row):
        return row | {"loss": None, "loss_nonfinite": "nan"} if row["step"] in (3, 4, 8) else row

    (run,) = Decoded(encode(read_runs([write_run(tmp_path / "run", 20, change=change)]))).header["runs"]
    assert [event["step"] for event in run["events"]] == [3, 8] and run["lost"] == {}


def test_runs_of_one_recipe_and_other_seeds_are_a_group(tmp_path):
    folders = [
        write_run(tmp_path / "sweep" / f"{gate}-seed{seed}", 5, seed=seed, gate=gate)
        for gate in ("switch", "gshard")
        for seed in range(3)
    ]
    folders.append(write_run(tmp_path / "again" / "switch-seed0", 5))  # the same numbers twice are no spread
    folders.append(write_run(tmp_path / "unknown", 5, config=False))
    folders.append(write_run(tmp_path / "unknown too", 5, config=False))
    groups = Decoded(encode(read_runs(folders))).header["groups"]
    assert [group["runs"] for group in groups] == [[0, 1, 2], [3, 4, 5], [6], [7], [8]]
    assert [group["name"] for group in groups][1] == "gshard" and len({group["name"] for group in groups}) == 5


@pytest.mark.parametrize("value", [float("nan"), 10**400, {"torch": float("nan")}, [1], None])
def test_what_run_json_should_not_hold_breaks_nothing(tmp_path, value):
    folder = write_run(tmp_path / "run", 3, change=lambda row: row | {"huge": 10**400, "moe/layer_1/huge": -(10**400)})
    told = {"params": value, "versions": value, "world_size": value}
    (folder / "run.json").write_text(json.dumps(told))
    (run,) = Decoded(encode(read_runs([folder]))).header["runs"]
    assert "params" not in run["summary"] and run["summary"]["step"] == 3
