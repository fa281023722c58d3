"""The page in a real browser: opened from a file, driven with mouse and keyboard, followed live."""

import json
import re

import pytest
from made_up import event, write_run
from opened import PHONE, WIDE

from pretrain.report.page import write_report

HOSTILE = (
    "__proto__",
    "constructor",
    "toString",
    "hasOwnProperty",
    "</script>",
    "\u202egnol",
    "שלום/loss",
    "a\x1b[31mb\x00",
)


@pytest.fixture(scope="module")
def reports(tmp_path_factory):
    """Two runs that differ, and their reports: of one, and of both."""
    folder = tmp_path_factory.mktemp("runs")
    events = [event(0, "start"), event(30, "save"), event(40, "resume"), event(52, "warning", "something is odd")]

    def change(row):
        return row | {"guard/skipped": 1} if row["step"] == 45 else row

    a = write_run(folder / "switch-8", 60, 2, 8, events=events, change=change)
    b = write_run(folder / "gshard-4", 90, 3, 4, seed=1, gate="gshard", events=[])
    write_report([a], folder / "one.html")
    write_report([a, b], folder / "both.html")
    return folder


def test_one_run(open_page, reports):
    opened = open_page(reports / "one.html")
    assert opened.text("#title") == "switch-8" and opened.page.title().startswith("switch-8 ")
    assert "step 60 of 60" in opened.text("#status")
    titles = opened.page.eval_on_selector_all("[data-plot]:not([hidden])", "cards => cards.map(c => c.dataset.plot)")
    assert {"Training and validation loss", "Learning rate", "Throughput", "By layer", "Drop rate"} <= set(titles)
    assert "Loss scale" not in titles, "nothing is shown of what the run does not have"
    headings = opened.page.eval_on_selector_all("main h2", "all => all.map(heading => heading.textContent)")
    assert headings[:4] == ["Loss", "Numbers", "Routing", "Optimizer"], "the order of docs/report.md"
    numbers = opened.text("#numbers")
    assert "10.4M" in numbers and re.search(r"steps skipped\s+1", numbers)
    events = opened.text("#events")
    assert "something is odd" in events and "skip" in events and "save" not in events
    opened.page.check("#saves")
    assert "save of step 30" in opened.text("#events")
    assert "moe.gate" in opened.text("#recipe")
    opened.page.fill("#find", "train.")
    assert "moe.gate" not in opened.text("#recipe") and "train.steps" in opened.text("#recipe")


@pytest.mark.slow
def test_the_slider_moves_the_heatmap(open_page, reports):
    opened = open_page(reports / "one.html")
    last = opened.pixels("#map")
    assert opened.text("#frame-value") == "step 60"
    opened.set("#frame", "4")
    assert opened.text("#frame-value") == "step 5" and opened.pixels("#map") != last
    assert opened.page.get_attribute("#frame", "aria-valuetext") == "step 5"
    opened.page.focus("#frame")
    fifth = opened.pixels("#map")
    opened.page.keyboard.press("ArrowRight")
    opened.wait_for("#frame-value", "step 6")
    assert opened.pixels("#map") != fifth
    # What a cell is worth, by keyboard and by mouse.
    opened.page.focus("#map")
    opened.page.keyboard.press("ArrowDown")
    opened.page.keyboard.press("ArrowRight")
    assert opened.text("#map-value").startswith("layer 2, expert 1, step 6: ")
    assert opened.page.input_value("#layer") == "1"
    history = opened.pixels("#history")
    opened.page.select_option("#layer", "0")
    assert opened.pixels("#history") != history
    opened.page.hover("#history", position={"x": 200, "y": 20})
    assert re.match(r"layer 1, expert 0, step \d+: [\d.]+ \S an even share", opened.text("#map-value"))
    opened.set("#frame", "55")
    opened.page.click("#play")
    opened.wait_for("#frame-value", "step 60")
    assert opened.page.get_attribute("#play", "aria-pressed") == "false", "it ends by itself"


