"""The pictures of docs/report.md, of runs that are made up unless some are given:
``PYTHONPATH=.:tests/pretrain python tests/pretrain/report/pictures.py [RUN ...]``."""

import shutil
import sys
import tempfile
from pathlib import Path

from made_up import event, write_run
from opened import BROWSERS, FLAGS, MOST
from playwright.sync_api import sync_playwright

from pretrain.report import write_report

DOCS = Path(__file__).parents[3] / "docs"


def made_up(folder: Path) -> list[Path]:
    events = [event(step, "save") for step in range(100, 601, 100)]
    resumed = [*events[:3], event(300, "resume", "from checkpoints/step-00000300"), *events[3:]]
    skip = {430: {"guard/skipped": 1, "grad_norm": 9.0}}

    def seldom(row):
        return {key: value for key, value in row.items() if key != "val/loss" or row["step"] % 50 == 0}

    runs = {
        "switch-16": {
            "layers": 8,
            "experts": 16,
            "events": resumed,
            "change": lambda r: seldom(r) | skip.get(r["step"], {}),
        },
        "gshard-16": {"layers": 8, "experts": 16, "events": events, "seed": 3, "gate": "gshard", "change": seldom},
    }
    return [write_run(folder / name, 600, **options) for name, options in runs.items()]


def main(runs: list[Path]) -> None:
    """Writes ``docs/report-*.png``."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        path = Path(temporary) / "report.html"
        write_report(runs or made_up(Path(temporary)), path)
        chromium = playwright.chromium.launch(executable_path=browser, args=list(FLAGS))
        for name, width, height, scheme, part in (
            ("light", 1180, 900, "light", ".top"),
            ("routing", 1180, 760, "dark", "#routing-section"),
            ("phone", 375, 720, "light", ".top"),
        ):
            page = chromium.new_page(viewport={"width": width, "height": height}, color_scheme=scheme)
            page.goto(path.as_uri())
            page.wait_for_selector("html[data-ready]")
            page.evaluate("part => document.querySelector(part).scrollIntoView()", part)
            if part != ".top":
                page.evaluate("() => { document.getElementById('bar').style.position = 'static'; }")
            page.wait_for_timeout(300)
            picture = DOCS / f"report-{name}.png"
            size = len(page.screenshot(path=picture))
            print(f"{picture}: {size:,} bytes")
            assert size < MOST
        chromium.close()


if __name__ == "__main__":
    main([Path(run) for run in sys.argv[1:]])
