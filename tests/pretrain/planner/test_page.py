"""The page of a plan: its text without a browser, and its content in one."""

import base64
import json
import re
import subprocess
import sys
import zlib

import pytest

from pretrain.planner.page import page, write_page
from pretrain.report.page import policy

NAME = "</script><img src=x onerror=document.title='owned'>"
COLUMNS = {"tensor": "TP", "virtual_pipeline": "VPP", "shard": "shard"}
FITTING = 12
DEVICE = 80e9


def tried(number):
    """A split; the later ones need more memory, and the last three do not fit. Every other one is slow."""
    seconds = 10 - number / 2 if number % 2 == 0 else 20.0
    size = 10e9 + 6e9 * number
    split = {"tensor": number + 1, "virtual_pipeline": None, "shard": "optimizer"}
    return {"split": split, "seconds": seconds, "bytes": size, "fits": size <= DEVICE}


def made_up(name="tiny", routing=None, price=None):
    """Values of a plan, as `pretrain.planner.splits` makes them, with 15 splits."""
    splits = [tried(number) for number in range(FITTING + 3)]
    fitting = sorted((one for one in splits if one["fits"]), key=lambda one: one["seconds"])
    plans = [
        {
            "split": one["split"] | {"data": 4},
            "seconds": one["seconds"],
            "tokens_per_second": 1e6 / one["seconds"],
            "mfu": 0.4,
            "bytes": one["bytes"],
            "memory": {"weights": 0.25 * one["bytes"], "activations": 0.75 * one["bytes"], "margin": 0},
            "terms": {"gemm": 0.2 * one["seconds"], "exchange": 0.8 * one["seconds"]},
            "limit": "exchange",
            "days": 3.0,
            "cost": price,
            "currency": None if price is None else "EUR",
        }
        for one in fitting[:10]
    ]
    return {
        "recipe": name,
        "cluster": {"name": f"cluster of {name}", "source": "made up", "memory": DEVICE},
        "ranks": 8,
        "tokens": 2e9,
        "routing": {"p50": 1.25, "p99": 2, "max": 3, "placed": 1.125, "dropped": 0.25} if routing is None else routing,
        "plans": plans,
        "neighbors": [{"change": "tensor=1 -> 2", "why": "+3.0% time"}, {"change": "shard=none", "why": name}],
        "tried": splits,
        "columns": COLUMNS,
    }


@pytest.fixture
def written(tmp_path):
    """``written(**of made_up)`` writes the page and returns its path."""

    def write(**options):
        write_page(made_up(**options), tmp_path / "plan.html")
        return tmp_path / "plan.html"

    return write


