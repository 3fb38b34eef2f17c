"""A real browser, and pages that report what must not happen."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

import pytest

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

EXECUTABLES = {
    "chromium": ("chromium", "chromium-browser", "google-chrome"),
    "firefox": ("firefox-esr", "firefox"),
}
# A stock Firefox, over WebDriver BiDi, which emulates no media: it is without motion, dark (or light) and with the
# scrollbars of a phone in all tests.
FIREFOX = {
    "ui.prefersReducedMotion": 1,
    "ui.useOverlayScrollbars": 1,
    "widget.gtk.overlay-scrollbars.enabled": True,
}
FRAMES = 2000
BROWSERS = ("chromium", pytest.param("firefox", marks=pytest.mark.long))


@contextmanager
def open_browser(name: str = "chromium") -> Iterator[Browser]:
    """Chromium or Firefox ("firefox", "firefox light") without a window; skips the test where there is none."""
    name, _, theme = name.partition(" ")
    playwright = pytest.importorskip("playwright.sync_api", reason="needs the package playwright")
    executable = next(filter(None, map(shutil.which, EXECUTABLES[name])), None)
    if executable is None:
        pytest.skip(f"needs a browser: one of {', '.join(EXECUTABLES[name])}")
    prefs = {**FIREFOX, "ui.systemUsesDarkTheme": int(theme != "light")}
    with playwright.sync_playwright() as driver:
        if name == "firefox":
            browser = driver.firefox.launch(executable_path=executable, channel="moz-firefox", firefox_user_prefs=prefs)
        else:
            browser = driver.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        yield browser
        browser.close()


def wait_for(page: Page, expression: str) -> Any:
    """Wait until JavaScript is true in a frame that the page draws, if only in one; what it gives there.

    Frames are counted, not seconds, for a busy machine draws few. The page's policy forbids Playwright's own function.
    """
    look = f"(look = () => ({expression}) || !frames-- ? done({expression}) : requestAnimationFrame(look))()"
    found = page.evaluate(f"new Promise(done => {{ let look, frames = {FRAMES}; {look} }})")
    assert found, f"{expression} did not come in {FRAMES} frames: {page.inner_text('body')}"
    return found


def giving_key(key: str) -> str:
    """A script that gives the page a key before it starts, if it has none."""
    keys = json.dumps(json.dumps([{"name": "", "value": key, "remembers": True}]))
    return f"if (location.host && !sessionStorage['kvllm-keys']) sessionStorage['kvllm-keys'] = {keys};"


@contextmanager
def watched_page(
    browser: Browser, url: str, *, path: str = "/", key: str | None = None, **options: Any
) -> Iterator[Page]:
    """The page at `url` and `path` in a context of its own, with an API key in its storage. After the test, fails if
    the console had an error or a request went to another host."""
    context = browser.new_context(**options)
    page = context.new_page()
    page.set_default_timeout(60_000)
    errors: list[str] = []
    page.on("console", lambda message: errors.append(message.text) if message.type == "error" else None)
    page.on("pageerror", lambda error: errors.append(str(error)))
    foreign: list[str] = []
    page.on("request", lambda request: None if request.url.startswith(url) else foreign.append(request.url))
    if key is not None:
        context.add_init_script(giving_key(key))
    page.goto(url + path)
    yield page
    context.close()
    assert not errors and not foreign, (errors, foreign)