def test_the_heatmap_shows_the_load(open_page, tmp_path):
    """One expert has all, the others nothing: by colour and in words."""

    def change(row):
        return row | {"moe/layer_1/load": [0.0, 0.0, 1.0, 0.0]} if row["step"] else row

    write_report([write_run(tmp_path / "run", 3, 1, change=change)], tmp_path / "x.html")
    opened = open_page(tmp_path / "x.html")
    colours = opened.page.eval_on_selector(
        "#map",
        """canvas => { const { labels, cellWidth, cellHeight } = canvas.place; const r = devicePixelRatio;
        const copy = new OffscreenCanvas(canvas.width, canvas.height).getContext('2d', { willReadFrequently: true });
        copy.drawImage(canvas, 0, 0);
        return [0, 1, 2, 3].map((e) => [...copy.getImageData(
            (labels + (e + 0.2) * cellWidth) * r, 0.2 * cellHeight * r, 1, 1).data]) }""",
    )
    assert colours[0] == colours[1] == colours[3] == [0xC2, 0x18, 0x7A, 255]
    red, green, blue, _ = colours[2]
    assert red > 180 > green > blue
    opened.page.focus("#map")
    opened.page.keyboard.press("ArrowRight")
    assert opened.text("#map-value").endswith("dead: no token")
    opened.page.keyboard.press("ArrowRight")
    assert "(100 % of the assignments)" in opened.text("#map-value")


def test_runs_are_compared(open_page, reports):
    opened = open_page(reports / "both.html")
    assert opened.text("#title") == "2 runs"
    readout = opened.card("Training and validation loss").locator(".readout")
    assert all(name in readout.inner_text() for name in ("switch-8 training", "gshard-4 validation"))
    assert opened.page.locator("#final tbody tr").count() > 10
    # Only what differs, to begin with.
    assert opened.page.is_checked("#differing")
    rows = opened.page.locator("#recipe tbody tr")
    assert "moe.gate" in opened.text("#recipe") and "model.kind" not in opened.text("#recipe")
    assert rows.count() == opened.page.locator("#recipe tr.differs").count() > 3
    opened.page.uncheck("#differing")
    assert "model.kind" in opened.text("#recipe")
    # Hide one, by keyboard, and show it again.
    both = opened.drawing("Training and validation loss")
    opened.page.locator("#runs button").nth(1).focus()
    opened.page.keyboard.press("Enter")
    assert "gshard-4" not in readout.inner_text() and opened.drawing("Training and validation loss") != both
    assert opened.page.locator("#runs button").nth(1).get_attribute("aria-pressed") == "false"
    opened.page.keyboard.press("Enter")
    assert "gshard-4" in readout.inner_text()
    # Each run's routing, of other layers and experts.
    widths = [opened.page.eval_on_selector("#map", "c => [c.place.columns, c.place.rows]")]
    opened.page.select_option("#routing-run", "1")
    widths.append(opened.page.eval_on_selector("#map", "c => [c.place.columns, c.place.rows]"))
    assert widths == [[8, 2], [4, 3]]


def test_axes_scales_smoothing_and_zoom(open_page, reports):
    opened = open_page(reports / "one.html")
    loss, title = opened.page, "Training and validation loss"
    readout = opened.card(title).locator(".readout")
    plain = opened.drawing(title)
    opened.card(title).get_by_role("button", name="logarithmic axis").click()
    logarithmic = opened.drawing(title)
    assert logarithmic != plain
    opened.set("#smoothing", "4")
    assert opened.text("#smoothing-value") == "20 steps" and opened.drawing(title) != logarithmic
    opened.set("#smoothing", "0")
    assert opened.drawing(title) == logarithmic
    body = opened.card(title).locator(".u-over")
    for axis, unit in (("tokens", "tokens"), ("time", "ms|s"), ("step", "step")):
        loss.check(f'input[name="axis"][value="{axis}"]', force=True)
        body.hover(position={"x": 300, "y": 100})
        assert re.search(unit, readout.inner_text())
    assert re.search(r"step \d+", readout.inner_text())
    # Drag to zoom, in all charts; a button shows the whole run again.
    before, norm = opened.drawing(title), opened.drawing("Gradient norm")
    box = body.bounding_box()
    loss.mouse.move(box["x"] + 300, box["y"] + 100)
    loss.mouse.down()
    loss.mouse.move(box["x"] + 600, box["y"] + 120, steps=5)
    loss.mouse.up()
    assert opened.drawing(title) != before and opened.drawing("Gradient norm") != norm
    loss.click("#reset")
    loss.mouse.move(5, 5)
    assert opened.drawing("Gradient norm") == norm and loss.is_hidden("#reset")
    # The cursor by keyboard, and marks on and off.
    opened.card(title).locator(".plot").focus()
    loss.keyboard.press("End")
    assert readout.inner_text().startswith("step 60")
    marked = opened.drawing("Gradient norm")
    loss.uncheck("#marks")
    assert opened.drawing("Gradient norm") != marked