def test_the_page_needs_nothing_else_and_may_do_nothing_else():
    text = page(made_up())
    style = re.search(r"<style>(.*?)</style>", text, re.S)[1]
    script = re.search(r"<script>(.*?)</script>", text, re.S)[1]
    rules = policy(style, script, live=False)
    assert f'http-equiv="Content-Security-Policy" content="{rules}"' in text
    assert "connect-src 'none'" in rules
    assert "://" not in text
    assert not re.search(r"<(link|img|iframe|object|embed|base)\b|\bsrc=|@import|url\(|\{\{", text.replace(script, ""))
    assert not re.search(r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(|new Function", script)


def decoded(text):
    data = re.search(r'<script id="data" type="application/octet-stream">([A-Za-z0-9+/=]+)</script>', text)[1]
    return json.loads(zlib.decompress(base64.b64decode(data)))


def test_all_values_are_in_the_payload_and_none_is_markup():
    values = made_up(name=NAME)
    text = page(values)
    assert NAME not in text and "onerror=" not in text
    assert decoded(text) == values


def test_the_command_writes_what_it_prints(tmp_path):
    path = tmp_path / "plan.html"
    command = f"plan quickstart --cluster h100-8 --ranks 2 --seconds 1 --json --html {path}"
    done = subprocess.run(
        [sys.executable, "-m", "fmoe", *command.split()], capture_output=True, text=True, check=True, timeout=300
    )
    values = decoded(path.read_text())
    columns = values.pop("columns")
    assert values == json.loads(done.stdout)
    assert set(columns) == set(values["plans"][0]["split"])


def rows(opened, selector):
    """Texts of a table's cells, without its head."""
    return opened.page.eval_on_selector_all(
        f"{selector} tbody tr", "rows => rows.map(row => [...row.cells].map(cell => cell.textContent))"
    )


def test_content(open_page, written):
    opened = open_page(written())
    assert opened.text("#title") == "tiny"
    assert "8 ranks of cluster of tiny" in opened.text("#status") and "2G tokens" in opened.text("#status")
    assert "made up" in opened.text("#source")
    assert "median 1.25, 99th percentile 2, maximum 3" in opened.text("#loads") and "25 %" in opened.text("#loads")
    best = rows(opened, "#best")
    assert len(best) == 10
    assert best[0][:5] == ["1", "11", "1", "optimizer", "5 s"] and "cost" not in opened.text("#best")
    assert [row[:3] for row in rows(opened, "#terms")] == [["exchange", "4 s", "80 %"], ["gemm", "1 s", "20 %"]]
    assert [row[0] for row in rows(opened, "#memory")] == ["activations", "weights"], "what needs memory, by size"
    widths = opened.page.eval_on_selector_all("#terms .part", "bars => bars.map(bar => bar.clientWidth)")
    assert widths[0] > 100 and widths[1] == pytest.approx(widths[0] / 4, abs=1)
    assert rows(opened, "#neighbors") == [["tensor=1 -> 2", "+3.0% time"], ["shard=none", "tiny"]]


def test_points(open_page, written):
    opened = open_page(written())

    def places(selector):
        pairs = opened.page.eval_on_selector_all(
            f"#plot {selector}", "all => all.map(one => [one.cx.baseVal.value, one.cy.baseVal.value])"
        )
        return [tuple(pair) for pair in pairs]

    assert len(places("circle")) == FITTING + 3
    limit = opened.page.eval_on_selector("#plot line.limit", "line => line.x1.baseVal.value")
    assert len(places("circle.fits")) == FITTING and all(x < limit for x, _ in places("circle.fits"))
    assert all(x > limit for x, _ in places("circle:not(.fits)"))
    # The even ones get faster with more memory; the odd ones are slower than all of them.
    assert places("circle.front") == places("circle.fits")[::2]
    line = opened.page.eval_on_selector("#plot polyline", "line => [...line.points].map(point => [point.x, point.y])")
    assert line == [pytest.approx(place) for place in places("circle.front")]
    assert places("circle.best") == places("circle.front")[-1:], "the fastest that fits"
    heights = [y for _, y in places("circle.front")]
    assert heights == sorted(heights, reverse=True), "faster is further up"


def test_a_point_is_read_by_mouse_and_by_keyboard(open_page, written):
    opened = open_page(written())
    assert opened.text("#point").startswith("TP 11, VPP 1, shard optimizer"), "the best at first"
    opened.page.hover("#plot circle >> nth=0")
    assert opened.text("#point").startswith("TP 1, VPP 1") and "10 s per step" in opened.text("#point")
    opened.page.focus("#plot circle.chosen")
    opened.page.keyboard.press("ArrowRight")
    assert opened.text("#point").startswith("TP 2, ")
    opened.page.keyboard.press("End")
    assert opened.text("#point").startswith("TP 15, ") and "does not fit" in opened.text("#point")
    assert opened.page.evaluate("document.activeElement.getAttribute('aria-label')").startswith("TP 15, ")
    opened.page.keyboard.press("ArrowRight")
    assert opened.text("#point").startswith("TP 15, "), "no further than the last"


def test_hostile_names_are_text(open_page, written):
    opened = open_page(written(name=NAME))
    assert opened.text("#title") == NAME and opened.page.title().startswith(NAME)
    assert NAME in opened.text("#status") and rows(opened, "#neighbors")[1][1] == NAME
    assert opened.page.locator("img").count() == 0


def test_a_dense_model_with_a_price(open_page, written):
    opened = open_page(written(routing={}, price=1234.5))
    assert not opened.page.is_visible("#loads")
    assert rows(opened, "#best")[0][-1] == "1,235 EUR"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_phone_in_both_themes(open_page, written, scheme):
    opened = open_page(written(), viewport={"width": 375, "height": 740}, color_scheme=scheme)
    assert opened.page.evaluate("document.documentElement.scrollWidth") == 375
    background = opened.page.evaluate("getComputedStyle(document.body).backgroundColor")
    assert (sum(map(int, re.findall(r"\d+", background))) > 382) == (scheme == "light")
