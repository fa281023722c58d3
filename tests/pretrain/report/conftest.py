"""The longest run, and a browser where there is one."""

import shutil

import pytest
from made_up import replayed
from opened import WIDE, Opened

from pretrain.report.runs import RunFolder

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking")


@pytest.fixture(scope="session")
def big_run(tmp_path_factory) -> RunFolder:
    """10,000 steps, 24 layers, 128 experts; no file, which would be of 700 MB."""
    run = RunFolder(tmp_path_factory.mktemp("runs"))
    for row in replayed(10_000, 24, 128):
        run.record.add(row)
    run.name = "big"
    return run


@pytest.fixture(scope="session")
def browser():
    """A headless Chromium; skips where none is installed."""
    playwright = pytest.importorskip("playwright.sync_api", reason="playwright is not installed")
    path = next(filter(None, map(shutil.which, BROWSERS)), None)
    if path is None:
        pytest.skip(f"no browser: none of {', '.join(BROWSERS)} is installed")
    with playwright.sync_playwright() as started:
        chromium = started.chromium.launch(executable_path=path, args=list(FLAGS))
        yield chromium
        chromium.close()


@pytest.fixture
def open_page(browser):
    """``open_page(path or url, **of the browser's context) -> Opened``; at the end nothing was said on the console, and
    no file was asked for but the page itself."""
    opened, contexts = [], []

    def go(where, **options):
        context = browser.new_context(**{"viewport": WIDE, "color_scheme": "light", **options})
        contexts.append(context)
        one = Opened(context.new_page())
        opened.append(one)
        one.goto(where if isinstance(where, str) else where.as_uri())
        return one

    yield go
    for one in opened:
        assert one.said == []
        assert not [url for url in one.asked if not url.startswith(("file://", "http://127.0.0.1:", "blob:"))]
        assert sum(url.startswith("file:") for url in one.asked) <= 1
    for context in contexts:
        context.close()
