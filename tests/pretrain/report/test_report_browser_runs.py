"""The page in a real browser: many runs, no step, ten thousand steps, and a run that goes on."""

import json
import re
import threading
from contextlib import contextmanager

import patience
import pytest
from made_up import event, write_run

from pretrain.report.live import make_server
from pretrain.report.page import page, write_report
from pretrain.report.payload import encode
from pretrain.report.runs import open_runs


@pytest.fixture(scope="module")
def sweep(tmp_path_factory):
    """The report of 50 runs: 10 recipes with 5 seeds each."""
    folder = tmp_path_factory.mktemp("sweep")
    runs = []
    for number in range(50):
        kind, seed = divmod(number, 5)
        run = write_run(
            folder / f"kind{kind}-seed{seed}",
            30,
            seed=number % 7,
            change=lambda r, kind=kind: r | {"kind": float(9 - kind)},
        )
        text = (run / "config.toml").read_text()
        text = re.sub(r"seed = \d+", f"seed = {seed}", text) + f"global_batch = {8 + kind}\n"
        (run / "config.toml").write_text(text)
        runs.append(run)
    write_report(runs, folder / "sweep.html")
    return folder / "sweep.html"


@pytest.mark.slow
def test_fifty_runs_are_grouped_by_seed(open_page, sweep):
    opened = open_page(sweep)
    chips, rows = opened.page.locator("#runs button"), opened.page.locator("#final tbody tr")
    assert chips.count() == 10 and chips.first.inner_text() == "kind0 (5 seeds)" and rows.count() == 10
    assert opened.text("#status").endswith("and 46 more")
    together = opened.drawing("Gradient norm")
    first = rows.first.locator("td").nth(2).inner_text()
    mean, low, high = map(float, re.fullmatch(r"([\d.]+)\s+([\d.]+) \S ([\d.]+)", first.strip()).groups())
    assert low < mean < high
    opened.page.uncheck("#together")
    assert chips.count() == rows.count() == 50 and opened.drawing("Gradient norm") != together
    # Among so many curves the one at the cursor is named.
    card = opened.card("Gradient norm")
    assert card.locator(".readout").inner_text().startswith("50 curves")
    card.locator(".u-over").hover(position={"x": 100, "y": 80})
    assert len(re.findall(r"kind\d-seed\d", card.locator(".readout").inner_text())) == 1
    opened.page.check("#together")
    opened.page.mouse.move(5, 5)
    assert opened.drawing("Gradient norm") == together


@pytest.mark.slow
def test_fifty_runs_are_sorted_and_hidden(open_page, sweep):
    opened = open_page(sweep)
    opened.page.uncheck("#together")
    losses = opened.page.locator("#final tbody tr td:nth-child(4)")
    head = opened.page.locator("#final thead button", has_text="training loss, last")

    def shown():
        return [float(text) for text in losses.all_inner_texts()]

    assert shown() != sorted(shown())
    head.focus()
    opened.page.keyboard.press("Enter")
    assert shown() == sorted(shown()) and len(shown()) == 50
    assert opened.page.locator('#final th[aria-sort="ascending"]').inner_text() == "training loss, last ▲".removesuffix(
        " ▲"
    )
    opened.page.keyboard.press("Enter")  # the focus is where it was
    assert shown() == sorted(shown(), reverse=True)
    opened.page.locator("#final thead button", has_text=re.compile("^run$")).click()
    names = opened.page.locator("#final tbody th").all_inner_texts()
    assert [name.strip() for name in names] == sorted(name.strip() for name in names)
    # Part of a name, and all that have it are hidden or shown.
    opened.page.click("#hide-runs")
    assert opened.page.is_hidden("#loss canvas") and losses.count() == 0
    opened.page.fill("#find-runs", "KIND3")
    assert opened.page.locator("#runs li:not([hidden])").count() == 5
    opened.page.click("#show-runs")
    assert [name.strip() for name in opened.page.locator("#runs [aria-pressed=true]").all_inner_texts()] == [
        f"kind3-seed{seed}" for seed in range(5)
    ]
    assert opened.card("Training and validation loss").is_visible()
    opened.page.fill("#find-runs", "")
    opened.page.click("#show-runs")
    assert losses.count() == 50


def test_a_run_without_a_step_has_a_page(open_page, tmp_path):
    folder = write_run(tmp_path / "run", 3, events=[event(0, "error", "the loss is not finite")])
    (folder / "metrics.jsonl").write_text("")
    write_report([folder], tmp_path / "x.html", False)
    opened = open_page(tmp_path / "x.html")
    assert "no step yet" in opened.text("#status") and "the loss is not finite" in opened.text("#events")
    assert "moe.gate" in opened.text("#recipe") and opened.page.is_hidden("#loss canvas")


@pytest.mark.slow
def test_ten_thousand_steps_open_in_two_seconds(open_page, big_run, tmp_path):
    (tmp_path / "big.html").write_text(page(encode([big_run])))
    limit = patience.within(2)
    opened = open_page(tmp_path / "big.html")
    # From the start of the navigation until all is drawn.
    seconds = float(opened.page.get_attribute("html", "data-ready")) / 1000
    print(f"open after {seconds:.2f} s, limit {limit:.2f} s")
    assert 0 < seconds < limit
    assert opened.page.eval_on_selector("#map", "c => [c.place.columns, c.place.rows]") == [128, 24]
    before = opened.pixels("#map")
    opened.set("#frame", "0")
    assert opened.text("#frame-value").startswith("steps 1") and opened.pixels("#map") != before


@contextmanager
def served(folder):
    with make_server(open_runs([folder]), 0) as server:
        thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/"
        finally:
            server.shutdown()
            thread.join()


@pytest.mark.slow
def test_live_it_follows_a_file_that_grows(open_page, tmp_path):
    folder = write_run(tmp_path / "run", 5)
    with served(folder) as url:
        opened = open_page(url)
        opened.wait_for("#status", "live: step 5")
        before = opened.drawing("Training and validation loss")
        opened.set("#frame", "1")
        load = [0.7, 0.1, 0.1, 0.1]
        with (folder / "metrics.jsonl").open("a") as more:
            row = {"step": 6, "loss": 1.5, "tokens": 6 * 4096, "step_seconds": 0.1, "brand/new": 1.0}
            more.write(json.dumps(row | {"moe/layer_1/load": load, "moe/layer_2/load": load}) + "\n")
        opened.wait_for("#status", "live: step 6")
        assert opened.drawing("Training and validation loss") != before
        assert opened.text("#frame-value") == "step 2", "who looks at a step keeps it"
        assert opened.page.get_attribute("#frame", "max") == "5"
        assert opened.card("brand/new").is_visible(), "a metric that was not there has a chart now"
        with (folder / "metrics.jsonl").open("a") as more:
            more.write("broken\n")
        opened.wait_for("#status", "no longer live: ")
        assert "line 8" in opened.text("#status")
        opened.said = [said for said in opened.said if "status of 500" not in said]