def test_an_event_is_read_on_the_curve(open_page, reports):
    opened = open_page(reports / "one.html")
    card = opened.card("Gradient norm")
    over = card.locator(".u-over")
    over.hover(position={"x": over.bounding_box()["width"] * 45 / 60, "y": 60})
    assert "skip the step was skipped by a guard" in card.locator(".readout").inner_text()


def test_all_of_it_is_reached_by_keyboard_and_has_a_name(open_page, reports):
    opened = open_page(reports / "both.html")
    reached = set()
    for _ in range(120):
        opened.page.keyboard.press("Tab")
        what = opened.page.evaluate(
            """() => { const e = document.activeElement; const s = getComputedStyle(e);
            const seen = e.matches('.choice input') ? getComputedStyle(e.nextElementSibling) : s;
            const name = e.getAttribute('aria-label') || e.labels?.[0]?.textContent || e.textContent;
            return [e.id || e.name || e.className || e.tagName, seen.outlineStyle, (name || '').trim().length] }"""
        )
        if what[0] == "BODY":
            break
        assert what[1] != "none", f"{what[0]} has the focus, and nobody sees it"
        assert what[2], f"{what[0]} has no name"
        reached.add(what[0])
    names = "axis smoothing marks theme frame play map history layer routing-run plot layer-metric saves differing find"
    assert set(names.split()) <= reached


def test_dark_and_light(open_page, reports):
    opened = open_page(reports / "one.html", color_scheme="dark")
    background = "() => getComputedStyle(document.body).backgroundColor"
    dark, drawn = opened.page.evaluate(background), opened.drawing("Gradient norm")
    assert dark == "rgb(16, 19, 23)"
    opened.page.check('input[name="theme"][value="light"]', force=True)
    assert opened.page.evaluate(background) == "rgb(246, 247, 249)" and opened.drawing("Gradient norm") != drawn
    opened.page.check('input[name="theme"][value="auto"]', force=True)
    assert opened.page.evaluate(background) == dark
    opened.page.emulate_media(color_scheme="light")
    assert opened.page.evaluate(background) == "rgb(246, 247, 249)"


def test_on_a_phone_nothing_is_wider_than_the_screen(open_page, reports):
    opened = open_page(reports / "both.html", viewport=PHONE, device_scale_factor=2, has_touch=True)
    width = opened.page.evaluate("document.documentElement.scrollWidth")
    assert width <= PHONE["width"]
    for selector in ("#map", "#history", ".plot canvas"):
        box = opened.page.locator(selector).first.bounding_box()
        assert box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]
        assert box["width"] > 250
    for selector in ("#final tbody th", "#recipe tbody th"):  # a column of letters is no text
        box = opened.page.locator(selector).first.bounding_box()
        assert box["width"] > 120 and box["height"] < 60
    opened.page.set_viewport_size(WIDE)
    opened.page.wait_for_timeout(300)
    assert opened.page.locator("#loss canvas").bounding_box()["width"] > 1000


NAME = "</script><img src=x onerror=document.title='owned'>"


def test_names_do_nothing(open_page, tmp_path):
    """Two folders that differ above their last part are named with a slash: `a</script>...`."""
    runs = []
    for first in ("a<", "b<"):
        folder = tmp_path / first / NAME.removeprefix("</")
        events = [event(3, "warning", NAME)]
        runs.append(write_run(folder, 5, events=events, change=lambda row: row | {NAME: 1.0}))
        (folder / "config.toml").write_text(f'[run]\nfolder = "{NAME}{first}"\n')
    write_report(runs, tmp_path / "x.html")
    opened = open_page(tmp_path / "x.html")
    shown = opened.text("#runs"), opened.text("#events"), opened.text("#recipe"), opened.text("#other")
    assert all(NAME in text for text in shown)
    assert opened.card("Training and validation loss").locator(".readout").inner_text().startswith(f"a{NAME}")
    assert opened.page.locator("img").count() == 0 and opened.page.title() != "owned"
    assert opened.page.title().startswith(f"a{NAME}, b{NAME}")


