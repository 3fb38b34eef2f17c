"""The page behind a slow network, and over a restart of the server's process, in real browsers."""

from __future__ import annotations

import json
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

from tests.helpers.browser import BROWSERS, open_browser, wait_for
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.server import ServerProcess
from tests.helpers.slow_link import slow_link
from tests.helpers.tokenizers import byte_level

if TYPE_CHECKING:
    from playwright.sync_api import Page

DELAY, BYTES_PER_SECOND = 0.1, 200_000
QUESTION = "where are you?"
GROWN = "(document.querySelectorAll('.prose')[0]?.textContent.length ?? 0)"


@pytest.fixture
def start(tmp_path: Path) -> Callable[[], ServerProcess]:
    tokenizer = byte_level("chat").hf
    make_checkpoint(tmp_path, "qwen3", vocab_size=len(tokenizer), max_position_embeddings=32768)
    tokenizer.save_pretrained(tmp_path)
    return partial(ServerProcess, str(tmp_path), "--num-gpu-blocks-override", "2000", "--served-model-name", "tiny")


def settings(page: Page, **values: int) -> None:
    """Bring in a conversation that has them, and nothing else."""
    file = json.dumps({"kvllm": 1, "conversations": [{"settings": values, "messages": {}}]}).encode()
    page.set_input_files("#import", {"name": "chats.json", "mimeType": "application/json", "buffer": file})


@pytest.mark.parametrize("name", BROWSERS)
def test_a_slow_network_and_a_restart(start: Callable[[], ServerProcess], name: str) -> None:
    first = start()
    with slow_link(first.url, DELAY, BYTES_PER_SECOND) as link, open_browser(name) as browser:
        page = browser.new_page()
        page.goto(link.url)
        send, composer, answer = page.locator(".composer .primary"), page.locator("#composer"), page.locator(".answer")
        page.wait_for_selector(".welcome h2")
        settings(page, temperature=0, max_tokens=2000)
        wait_for(page, "document.querySelectorAll('.chats li').length === 1")
        composer.fill(QUESTION)
        composer.press("Enter")
        wait_for(page, f"{GROWN} > 0 && document.querySelector('.composer .primary').textContent === 'Stop'")
        page.wait_for_selector("button:text-is('Send')")
        assert "2,000 tokens" in answer.locator(".actions").inner_text()

        settings(page, temperature=0, max_tokens=30000)
        wait_for(page, "document.querySelectorAll('.chats li').length === 2")
        composer.fill(QUESTION)
        composer.press("Enter")
        wait_for(page, f"{GROWN} > 100")
        first.process.kill()
        page.wait_for_selector(
            ".composer .problem >> text=The server cannot be reached. The page tries again by itself."
        )
        assert send.is_disabled()
        second = start()
        link.target = second.url
        problem = answer.locator(".problem", has_text="it was restarted")
        problem.wait_for()
        wait_for(page, f"{GROWN} > 100 && !document.querySelector('.composer .problem')")
        problem.locator("button").click()
        wait_for(page, f"{GROWN} > 100 && !document.querySelector('.problem')")
        send.click()
        page.wait_for_selector("text=Stopped.")
        assert second.stop() == 0
    first.stop()
