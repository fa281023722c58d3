"""The picture of docs/planner.md, of a plan of half a minute:
``PYTHONPATH=.:tests/pretrain python tests/pretrain/planner/pictures.py``."""

import shutil
import tempfile
from pathlib import Path

from opened import BROWSERS, FLAGS, MOST
from playwright.sync_api import sync_playwright

from pretrain.planner.cli import main as plan

PICTURE = Path(__file__).parents[3] / "docs" / "planner-page.png"


def main() -> None:
    """Writes ``docs/planner-page.png``."""
    browser = next(filter(None, map(shutil.which, BROWSERS)))
    with tempfile.TemporaryDirectory() as temporary, sync_playwright() as playwright:
        path = Path(temporary) / "plan.html"
        plan(["mixtral-8x7b", "--cluster", "h100-256", "--html", str(path)])
        chromium = playwright.chromium.launch(executable_path=browser, args=list(FLAGS))
        page = chromium.new_page(viewport={"width": 1180, "height": 1090}, color_scheme="light")
        page.goto(path.as_uri())
        page.wait_for_selector("html[data-ready]")
        page.wait_for_timeout(300)
        size = len(page.screenshot(path=PICTURE))
        print(f"{PICTURE}: {size:,} bytes")
        assert size < MOST
        chromium.close()


if __name__ == "__main__":
    main()
