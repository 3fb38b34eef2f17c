"""The page behind a slow network, and over a restart of the server's process, in real browsers."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.helpers.browser import open_browser
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.firefox import open_firefox
from tests.helpers.server import ServerProcess
from tests.helpers.slow_link import slow_link
from tests.helpers.tokenizers import byte_level
from tests.helpers.waiting import wait_until

Evaluate = Callable[[str], Any]
DELAY, BYTES_PER_SECOND = 0.1, 200_000
QUESTION = "where are you?"
GROWN = "(document.querySelectorAll('.prose')[0]?.textContent.length ?? 0)"


@contextmanager
def chromium(url: str) -> Iterator[Evaluate]:
    with open_browser() as browser:
        page = browser.new_page()
        page.goto(url)
        yield page.evaluate


@contextmanager
def firefox(url: str) -> Iterator[Evaluate]:
    with open_firefox() as found:
        found.go(url)
        yield found.evaluate


@pytest.fixture
def start(tmp_path: Path) -> Callable[[], ServerProcess]:
    tokenizer = byte_level("chat").hf
    make_checkpoint(tmp_path, "qwen3", vocab_size=len(tokenizer), max_position_embeddings=4096)
    tokenizer.save_pretrained(tmp_path)
    return partial(ServerProcess, str(tmp_path), "--num-gpu-blocks-override", "240", "--served-model-name", "tiny")


def ask(evaluate: Evaluate, text: str) -> None:
    evaluate(
        f"(field => {{ field.value = {text!r}; field.form.requestSubmit(); }})(document.querySelector('#composer'))"
    )


def settings(evaluate: Evaluate, **values: int) -> None:
    """Bring in a conversation that has them, and nothing else."""
    file = json.dumps({"kvllm": 1, "conversations": [{"settings": values, "messages": {}}]})
    evaluate(f"""(text => {{
      const data = new DataTransfer(), input = document.querySelector("#import");
      data.items.add(new File([text], "chats.json"));
      input.files = data.files;
      input.dispatchEvent(new Event("change"));
    }})({file!r})""")


@pytest.mark.parametrize("browser", [chromium, pytest.param(firefox, marks=pytest.mark.long)])
def test_a_slow_network_and_a_restart(
    start: Callable[[], ServerProcess], browser: Callable[[str], Any], tmp_path: Path
) -> None:
    first = start()
    with slow_link(first.url, DELAY, BYTES_PER_SECOND) as link, browser(link.url) as evaluate:

        def wait_for(expression: str, seconds: float = 30) -> None:
            wait_until(
                lambda: evaluate(expression) is True, expression, seconds, lambda: evaluate("document.body.innerText")
            )

        wait_for("!!document.querySelector('.welcome h2')")
        settings(evaluate, temperature=0, max_tokens=200)
        wait_for("document.querySelectorAll('.chats li').length === 1")
        ask(evaluate, QUESTION)
        wait_for(f"{GROWN} > 0 && document.querySelector('.composer .primary').textContent === 'Stop'")  # it streams
        wait_for("document.querySelector('.composer .primary').textContent === 'Send'")
        assert evaluate("document.querySelector('.answer .actions').textContent.includes('200 tokens')")

        settings(evaluate, temperature=0, max_tokens=3000)
        wait_for("document.querySelectorAll('.chats li').length === 2")
        ask(evaluate, QUESTION)
        wait_for(f"{GROWN} > 100")
        first.process.kill()
        told = "The server cannot be reached. The page tries again by itself."
        wait_for(f"document.querySelector('.composer .problem')?.textContent === {told!r}")
        assert evaluate("document.querySelector('.composer .primary').disabled")
        second = start()
        link.target = second.url
        wait_for("document.querySelector('.answer .problem')?.textContent.includes('it was restarted') ?? false")
        wait_for(f"{GROWN} > 100 && !document.querySelector('.composer .problem')")
        evaluate("document.querySelector('.answer .problem button').click()")
        wait_for(f"{GROWN} > 100 && !document.querySelector('.problem')")
        evaluate("document.querySelector('.composer .primary').click()")
        wait_for("document.querySelector('.conversation').textContent.includes('Stopped.')")
        assert second.stop() == 0
    first.stop()