@pytest.mark.slow
def test_runs_that_are_short_dense_or_lost(open_page, tmp_path):
    folders = [
        write_run(tmp_path / "one step", 1, config=False),
        write_run(tmp_path / "dense", 20, layers=0, events=[]),
        write_run(tmp_path / "t5", 20, layers=4, kind="t5"),
        write_run(tmp_path / "lost", 8, change=lambda r: r | {"loss": None, "loss_nonfinite": "nan"}),
    ]
    write_report(folders, tmp_path / "all.html")
    opened = open_page(tmp_path / "all.html")
    assert "one step training" in opened.card("Training and validation loss").inner_text()
    assert opened.page.locator("#routing-run option").all_inner_texts() == ["one step", "t5", "lost"]
    write_report([folders[1]], tmp_path / "dense.html")
    opened = open_page(tmp_path / "dense.html")
    assert opened.page.is_hidden("#routing-section") and opened.page.is_visible("#loss canvas")


@pytest.mark.slow
@pytest.mark.parametrize("steps", [60, 3000])
def test_a_run_that_became_nan_shows_what_was_finite(open_page, tmp_path, steps):
    lost = steps // 2

    def change(row):
        if row["step"] <= lost:
            return row
        gone = [key for key in row if key.endswith(("loss", "grad_norm", "entropy"))]
        return row | {key: None for key in gone} | {f"{key}_nonfinite": "nan" for key in gone}

    write_report([write_run(tmp_path / "run", steps, change=change)], tmp_path / "x.html")
    opened = open_page(tmp_path / "x.html")
    number = f"{lost:,}"
    for title in ("Training and validation loss", "Gradient norm", "Router entropy", "By layer"):
        readout = opened.card(title).locator(".readout").inner_text()
        assert re.search(rf"\d\.\d+ at step {number}, then not finite", readout), readout
    numbers = opened.text("#numbers")
    assert re.search(rf"training loss, last\s+\d\.\d{{4}}\s+at step {number}, then not finite", numbers)
    assert opened.page.locator("#events tbody tr").count() <= 2, "not one for each step"


@pytest.mark.slow
def test_metrics_and_keys_of_any_name_are_drawn(open_page, tmp_path):
    """Also beside a run that lacks them, in layers, in the recipe, in run.json."""

    def change(row):
        own = {name: 1.0 + row["step"] for name in HOSTILE} | {
            f"moe/layer_1/{n}": 2.0 for n in ("__proto__", "constructor")
        }
        return row | own

    odd = write_run(tmp_path / "odd", 6, change=change, events=[event(3, "warning", HOSTILE[-1])])
    with (odd / "config.toml").open("a") as more:
        more.write("".join(f"{json.dumps(name)} = 1\n" for name in ("__proto__", "constructor", "toString")))
    (odd / "run.json").write_text(json.dumps({"versions": {"__proto__": "1", "constructor": "2"}}))
    write_report([odd, write_run(tmp_path / "plain", 6)], tmp_path / "x.html")
    opened = open_page(tmp_path / "x.html")
    titles = opened.page.eval_on_selector_all(
        "#other [data-plot]:not([hidden])", "cards => cards.map(c => c.dataset.plot)"
    )
    assert sorted(titles) == sorted(HOSTILE)
    for index in range(len(titles)):
        assert opened.page.locator("#other .readout").nth(index).inner_text() == "odd 7"
    for name in ("__proto__", "constructor"):
        opened.page.select_option("#layer-metric", name)
        assert "layer 1 2" in opened.card("By layer").locator(".readout").inner_text()
    recipe = opened.text("#recipe")
    assert re.search(r"__proto__\s+1\s+\u2013", recipe) and re.search(r"constructor\s+1\s+\u2013", recipe)
    assert "a\\u001b[31mb\\u0000" in opened.text("#events")
    heads = opened.page.locator("#other h3").all_inner_texts()
    assert "\\u202egnol" in heads and "a\\u001b[31mb\\u0000" in heads
