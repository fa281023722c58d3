"""A page in a browser, for tests of the report and of the planner. No test."""

import re

BROWSERS = ("chromium", "chromium-browser", "google-chrome")
FLAGS = ("--headless=new", "--no-sandbox", "--disable-gpu", "--disable-background-networking")
MOST = 150_000  # bytes of a picture in the docs
WIDE, PHONE = {"width": 1280, "height": 900}, {"width": 375, "height": 740}
TIMEOUT = 60_000  # milliseconds, for a machine that does other things too


class Opened:
    """A page, and what it said and asked for meanwhile."""

    def __init__(self, page):
        self.page, self.said, self.asked = page, [], []
        page.set_default_timeout(TIMEOUT)
        page.on("console", lambda message: self.said.append(f"{message.type}: {message.text}"))
        page.on("pageerror", lambda error: self.said.append(f"error: {error}"))
        page.on("request", lambda request: self.asked.append(request.url))

    def goto(self, url):
        self.page.goto(url)
        self.page.wait_for_selector("html[data-ready]")

    def text(self, selector):
        return self.page.inner_text(selector)

    def wait_for(self, selector, text):
        """Until an element's text begins so (waiting for a condition in JavaScript is against the page's policy)."""
        self.page.locator(selector, has_text=re.compile(f"^\\s*{re.escape(text)}")).wait_for()

    def pixels(self, selector):
        """Return the pixels of a canvas."""
        return self.page.eval_on_selector(selector, "canvas => canvas.toDataURL()")

    def card(self, title):
        return self.page.locator(f'[data-plot="{title}"]')

    def drawing(self, title):
        return self.card(title).locator("canvas").evaluate("canvas => canvas.toDataURL()")

    def set(self, selector, value):
        """Moves a slider."""
        self.page.eval_on_selector(
            selector, "(e, value) => { e.value = value; e.dispatchEvent(new Event('input', {bubbles: true})) }", value
        )
        self.page.evaluate("() => new Promise((done) => requestAnimationFrame(() => requestAnimationFrame(done)))")
