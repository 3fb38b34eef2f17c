"""Screenshots of the live page for the docs, while clients ask the model in the package for problems.

    python -m benchmarks.page_screenshots

It needs Chromium and the package playwright. The pictures show the page on a desktop and on a phone, light and dark,
and one request opened. They go to docs/page-*.png.
"""

from __future__ import annotations

import json
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from benchmarks.common import command_line
from benchmarks.reasoner.tasks import make_problem

DOCS = Path(__file__).parents[1] / "docs"
COMPRESSION = "method=kara_sharp,policy=pressure,period=32,window_blocks=16,retain_blocks=4,buffer=32,chunk_budget=8"
ENGINE = "--block-size 16 --num-gpu-blocks-override 900 --max-num-seqs 24 --port 0 --shutdown-timeout 0"
KEYS = ("alice", "bob", "carol")
CLIENTS = 18
COLOURS = 128
"""Of a picture's palette: a page has few, and the file becomes a third as large."""
VIEWS = {
    "desktop-light": {"viewport": {"width": 1280, "height": 1800}, "color_scheme": "light"},
    "desktop-dark": {"viewport": {"width": 1280, "height": 1800}, "color_scheme": "dark"},
    "phone-light": {"viewport": {"width": 390, "height": 1500}, "color_scheme": "light"},
    "phone-dark": {"viewport": {"width": 390, "height": 1500}, "color_scheme": "dark"},
}


@contextmanager
def run_server(folder: Path) -> Iterator[str]:
    """A server with a few keys; yields its address."""
    keys = folder / "keys.toml"
    keys.write_text("".join(f'[[keys]]\nname = "{name}"\nkey = "{name}"\n' for name in KEYS))
    log = folder / "log"
    with log.open("w") as file:
        command = [
            sys.executable,
            "-m",
            "kvllm",
            "serve",
            *ENGINE.split(),
            "--compression",
            COMPRESSION,
            "--api-key-file",
            str(keys),
        ]
        process = subprocess.Popen(command, stdout=file, stderr=file)
    try:
        while not (found := re.search(r"serving .* at (\S+)", log.read_text())):
            if process.poll() is not None:
                sys.exit(f"the server has not started: {log.read_text()}")
            time.sleep(0.1)
        yield found[1]
    finally:
        process.send_signal(signal.SIGINT)
        process.wait()


def ask_for_ever(url: str, client: int) -> None:
    """Send one problem after the other, until the server ends."""
    rng = random.Random(client)
    headers = {"Authorization": f"Bearer {KEYS[client % len(KEYS)]}", "Content-Type": "application/json"}
    while True:
        body = {"prompt": make_problem(rng, rng.randint(20, 44)).prompt, "max_tokens": 1800, "temperature": 0}
        request = urllib.request.Request(url + "/v1/completions", json.dumps(body).encode(), headers)
        try:
            urllib.request.urlopen(request).read()
        except OSError:
            return


def take(url: str, output: Path) -> None:
    """Take all pictures of a server under load."""
    from playwright.sync_api import sync_playwright

    executable = shutil.which("chromium") or shutil.which("google-chrome")
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=executable, args=["--no-sandbox"])
        for name, options in VIEWS.items():
            page = open_page(browser, url, options)
            save(page, output / f"page-{name}.png")
        page = open_page(browser, url, {"viewport": {"width": 1100, "height": 720}, "color_scheme": "light"})
        own = page.locator("#requests tbody tr", has=page.get_by_text("Cancel"))
        own.first.locator("button.link").click()
        page.wait_for_selector("#detail .strip svg > rect")
        save(page, output / "page-request.png")
        browser.close()


def open_page(browser: Any, url: str, options: dict[str, Any]) -> Any:
    page = browser.new_page(**options)
    page.add_init_script(f"sessionStorage.setItem('kvllm-key', {KEYS[0]!r})")
    page.goto(url)
    page.wait_for_selector("#requests tbody tr")
    page.wait_for_timeout(1000)
    return page


def save(page: Any, path: Path) -> None:
    from PIL import Image

    page.screenshot(path=path)
    Image.open(path).convert("RGB").quantize(COLOURS).save(path, optimize=True)
    print(f"{path.name}: {path.stat().st_size / 1024:.0f} KiB")


def main(arguments: Sequence[str]) -> None:
    parser = command_line.make_parser("benchmarks.page_screenshots", __doc__)
    parser.add_argument("--output", type=Path, default=DOCS, metavar="DIR", help="default: docs")
    parser.add_argument("--seconds", type=float, default=75, help="of load before the first picture (default 75)")
    args = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as folder, run_server(Path(folder)) as url:
        for client in range(CLIENTS):
            threading.Thread(target=ask_for_ever, args=(url, client), daemon=True).start()
        time.sleep(args.seconds)
        take(url, args.output)


if __name__ == "__main__":
    main(sys.argv[1:])
