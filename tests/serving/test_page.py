"""The page in a real browser: its chat and its monitor, and the routes behind it."""

from __future__ import annotations

import gzip
import hashlib
import json
import re
import threading
import time
import zlib
from base64 import b64decode
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import numpy as np
import pytest

from tests.helpers.browser import BROWSERS, giving_key, open_browser, wait_for, watched_page
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.server import ServerProcess
from tests.helpers.tokenizers import byte_level
from tests.helpers.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

HOSTILE = "<img src=x onerror=document.title='harmed'>"
KEYS = {"alice": "alice-key", HOSTILE: "bob-key"}
COMPRESSION = "method=kara,policy=periodic,period=16,window_blocks=8,retain_blocks=2,buffer=16,chunk_budget=8"
ENGINE = ("--block-size", "16", "--num-gpu-blocks-override", "320", "--max-num-seqs", "4")
PHONE = {"width": 390, "height": 844}
ROOT = Path(__file__).parents[2]
SOURCES, BUILT = ROOT / "page", ROOT / "kvllm/serving/page"
SHORT = {"temperature": 0, "max_tokens": 30, "seed": 1}
LONG = {"temperature": 0, "max_tokens": 2500, "seed": 1}


class Load:
    """Clients that ask again and again, each with a prompt of its own. outputs: what they got."""

    def __init__(self, server: ServerProcess, clients: int) -> None:
        self.outputs: list[dict[str, Any]] = []
        self._server = server
        self._stopped = threading.Event()
        self._threads = [threading.Thread(target=self._ask, args=(i,), daemon=True) for i in range(clients)]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        self._stopped.set()

    def _ask(self, client: int) -> None:
        prompt = f"client {client} asks " * (4 + client)
        while not self._stopped.is_set():
            self.outputs.append(complete(self._server, prompt, "alice", max_tokens=3000))


def complete(server: ServerProcess, prompt: Any, key: str, **options: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "temperature": 0, "ignore_eos": True, **options}
    try:
        status, answer = server.json("/v1/completions", body, authorization(key))
    except (OSError, ValueError):  # the server has ended
        return {}
    return answer["choices"][0] if status == 200 else {}


def authorization(key: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {KEYS[key]}"}


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    path = tmp_path_factory.mktemp("page")
    tokenizer = byte_level("chat").hf
    make_checkpoint(path, "qwen3", vocab_size=len(tokenizer), max_position_embeddings=4096)
    tokenizer.save_pretrained(path)
    file = path / "keys.toml"
    file.write_text("".join(f"[[keys]]\nname = {json.dumps(name)}\nkey = '{key}'\n" for name, key in KEYS.items()))
    tools = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes")
    options = ("--api-key-file", str(file), "--shutdown-timeout", "0", "--compression", COMPRESSION)
    names = ("--served-model-name", "models/tiny", "other")
    process = ServerProcess(str(path), *ENGINE, *options, *tools, *names)
    yield process
    with urlopen(Request(process.url + "/live/events", headers=authorization("alice")), timeout=60) as answer:
        assert process.stop() == 0
        assert answer.read().endswith(b"data: [DONE]\n\n")  # an open page does not hold up the end


@pytest.fixture(scope="module", params=BROWSERS)
def browser(request: pytest.FixtureRequest) -> Iterator[Browser]:
    with open_browser(request.param) as found:
        yield found


@pytest.fixture
def page(browser: Browser, server: ServerProcess) -> Iterator[Page]:
    """The chat, with an empty history."""
    with watched_page(browser, server.url, key=KEYS["alice"]) as found:
        found.wait_for_selector(".welcome h2")
        yield found


@pytest.fixture(scope="module")
def load(server: ServerProcess, browser: Browser) -> Iterator[Load]:
    running = Load(server, clients=6)
    yield running
    running.stop()


def settled(page: Page) -> None:
    """Wait until what was done shows: the page draws with the next frame."""
    page.evaluate("new Promise(done => requestAnimationFrame(() => requestAnimationFrame(done)))")


def scrolls_sideways(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


def conversation(*messages: dict[str, Any], **fields: Any) -> dict[str, Any]:
    """One as a file has it: each message follows on the one before, users and answers in turn."""
    made, parent = {}, None
    for number, message in enumerate(messages):
        role = "assistant" if number % 2 else "user"
        made[str(number)] = {"role": role, "parent": parent, "at": number, **message}
        parent = str(number)
    return {"title": "", "system": "", "settings": SHORT, "messages": made, "leaf": parent, **fields}


def bring_in(page: Page, *conversations: dict[str, Any]) -> None:
    """Import conversations; the first one is shown."""
    content = json.dumps({"kvllm": 1, "conversations": conversations}).encode()
    page.set_input_files("#import", {"name": "chats.json", "mimeType": "application/json", "buffer": content})
    page.wait_for_selector(".toast >> text=imported")


def ask(page: Page, text: str) -> None:
    page.fill("#composer", text)
    page.press("#composer", "Enter")


def ended(page: Page, count: int = 1) -> Locator:
    """The answers that are shown, once there are so many and none is running."""
    wait_for(page, f"document.querySelectorAll('.answer, .pair').length >= {count}")
    page.wait_for_selector("button:text-is('Send')")
    return page.locator(".answer, .pair")


KEEP_BODIES = """() => {
  const send = window.fetch;
  window.bodies = [];
  window.fetch = (path, options) => {
    if (path.endsWith("completions")) bodies.push(JSON.parse(options.body));
    return send(path, options);
  };
}"""
"""Keeps the bodies of requests for answers: over BiDi, Playwright has none."""


def shows_questions(page: Page, *texts: str) -> None:
    """Wait until the messages of the user are these: the page draws with the next frame."""
    shown = "[...document.querySelectorAll('.question .plain')].map(question => question.innerText)"
    wait_for(page, f"JSON.stringify({shown}) === {json.dumps(json.dumps(texts, separators=(',', ':')))}")


# The chat


def test_a_chat_streams_and_is_there_after_a_reload(page: Page) -> None:
    assert page.locator("#model").input_value() == "models/tiny" and page.title() == "tiny · KvLLM"
    page.evaluate(KEEP_BODIES)
    page.click("text=Settings")
    page.fill("#chat-settings textarea >> nth=0", "Answer in French.")
    for index, value in enumerate(("0", "0.95", "300", "7")):
        page.click(f"#chat-settings input[type=number] >> nth={index}")
        for key in value:  # the dialog is drawn anew behind each
            page.keyboard.press(key)
            settled(page)
    page.click("#chat-settings >> text=Close")
    page.select_option("#model", "other")
    ask(page, "the first question")
    (answer,) = ended(page).all()
    (body,) = page.evaluate("bodies")
    assert body["messages"][0] == {"role": "system", "content": "Answer in French."}
    names = ("model", "temperature", "top_p", "max_tokens", "seed")
    assert [body[name] for name in names] == ["other", 0, 0.95, 300, 7]
    assert "compression" not in body  # the server's own
    text = answer.locator(".prose").inner_text()
    assert len(text) > 100
    assert re.match(r"Memory: [2-8]\d% kept, compressed (once|2 times)", answer.locator(".under").inner_text())
    page.reload()
    wait_until(lambda: page.locator(".prose").inner_text() == text, "the text", 20)
    assert page.locator(".question .plain").inner_text() == "the first question"
    page.click("text=New chat")
    page.fill("[type=search]", "first QUESTION")
    page.wait_for_timeout(100)
    settled(page)
    assert page.locator(".chats li").count() == 1
    page.fill("[type=search]", "something else")
    page.wait_for_selector("text=Nothing was found")
    settled(page)
    assert page.locator(".chats li").count() == 0


def test_an_answer_goes_on_while_the_page_is_away(page: Page, server: ServerProcess) -> None:
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, settings=LONG))
    ask(page, "go on and on")
    text = "(document.querySelectorAll('.prose')[1]?.textContent ?? '')"
    before = wait_for(page, f"{text}.length > 200 && {text}")
    page.goto("about:blank")
    time.sleep(0.5)
    page.go_back()
    other = page.context.new_page()  # a second tab follows the same answer
    other.goto(server.url)
    other.click(".chats .open")
    texts = []
    for each in (page, other):
        ended(each, 2)
        texts.append(each.locator(".prose").nth(1).text_content() or "")
        assert each.locator(".answer .measured").nth(1).inner_text() == "2,500 tokens"  # no speed, which is not known
    assert texts[0] == texts[1] and texts[0].startswith(before[:150]) and len(texts[0]) > len(before)


def test_two_tabs_show_one_answer(browser: Browser, server: ServerProcess) -> None:
    """Whichever of them reaches the server first."""
    context = browser.new_context()
    context.add_init_script(giving_key(KEYS["alice"]))
    page, other = context.new_page(), context.new_page()
    page.goto(server.url)
    page.wait_for_selector(".welcome h2")
    bring_in(page, conversation({"content": "x"}, {"content": "y"}))
    other.goto(server.url)
    other.click(".chats .open")
    other.wait_for_selector(".answer")
    page.evaluate(SEND_LATE)
    ask(page, "which tab asks?")
    texts = []
    for each in (other, page):
        ended(each, 2)
        assert not each.locator(".problem").count()
        texts.append(each.locator(".prose").nth(1).text_content())
    assert texts[0] and texts[0] == texts[1]
    context.close()


def test_a_chat_that_another_tab_deletes_stays_away(page: Page, server: ServerProcess) -> None:
    """Though its answer runs in this one."""
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, settings=LONG))
    other = page.context.new_page()
    other.goto(server.url)
    other.wait_for_selector(".chats .open")
    ask(page, "go on")
    page.wait_for_selector(".answer >> nth=1 >> .prose")
    other.click(".chats [aria-label^=Delete]")
    page.wait_for_selector(".chats li", state="detached")
    wait_until(lambda: server.json("/load", headers=authorization("alice"))[1]["server_load"] == 0, "the end")
    page.wait_for_timeout(300)  # in which what has ended would be saved
    other.reload()
    other.wait_for_selector(".welcome h2")
    assert other.locator(".chats li").count() == 0


SEND_LATE = """() => {
  const send = window.fetch;
  window.fetch = async (path, options) => {
    if (path.endsWith("completions")) await new Promise(resolve => setTimeout(resolve, 500));
    return send(path, options);
  };
}"""


def test_a_lost_answer_is_told_in_words(browser: Browser, server: ServerProcess) -> None:
    """The server was started again; it cannot be reached; the conversation is too long."""
    context = browser.new_context()
    page = context.new_page()
    page.add_init_script(giving_key(KEYS["alice"]))
    page.goto(server.url)
    page.wait_for_selector(".welcome h2")
    bring_in(page, conversation({"content": "x"}, {"content": "half of an ans"}))
    page.evaluate(LOSE)
    page.reload()
    page.wait_for_selector(".problem >> text=was restarted")
    assert page.locator(".prose").inner_text() == "half of an ans"
    page.route("**/v1/chat/completions", lambda route: route.abort())
    page.route("**/live/answers/*", lambda route: route.abort())
    ask(page, "are you there?")
    problem = page.locator(".answer").nth(1).locator(".problem", has_text="cannot be reached")
    problem.wait_for(timeout=60_000)  # after tries whose pauses grow, by chance
    page.unroute_all()  # the page tries again by itself
    ended(page, 2)
    ask(page, "word " * 9000)
    page.wait_for_selector(".problem >> text=too long for the model")
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, settings={"max_tokens": 100_000}))
    ask(page, "short")
    page.wait_for_selector(".problem >> text=lower “Most tokens” in Settings")
    context.close()


LOSE = """() => new Promise(resolve => {
  const opening = indexedDB.open("kvllm", 1);
  opening.onsuccess = () => {
    const store = opening.result.transaction("conversations", "readwrite").objectStore("conversations");
    const reading = store.getAll();
    reading.onsuccess = () => {
      const conversation = reading.result[0];
      Object.assign(conversation.messages[conversation.leaf], { state: "running", kept: "never-asked", last: 3 });
      store.put(conversation).onsuccess = resolve;
    };
  };
})"""


def test_stop_again_edit_and_branches(page: Page, server: ServerProcess) -> None:
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, settings=LONG))
    ask(page, "a long one")
    page.wait_for_selector(".answer >> nth=1 >> .prose")
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Stopped.")
    wait_until(lambda: server.json("/load", headers=authorization("alice"))[1]["server_load"] == 0, "the end")
    page.click(".chats .open")
    page.locator(".answer").nth(0).locator("text=Answer again").click()
    page.click("button:text-is('Stop')")
    page.wait_for_selector(".branches >> text=2/2")
    page.wait_for_selector("button:text-is('Send')")
    settled(page)
    assert page.locator(".answer").count() == 1
    page.click("[aria-label='Earlier version']")
    wait_for(page, "document.querySelectorAll('.answer').length === 2")
    settled(page)
    assert (page.locator(".prose").first.text_content() or "").strip() == "y"
    page.locator(".question").nth(1).locator("text=Edit").click()
    page.fill(".editor", "a better question")
    for key in ("Enter", "Escape"):  # those of an input method
        page.dispatch_event(".editor", "keydown", {"key": key, "isComposing": True})
    settled(page)
    page.keyboard.press("Enter")
    page.click("button:text-is('Stop')")
    shows_questions(page, "x", "a better question")
    page.locator(".question").nth(1).locator("[aria-label='Earlier version']").click()
    shows_questions(page, "x", "a long one")
    page.locator(".question").nth(1).locator("text=Delete").click()
    shows_questions(page, "x", "a better question")
    page.click("text=Undo")
    shows_questions(page, "x", "a long one")
    page.locator(".answer").nth(1).locator("text=Answer again").click()
    page.wait_for_selector("button:text-is('Stop')")
    page.click("[aria-label^='Delete']")
    page.wait_for_selector(".welcome h2")
    page.reload()
    page.wait_for_selector(".welcome h2")
    settled(page)
    assert page.locator(".chats li").count() == 0  # its answer has not brought it back


def test_another_chat_need_not_wait_for_an_answer(page: Page) -> None:
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, settings=LONG), conversation())
    ask(page, "a long one")
    page.wait_for_selector(".answer >> nth=1 >> .prose")
    page.click(".chats .open >> nth=1")
    page.wait_for_selector(".welcome h2")
    ask(page, "a short one")
    shows_questions(page, "a short one")
    ended(page, 1)
    page.click(".chats .open >> nth=1")
    page.click("button:text-is('Stop')")
    page.wait_for_selector("text=Stopped.")


def test_what_ended_an_answer_is_told(page: Page, server: ServerProcess) -> None:
    bring_in(page, conversation({"content": "x"}, {"content": "y"}))
    ask(page, "short")
    ended(page, 2)
    page.wait_for_selector("text=The answer was cut off at the most tokens allowed: see Settings.")
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, settings={"temperature": 0}))
    ask(page, "中" * 1900)
    ended(page, 2)
    page.wait_for_selector("text=The answer was cut off: the model's context is full.")
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, settings=LONG))
    ask(page, "to be cancelled in the monitor")
    page.wait_for_selector(".answer >> nth=1 >> .prose")
    (request,) = requests_of(server, "alice")
    server.request(f"/live/requests/{request}", headers=authorization("alice"), method="DELETE")
    ended(page, 2)
    page.wait_for_selector("text=Stopped.")


MARKDOWN = r"""Here is **bold** and $e^{i\pi}+1=0$.

$$\int_0^1 x^2\,dx = \frac{1}{3}$$

| City | People |
|:-----|-------:|
| Lisbon | 545,000 |

```python
def add(a, b):
    return a + b
```

Costs are $5 and $6. <b>No markup</b>

It costs $5, says `$HOME`.

[![state](https://a.example/state.svg)](https://b.example/)

مرحبا بالعالم
"""


def test_markdown_code_maths_thoughts_and_calls(page: Page) -> None:
    call = {"id": "c1", "name": "weather", "arguments": '{"city": "Lisbon"}'}
    bring_in(page, conversation({"content": "x"}, {"content": MARKDOWN, "thought": "A secret idea.", "calls": [call]}))
    prose = page.locator(".prose")
    settled(page)
    assert prose.locator("strong").text_content() == "bold" and prose.locator("math").count() == 2
    assert prose.locator("math[display=block] mfrac").count() == 1
    assert prose.locator("td").all_text_contents() == ["Lisbon", "545,000"]
    assert prose.locator("pre .hljs-keyword").all_text_contents() == ["def", "return"]
    assert "Costs are $5 and $6. <b>No markup</b>" in (prose.text_content() or "")
    assert prose.locator("p", has_text="It costs").inner_html() == "It costs $5, says <code>$HOME</code>."
    assert prose.locator("a").evaluate_all("all => all.map(a => [a.href, a.innerText])") == [
        ["https://b.example/", "picture: state"]
    ]
    right_to_left = prose.locator("p", has_text="مرحبا")
    assert right_to_left.evaluate("each => getComputedStyle(each).direction") == "rtl"
    copies = {"text=Copy code": "def add(a, b):\n    return a + b", ".answer .actions >> text=Copy": MARKDOWN}
    for button, copied in copies.items():
        page.click(button)
        settled(page)
        page.press("#composer", "Control+v")
        assert page.input_value("#composer") == copied
        page.fill("#composer", "")
    assert not page.locator("text=A secret idea.").is_visible()
    page.click(".thought summary")
    settled(page)
    assert page.locator("text=A secret idea.").is_visible()
    page.evaluate(KEEP_BODIES)
    assert '"city": "Lisbon"' in page.locator(".call pre").inner_text()
    page.fill(".call textarea", "sunny")
    page.click("text=Give the result")
    ended(page, 2)
    asking, given = page.evaluate("bodies[0].messages.slice(-2)")
    assert given == {"role": "tool", "tool_call_id": "c1", "content": "sunny"}
    assert asking["tool_calls"][0]["function"]["name"] == "weather"


def test_an_answer_may_speak_of_the_tags_of_thoughts(page: Page) -> None:
    bring_in(page, conversation({"content": "x"}, {"content": "y"}))
    pieces = ("<think>Which tag?</think>", "It is `</th", "ink>`.")
    body = "".join(f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]})}\n\n" for piece in pieces)
    body += "data: [DONE]\n\n"
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    ask(page, "Which tag ends a thought?")
    answer = ended(page, 2).nth(1)
    assert answer.locator(".prose").inner_text() == "It is </think>."
    assert answer.locator(".thought .plain").text_content() == "Which tag?"


HARM = "window.harmed=1"
HOSTILE_ANSWERS = (
    f"<script>{HARM}</script>",
    f"<img src=x onerror={HARM}>",
    f"<svg onload={HARM}><script>{HARM}</script></svg>",
    f"[click](javascript:{HARM}) [data](data:text/html,<script>{HARM}</script>) [tab](java&#x09;script:{HARM})",
    f"<iframe srcdoc='<script>parent.{HARM}</script>'></iframe><object data=x></object><base href=//evil.example>",
    "![picture](http://evil.example/pixel.png) <link rel=stylesheet href=//evil.example/x.css>",
    f'```html"><img src=x onerror={HARM}>\n<script>{HARM}</script>',  # a fence that is never closed
    "| " + " | ".join(["x"] * 60) + " |\n|" + "-|" * 60 + "\n" + ("| " + " | ".join(["y"] * 60) + " |\n") * 60,
    "\u202egnp.exe\u202c \u2066hidden\u2069 \u200f" + "\u0301" * 500,
    f"<math><mtext></form><form><mglyph><style></math><img src=x onerror={HARM}>",
    r"$\href{javascript:window.harmed=1}{x}$ $\def\x{\x\x}\x$ $" + "{" * 300 + "$",
    "> " * 400
    + "deep\n\n"
    + "[" * 3000
    + "*" * 3000
    + f"<a href='x' style='position:fixed' id=app onclick={HARM}>x</a>",
    ">" * 5000 + "deeper than a stack",
)
ALL_MARKUP = (0, 1, 2, 4)
"""Those that are shown as text, without any element."""
FOUND = """[...document.querySelectorAll('.prose *')].filter(each =>
  ['script', 'img', 'svg', 'iframe', 'object', 'form', 'style', 'link', 'base'].includes(each.localName) ||
  [...each.attributes].some(({ name, value }) => name.startsWith('on') || name === 'style' || name === 'id' ||
    /^\\s*(javascript|data):/i.test(value))).map(each => each.outerHTML.slice(0, 200))"""


def test_hostile_answers_do_no_harm(page: Page) -> None:
    messages = [message for text in HOSTILE_ANSWERS for message in ({"content": text}, {"content": text})]
    bring_in(page, conversation(*messages, {"content": "x"}, {"content": "the **end**", "thought": HOSTILE_ANSWERS[1]}))
    assert page.locator(".prose strong").last.text_content() == "end" and page.locator(".prose").count() == 14
    links = 0
    for number, prose in enumerate(page.locator(".prose").all()):  # what comes near the view is made into elements
        prose.scroll_into_view_if_needed()
        if number in ALL_MARKUP:
            settled(page)
        else:
            prose.locator(".block *").first.wait_for(state="attached")
        assert page.evaluate(FOUND) == []
        for link in prose.locator("a").all():
            assert re.match("https?://", link.get_attribute("href") or ""), link.evaluate("each => each.outerHTML")
            assert "noopener" in (link.get_attribute("rel") or "")
            links += 1
    assert links
    assert page.evaluate("window.harmed") is None and not scrolls_sideways(page)
    page.set_viewport_size({"width": 390, "height": 844})
    settled(page)
    assert not scrolls_sideways(page)


def test_texts_are_attached(page: Page) -> None:
    bring_in(page, conversation({"content": "x"}, {"content": "y"}))
    page.evaluate(KEEP_BODIES)
    files = "input[aria-label='Text files']"
    page.set_input_files(files, {"name": "notes.txt", "mimeType": "text/plain", "buffer": b"remember the milk"})
    page.wait_for_selector(".files >> text=notes.txt")
    page.set_input_files(files, {"name": "x.bin", "mimeType": "text/plain", "buffer": b"\xff\xfe\0"})
    page.wait_for_selector("text=x.bin is no text file")
    page.fill("#composer", "long " * 1000)
    for key in "axv":
        page.press("#composer", f"Control+{key}")
    page.wait_for_selector(".files >> text=pasted text 2")
    page.click("[aria-label='Remove pasted text 2']")
    ask(page, "what is in it?")
    ended(page, 2)
    assert (
        page.evaluate("bodies[0].messages.at(-1).content")
        == "notes.txt:\n```\nremember the milk\n```\n\nwhat is in it?"
    )
    settled(page)
    assert page.locator(".file summary").inner_text() == "notes.txt"


def test_memory_is_chosen_and_two_answers_are_compared(page: Page) -> None:
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, settings={**SHORT, "max_tokens": 400}))
    page.evaluate(KEEP_BODIES)
    settled(page)
    assert "Memory: keep 25%" in page.inner_text(".slider")
    page.focus(".slider input")
    page.keyboard.press("ArrowRight")
    settled(page)
    assert "Memory: keep 38%" in page.inner_text(".slider")
    page.check("text=Compare with all kept")
    ask(page, "def add(a, b):")
    ended(page, 2)
    assert page.evaluate("bodies.map(body => body.compression)") == [{"compress": False}, {"retain_blocks": 3}]
    whole, few = page.locator(".side").all()
    assert "Everything kept" in whole.inner_text() and "Memory: 100% kept" in whole.inner_text()
    assert re.search(r"Memory: [3-7]\d% kept, compressed", few.inner_text())
    for side in (whole, few):
        assert re.search(r"400 tokens · [\d,]+ tokens/s · first after [\d.]+ s · [\d.]+ MiB", side.inner_text())
    assert re.match(r"The same for \d{2,} characters", page.inner_text(".parting"))
    tells_who_holds_tokens(page, few)
    few.locator("summary >> text=Details").click()
    few.locator(".spans li").first.wait_for()
    assert re.search(r"at token \d+: 1 window compressed, 80 KV pairs dropped", few.inner_text())
    assert re.search(r": 48 of 128 kept", few.inner_text())
    assert not page.is_visible("text=Nothing was compressed")


def tells_who_holds_tokens(page: Page, side: Locator) -> None:
    """Tokens that the keyboard goes through, against what the server has told of them."""
    memory = page.evaluate(MEMORY_OF_PAIR)
    told = memory["pairs"][0]
    rows = np.frombuffer(zlib.decompress(b64decode(told["bits"])), dtype=np.uint8)
    bits = np.unpackbits(rows.reshape(len(told["layers"]) * told["heads"], -1), axis=1, bitorder="little")
    bits = bits[:, : told["end"] - told["first"]]
    assert [told["first"], told["end"], 48] == memory["spans"][1] and (bits.sum(1) == 48).all()
    side.locator(".tokens").focus()
    seen = set()
    for at in range(told["first"] + 24):
        if at < told["first"] - 1:
            page.keyboard.press("ArrowRight")
            continue
        page.wait_for_selector(f".tip b >> text=Token {at}")
        settled(page)
        is_before = at < told["first"]
        held = len(bits) if is_before else int(bits[:, at - told["first"]].sum())
        assert page.locator(".tip .is-held").count() == held
        shown = page.inner_text(".tip p >> nth=1")
        who = {0: "Held nowhere any more.", len(bits): "Held by all layers and heads, in the pool: 32 bits."}
        expected = who.get(held, f"Held by {held} of {len(bits)} heads, in the pool: 32 bits.")
        assert shown == expected + (f" Compressed at token {told['at']}." if not is_before else ""), shown
        seen.add(held)
        page.keyboard.press("ArrowRight")
    assert len(seen) > 2
    page.keyboard.press("Escape")
    page.wait_for_selector(".tip", state="detached")
    side.locator(".strip").hover()
    page.wait_for_selector(".tip")


MEMORY_OF_PAIR = """() => new Promise(resolve => {
  const opening = indexedDB.open("kvllm", 1);
  opening.onsuccess = () => {
    const reading = opening.result.transaction("conversations").objectStore("conversations").getAll();
    reading.onsuccess = () => {
      const messages = reading.result.flatMap(each => Object.values(each.messages));
      resolve(messages.find(each => each.second).memory);
    };
  };
})"""


def test_an_answer_that_was_not_compressed_says_so(page: Page) -> None:
    bring_in(page, conversation({"content": "x"}, {"content": "y"}))
    page.check("text=Compare with all kept")
    ask(page, "short")
    ended(page, 2)
    settled(page)
    assert page.locator("text=Nothing was compressed: the answer is short, or memory was not.").count() == 1


OFFERED = """new Promise(done => {
  const makeUrl = URL.createObjectURL;
  let file;
  URL.createObjectURL = blob => makeUrl.call(URL, file = blob);
  HTMLAnchorElement.prototype.click = function () { file.text().then(text => done([this.download, text])); };
  [...document.querySelectorAll("button")].find(button => button.textContent.includes(LABEL)).click();
})"""


def download(page: Page, label: str, folder: Path) -> Path:
    """The file that the button with this label saves. Over BiDi Firefox saves none: what the page offers it."""
    browser = page.context.browser
    if browser and browser.browser_type.name == "firefox":
        name, text = page.evaluate(OFFERED.replace("LABEL", json.dumps(label)))
        (folder / name).write_text(text)
        return folder / name
    with page.expect_download() as caught:
        page.click(f"text={label}")
    caught.value.save_as(folder / caught.value.suggested_filename)
    return folder / caught.value.suggested_filename


def test_chats_leave_and_come_back_as_files(page: Page, tmp_path: Path) -> None:
    one = conversation({"content": "the question"}, {"content": "the **answer**"}, title="First", system="Be kind.")
    bring_in(page, one, conversation({"content": "x"}, {"content": "y"}, title="Second"))
    page.click(".chats >> text=First")
    paths = [download(page, label, tmp_path) for label in ("Save as text", "Export all")]
    assert paths[0].name == "First.md" and "## You\n\nthe question" in paths[0].read_text()
    for _ in range(2):
        page.locator(".chats [aria-label^=Delete]").first.click()
    page.set_input_files("#import", paths[0])
    page.wait_for_selector(".prose strong >> text=answer")
    page.click("text=Settings")
    assert page.input_value("#chat-settings textarea >> nth=0") == "Be kind."
    page.keyboard.press("Escape")
    page.set_input_files("#import", paths[1])
    wait_for(page, "document.querySelectorAll('.chats li').length === 3")
    page.set_input_files("#import", {"name": "x.json", "mimeType": "application/json", "buffer": b"[1]"})
    page.wait_for_selector(".toast >> text=no conversations")


def test_messages_that_go_in_circles_are_brought_in(page: Page) -> None:
    alternative = {"content": "C", "role": "assistant", "parent": "0"}
    circle = conversation({"content": "A"}, {"content": "B", "at": 9}, alternative)
    circle["messages"]["0"]["parent"] = "1"
    bring_in(page, circle)
    page.wait_for_selector(".branches >> text=1/2")
    page.locator("[aria-label='Later version']").last.click()
    page.wait_for_selector(".prose >> text=B")
    shows_questions(page, "A")


def test_a_model_that_is_gone_is_not_named(page: Page) -> None:
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, model="gone"))
    assert page.locator("#model").input_value() == "models/tiny"
    ask(page, "who answers?")
    assert "gone" not in ended(page, 2).nth(1).inner_text()


def test_a_browser_that_keeps_nothing_chats_too(browser: Browser, server: ServerProcess) -> None:
    context = browser.new_context()
    context.add_init_script(DENY_STORAGE)
    page = context.new_page()
    page.goto(server.url)
    page.fill("#key", KEYS["alice"])
    page.keyboard.press("Enter")
    page.wait_for_selector(".welcome h2")
    page.wait_for_selector(".problem >> text=This browser keeps no history here")
    ask(page, "are you there?")
    page.wait_for_selector(".prose")
    page.click("button:text-is('Stop')")
    context.close()


DENY_STORAGE = """
  const deny = () => { throw new DOMException("denied", "SecurityError"); };
  Object.defineProperty(window, "sessionStorage", { get: deny });
  IDBFactory.prototype.open = deny;
"""
"""As browsers do where cookies are blocked."""


def test_the_chat_needs_no_mouse(page: Page, server: ServerProcess) -> None:
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, settings=LONG))
    page.reload()
    page.wait_for_selector(".question")
    page.keyboard.press("Tab")
    settled(page)
    assert page.evaluate("document.activeElement.className") == "skip"
    page.keyboard.press("Enter")
    page.keyboard.type("one line")
    page.keyboard.press("Shift+Enter")
    page.keyboard.type("another")
    page.click("nav >> text=Monitor")
    page.wait_for_selector("#range")
    page.click("nav >> text=Chat")
    page.wait_for_selector("#composer:focus")
    page.keyboard.press("Control+Enter")
    page.wait_for_selector(".answer >> nth=1 >> .prose")
    settled(page)
    assert page.evaluate("document.activeElement.id") == "composer" and page.input_value("#composer") == ""
    page.keyboard.press("Escape")
    page.wait_for_selector("text=Stopped.")
    page.keyboard.press("ArrowUp")
    settled(page)
    assert page.input_value("#composer") == "one line\nanother"
    page.keyboard.press("ArrowUp")
    settled(page)
    assert page.input_value("#composer") == "x"
    page.keyboard.press("ArrowDown")
    page.keyboard.press("ArrowDown")
    settled(page)
    assert page.input_value("#composer") == ""
    reached = set()
    for _ in range(25):
        page.keyboard.press("Shift+Tab")
        reached.add(page.evaluate("document.activeElement.textContent.slice(0, 20)"))
    assert {"Edit", "Copy", "Delete", "Answer again", "Settings", "New chat", "Monitor"} <= reached


def test_long_answers_take_few_elements(page: Page) -> None:
    """Answers of 10,000 tokens, four through which one scrolls, and one that comes: what is far from the view is text.
    All of the elements of one answer would be 6,300.

    Traced while one came at 200 tokens/s, in Chromium 156 on two cores with other work (2,392 frames): CPU time of the
    page's thread a frame 2.4 ms in the median, 10.6 ms at the 99th percentile, 15.5 ms at most but for the first one,
    32 ms.
    """
    paragraph = "Some **words** with `code`, and maths: $x^2$. " * 12 + "\n\n- a\n- b\n\n```python\nx = 1\n```\n\n"
    text = paragraph * 60
    assert len(text) > 35_000
    messages = [message for _ in range(4) for message in ({"content": "x"}, {"content": text})]
    bring_in(page, conversation({"content": "x"}, {"content": "y"}), conversation(*messages, title="Long"))
    page.click(".chats >> text=Long")
    page.wait_for_selector(".prose >> nth=3 >> math >> nth=0", state="attached")
    page.locator(".conversation").press("Home")
    page.wait_for_selector(".prose >> nth=0 >> math >> nth=0", state="attached")
    page.wait_for_selector(".prose >> nth=3 >> math", state="detached")
    assert (page.locator(".prose").nth(3).text_content() or "").count("$x^2$") > 500
    assert 100 < page.locator(".prose *").count() < 4000
    pieces = [text[i : i + 4] for i in range(0, len(text), 4)]
    events = [
        f"data: {json.dumps({'choices': [{'delta': {'content': piece}}]})}\nid: {i}\n\n"
        for i, piece in enumerate(pieces, 1)
    ]
    body = "".join([*events, "data: [DONE]\n\n"])
    page.route("**/v1/chat/completions", lambda route: route.fulfill(body=body, content_type="text/event-stream"))
    page.click(".chats .open >> nth=1")
    ask(page, "go on")
    ended(page, 2)
    wait_for(page, "document.querySelectorAll('.prose')[1].querySelectorAll('*').length < 2000")
    assert page.locator(".prose").nth(1).locator(".block").count() == 60 * 3
    wait_for(
        page,
        "(box => box.scrollHeight - box.scrollTop - box.clientHeight < 2)(document.querySelector('.conversation'))",
    )
    assert page.locator(".prose").nth(1).locator(".block").last.locator("code").count() == 1


@pytest.mark.parametrize(
    ("browser", "scheme"),
    [
        ("chromium", "light"),
        ("chromium", "dark"),
        pytest.param("firefox", "dark", marks=pytest.mark.long),
        pytest.param("firefox light", "light", marks=pytest.mark.long),
    ],
    indirect=["browser"],
)
def test_axe_finds_nothing(browser: Browser, server: ServerProcess, scheme: str) -> None:
    with watched_page(browser, server.url, key=KEYS["alice"], color_scheme=scheme) as page:
        page.wait_for_selector(".welcome h2")
        assert violations(page) == []
        call = {"id": "c1", "name": "weather", "arguments": "{}"}
        answer = {"content": MARKDOWN, "thought": "An idea.", "calls": [call]}
        bring_in(page, conversation({"content": "x"}, {"content": "y"}), conversation({"content": "x"}, answer))
        page.check("text=Compare with all kept")
        ask(page, "and now?")
        ended(page, 2)
        page.locator(".tokens").first.focus()
        page.keyboard.press("ArrowRight")
        page.wait_for_selector(".tip")
        assert violations(page) == []
        page.click(".chats li:nth-child(2) .open")
        settled(page)
        assert violations(page) == []
        page.click("text=Settings")
        settled(page)
        assert violations(page) == []
        page.keyboard.press("Escape")
        page.click("#change-key")
        page.wait_for_selector(".keys li")
        assert violations(page) == []
        page.keyboard.press("Escape")
        page.click("text=Monitor")
        page.wait_for_selector("#pool svg text")
        assert violations(page) == []


def violations(page: Page) -> list[str]:
    axe = pytest.importorskip("axe_playwright_python.sync_playwright", reason="needs axe-playwright-python").Axe()
    found = axe.run(page).response["violations"]
    return [f"{each['id']}: {node['html'][:200]}" for each in found for node in each["nodes"]]


def test_a_phone_shows_all_without_scrolling_sideways(browser: Browser, server: ServerProcess) -> None:
    options = {"viewport": PHONE, "color_scheme": "dark", "reduced_motion": "reduce"}
    with watched_page(browser, server.url, key=KEYS["alice"], **options) as page:
        page.wait_for_selector(".welcome h2")
        assert not scrolls_sideways(page)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] < 128")
        assert page.evaluate(MOTION) == "none"
        bring_in(page, conversation({"content": "x"}, {"content": MARKDOWN}))
        page.click("button >> text=Chats")
        page.click(".chats .open")
        settled(page)
        assert not page.locator(".sidebar").is_visible()
        ask(page, "and now?")
        ended(page, 2)
        assert not scrolls_sideways(page)
        page.click("text=Monitor")
        page.wait_for_selector("#pool svg text")
        assert not scrolls_sideways(page)


def test_the_whole_conversation_is_printed(browser: Browser, server: ServerProcess) -> None:
    if browser.browser_type.name != "chromium":
        pytest.skip("Playwright prints with Chromium alone")
    with watched_page(browser, server.url, key=KEYS["alice"]) as page:
        page.wait_for_selector(".welcome h2")
        bring_in(page, conversation(*[{"content": "word " * 500}] * 20))
        assert len(re.findall(rb"/Type\s*/Page\b", page.pdf())) > 5


MOTION = """() => {
  const found = document.querySelector("#app").appendChild(document.createElement("p"));
  found.className = "waiting";
  const name = getComputedStyle(found).animationName;
  found.remove();
  return name;
}"""
"""What moves while one waits for an answer."""


def test_a_key_is_asked_for(browser: Browser, server: ServerProcess) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url + "/#monitor")
    page.wait_for_selector("#key-dialog[open]")
    page.keyboard.press("Escape")
    page.wait_for_timeout(500)  # in which it would come back
    assert page.locator("#key-dialog").count() == 0
    page.click("#change-key")
    page.fill("#key", KEYS["alice"])
    page.uncheck("#key-dialog input[type=checkbox]")
    page.keyboard.press("Enter")
    wait_for(page, "document.querySelector('#status').textContent === 'live'")
    settled(page)
    assert "key alice" in page.inner_text("#settings")
    assert page.evaluate("JSON.stringify(sessionStorage)").count("alice-key") == 0
    page.reload()
    page.wait_for_selector("#key-dialog[open]")  # it was kept in memory alone
    page.fill("#key", KEYS["alice"])
    page.keyboard.press("Enter")
    wait_for(page, "document.querySelector('#status').textContent === 'live'")
    page.reload()
    wait_for(page, "document.querySelector('#status')?.textContent === 'live'")
    page.click("#change-key")
    page.fill("#key", "ключ")  # no header has such letters
    page.keyboard.press("Enter")
    page.wait_for_selector("#key-dialog >> text=does not know this key")
    page.click("#key-dialog .keys >> text=alice")
    page.wait_for_selector("#change-key >> text=Key: alice")
    page.click("nav >> text=Chat")
    page.route("**/v1/chat/completions", lambda route: route.fulfill(status=401, json={}))  # the keys were changed
    ask(page, "do you know me?")
    page.wait_for_selector("#key-dialog >> text=needs an API key")
    page.keyboard.press("Escape")
    page.wait_for_selector(".answer .problem >> text=give one with “Key” above")
    context.close()


def test_several_keys_take_turns(page: Page, server: ServerProcess) -> None:
    """An answer is read again, and stopped, with the key that it was asked for with."""
    bring_in(page, conversation({"content": "x"}, {"content": "y"}, settings={**LONG, "max_tokens": 3800}))
    ask(page, "go on")
    wait_for(page, "(document.querySelectorAll('.prose')[1]?.textContent.length ?? 0) > 100")
    page.click("#change-key")
    page.fill("#key", KEYS[HOSTILE])
    page.keyboard.press("Enter")
    page.wait_for_selector(f"#change-key >> text=Key: {HOSTILE}")
    page.reload()
    page.wait_for_selector(".answer >> nth=1 >> .measured >> text=3,800 tokens")
    page.locator(".answer").nth(1).locator("text=Answer again").click()
    wait_for(page, "document.querySelector('.composer .primary').textContent === 'Stop'")
    page.click("#change-key")
    settled(page)
    assert page.locator(".keys .link").all_inner_texts() == [HOSTILE, "alice"] and page.locator("img").count() == 0
    page.click(".keys >> text=alice")
    with page.expect_response(lambda each: each.request.method == "DELETE") as stopped:
        page.click("button:text-is('Stop')")
    assert stopped.value.status == 204
    page.wait_for_selector("#change-key >> text=Key: alice")
    page.click("#change-key")
    page.click(f".keys >> [aria-label={json.dumps('Forget ' + HOSTILE)}]")
    settled(page)
    assert page.locator(".keys .link").all_inner_texts() == ["alice"]
    sent = page.evaluate("sessionStorage.getItem('kvllm-keys')")
    assert [key["value"] for key in json.loads(sent)] == [KEYS["alice"]]


# The files


def test_the_files_belong_to_the_sources_and_are_small() -> None:
    sources = [path for path in (SOURCES / "src").rglob("*") if path.is_file()]
    sources += [SOURCES / name for name in ("build.mjs", "package.json", "package-lock.json", "tsconfig.json")]
    digest = hashlib.sha256()
    for path in sorted(sources, key=lambda path: path.relative_to(SOURCES).as_posix()):
        digest.update(f"{path.relative_to(SOURCES).as_posix()}\0".encode() + path.read_bytes() + b"\0")
    assert f'content="{digest.hexdigest()}"' in (BUILT / "index.html").read_text(), "run make page"
    assert sum(len(gzip.compress(path.read_bytes())) for path in BUILT.iterdir()) < 300_000
    assert "resolved" not in (SOURCES / "package-lock.json").read_text()  # no host of a registry


def test_the_files_allow_nothing_foreign_and_need_no_key(server: ServerProcess) -> None:
    status, headers, content = server.request("/")
    assert status == 200 and b"<script>" not in content
    names = re.findall(r'(?:href|src)="([^"#]+)"', content.decode())
    assert {"page/main.js", "page/style.css"} <= set(names)  # relative, for proxies that give the server a path
    for path in ("/", *(f"/{name}" for name in names)):
        status, headers, content = server.request(path)
        compressed = server.request(path, headers={"Accept-Encoding": "gzip, br"})[2]
        assert len(compressed) < len(content) and gzip.decompress(compressed) == content
        policy = headers["content-security-policy"]
        assert status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        assert headers["x-content-type-options"] == "nosniff"
    for path in ("/page/none.js", "/page/..%2Flive.py", "/page/"):
        assert server.request(path)[0] == 404


# The routes


def test_figures_answers_and_actions_need_a_key(server: ServerProcess) -> None:
    for path in ("/live/requests/a", "/live/answers/a"):
        assert [server.request(path, method=method)[0] for method in ("GET", "DELETE")] == [401, 401]
    assert server.request("/live/events")[0] == 401


def kept(server: ServerProcess, name: str, key: str, **options: Any) -> bytes:
    """The stream of a request that is kept."""
    messages = [{"role": "user", "content": "hello"}]
    body = {"messages": messages, "stream": True, "temperature": 0, "ignore_eos": True, **options}
    sent = {**authorization(key), "X-Keep-Answer": name}
    return server.request("/v1/chat/completions", body, sent)[2].replace(b": keep-alive\n\n", b"")


def test_a_kept_answer_is_read_again_by_its_key_alone(server: ServerProcess) -> None:
    options = {"stream_options": {"include_usage": True, "continuous_usage_stats": True, "include_kv_spans": True}}
    first = kept(server, "one-1", "alice", max_tokens=400, **options)
    assert server.request("/live/answers/one-1", headers=authorization("alice"))[2] == first
    events = first.split(b"\n\n")
    rest = server.request("/live/answers/one-1?after=7", headers=authorization("alice"))[2]
    at = next(number for number, event in enumerate(events) if event.endswith(b"\nid: 7"))
    assert rest.split(b"\n\n") == events[at + 1 :]
    assert server.request("/live/answers/one-1", headers=authorization(HOSTILE))[0] == 404
    assert b"there is an answer" in kept(server, "one-1", "alice", max_tokens=1)
    assert b"is not allowed" in kept(server, "../x", "alice", max_tokens=1)
    usages = [json.loads(event[6:].split(b"\nid: ")[0])["usage"] for event in events if b'"usage":{' in event]
    told = [usage for usage in usages if "kv_spans" in usage["kvllm"]]
    assert len(told) == len({usage["kvllm"]["windows"] for usage in usages}) - 1 > 0  # with each compression
    for usage in told:
        spans = usage["kvllm"]["kv_spans"]
        assert sum(end - start - left for start, end, left in spans) == usage["kvllm"]["evicted_pairs"]
        assert usage["total_tokens"] - 2 <= spans[-1][1] <= usage["total_tokens"] + 2
        assert spans[0][0] == 0 and all(a[1] == b[0] for a, b in pairwise(spans))


def test_a_kept_answer_goes_on_alone_and_is_ended(server: ServerProcess) -> None:
    body = {"prompt": "x", "stream": True, "max_tokens": 3000, "ignore_eos": True}
    sent = {**authorization("alice"), "X-Keep-Answer": "two", "Content-Type": "application/json"}
    with urlopen(Request(server.url + "/v1/completions", json.dumps(body).encode(), sent), timeout=20) as answer:
        answer.read(100)
    grown = lambda: len(first_events(server, "/live/answers/two", "alice", 20)) == 20  # noqa: E731
    wait_until(grown, "more events")
    assert server.request("/live/answers/two", headers=authorization("alice"), method="DELETE")[0] == 204
    text = server.request("/live/answers/two", headers=authorization("alice"))[2]
    assert text.endswith(b"data: [DONE]\n\n") and b'"finish_reason":"length"' not in text


def test_text_and_cancellation_are_for_the_owner_alone(server: ServerProcess) -> None:
    asked = threading.Thread(target=complete, args=(server, "QRS", HOSTILE), kwargs={"max_tokens": 3500}, daemon=True)
    asked.start()
    found: list[str] = []
    wait_until(lambda: found.extend(requests_of(server, HOSTILE)) or bool(found), "the request")
    path = f"/live/requests/{found[0]}"
    own, other = (server.json(path, headers=authorization(key))[1] for key in (HOSTILE, "alice"))
    assert own["is_own"] and own["sequences"][0]["prompt"].startswith("QRS")
    assert not other["is_own"] and other["sequences"][0]["prompt"] is other["sequences"][0]["output"] is None
    assert server.request(path, headers=authorization("alice"), method="DELETE")[0] == 403
    assert asked.is_alive()
    assert server.request(path, headers=authorization(HOSTILE), method="DELETE")[0] == 204
    wait_until(lambda: not asked.is_alive(), "the end")
    assert server.json(path, headers=authorization(HOSTILE))[1]["sequences"] == []


def test_nobody_cancels_a_search_of_another_key(server: ServerProcess) -> None:
    """A search has no sequences of its own, by which its owner is told: those of its beams have other ids."""
    asked = threading.Thread(target=complete, args=(server, "QRS", HOSTILE), kwargs={"max_tokens": 1500}, daemon=True)
    asked.start()
    found: list[str] = []
    wait_until(lambda: found.extend(requests_of(server, HOSTILE)) or bool(found), "the request")
    server.request(f"/live/requests/{found[0]}", headers=authorization(HOSTILE), method="DELETE")
    asked.join()
    number = int(found[0].rpartition("-")[2])
    answers: list[tuple[int, Any]] = []
    body = {"prompt": "QRS", "temperature": 0, "ignore_eos": True, "use_beam_search": True, "n": 2, "max_tokens": 60}
    sent = {**authorization(HOSTILE), "X-Request-Id": "search"}
    search = threading.Thread(target=lambda: answers.append(server.json("/v1/completions", body, sent)), daemon=True)
    search.start()
    pause = 0.01  # more and more, or a busy machine would do little else
    while search.is_alive():
        for later in range(1, 4):
            path = f"/live/requests/search-0-{number + later}"
            server.request(path, headers=authorization("alice"), method="DELETE")
        time.sleep(pause)
        pause *= 1.5
    (status, answer) = answers[0]
    assert status == 200 and answer["choices"][0]["finish_reason"] == "length", answer


def requests_of(server: ServerProcess, key: str) -> list[str]:
    """Ids of a key's requests, as the stream has them."""
    tick = first_events(server, "/live/events", key, 2)[1]
    return [row["id"] for row in tick["requests"] if row["tenant"] == key]


def first_events(server: ServerProcess, path: str, key: str, count: int) -> list[dict[str, Any]]:
    """The first events of a stream."""
    events = []
    with urlopen(Request(server.url + path, headers=authorization(key)), timeout=20) as answer:
        while len(events) < count and (line := answer.readline()):
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
    return events


def test_the_stream_begins_with_history_and_goes_on_at_two_hertz(server: ServerProcess) -> None:
    time.sleep(1)
    start, *ticks = first_events(server, "/live/events", "alice", 4)
    info = start["info"]
    assert start["type"] == "start" and info["key"] == "alice"
    assert (info["kept_option"], info["kept_default"], info["kept_of"]) == ("retain_blocks", 2, 8)
    assert info["pair_bytes"] > 0
    assert len(start["history"]) >= 2 and all(len(sample) == len(start["columns"]) for sample in start["history"])
    times = [tick["sample"][0] for tick in ticks]
    assert start["history"][-1][0] < times[0] and times[2] - times[0] == pytest.approx(1, abs=0.6)


# The monitor


@pytest.fixture
def monitor(browser: Browser, server: ServerProcess, load: Load) -> Iterator[Page]:
    with watched_page(browser, server.url, path="/#monitor", key=KEYS["alice"]) as found:
        found.wait_for_selector("#requests tbody tr")
        yield found


def legend(page: Page, chart: str) -> dict[str, str]:
    """Names and values of a chart's series."""
    script = "items => items.map(item => [item.childNodes[1].textContent.trim(), item.lastChild.textContent])"
    return dict(page.locator(f"#{chart} .legend li:not(.when)").evaluate_all(script))


def test_the_pool_moves_and_compression_shows(monitor: Page) -> None:
    wait_for(monitor, "[...document.querySelectorAll('#pool .legend b')][1].textContent !== '0'")
    values = {name: int(value.replace(",", "")) for name, value in legend(monitor, "pool").items()}
    need = values.pop("without compression")
    assert sum(values.values()) == 320 and values["compressed"] > 0
    assert need > 320 - values["free"] - values["reusable"]
    shape = "document.querySelector('#pool svg path[fill*=compressed]').getAttribute('d')"
    before = monitor.evaluate(shape)
    wait_for(monitor, f"{shape} !== {before!r}")
    assert monitor.locator("#figures dd").nth(1).inner_text().startswith("4\n")
    assert "2 sequences waiting: the first for a place" in monitor.inner_text("#waiting-for")
    assert re.search(r"· \d+ windows? compressed, [\d,]+ pairs dropped", monitor.inner_text("#events"))
    assert re.search(r"alice\s+4\s+2\s+[1-9]", monitor.inner_text("#keys tbody"))


def test_the_price_of_a_step_shows(monitor: Page) -> None:
    wait_for(monitor, "!document.querySelector('#gap .legend b').textContent.includes('–')")
    assert re.fullmatch(r"[\d.]+ m?s", legend(monitor, "step")["model"])
    assert int(legend(monitor, "speed")["all requests"].replace(",", "")) > 0
    assert legend(monitor, "gap").keys() == legend(monitor, "first").keys() == {"median", "99th percentile"}


def test_a_request_is_opened(monitor: Page) -> None:
    windows = "[...document.querySelectorAll('#requests [data-label=Windows]')]"
    wait_for(monitor, f"{windows}.some(x => x.textContent > '0')")
    rows = monitor.locator("#requests tbody tr")
    row = rows.filter(has=monitor.locator("[data-label=Windows]", has_text=re.compile("^[1-9]"))).last
    name = row.locator("button.link").inner_text()
    rows.locator("button.link", has_text=name).focus()  # the last row may be another one by now
    monitor.keyboard.press("Enter")
    monitor.wait_for_selector("#detail .strip rect")
    settled(monitor)
    assert monitor.inner_text("#detail h2") == name
    monitor.click("#detail summary >> text=as text")
    monitor.locator("#detail .spans li").first.wait_for()
    spans = monitor.locator("#detail .spans li").all_inner_texts()
    assert any(re.search(r": 32 of 128 kept$", span) for span in spans), spans
    assert len(monitor.inner_text("#detail-output")) > 20


def test_a_request_is_cancelled(monitor: Page, load: Load) -> None:
    before = len(load.outputs)
    names = monitor.locator("#requests tbody tr button.link")
    name = names.last.inner_text()  # which has most of its tokens to come
    names.filter(has_text=name).focus()
    monitor.keyboard.press("Enter")
    monitor.click("#detail-cancel")
    wait_for(monitor, "document.querySelector('#detail-note').textContent === 'The request has ended.'")
    wait_until(lambda: any(output.get("finish_reason") == "abort" for output in load.outputs[before:]), "the abort")
    monitor.keyboard.press("Escape")
    wait_for(monitor, "!document.querySelector('#detail')")
    wait_for(monitor, f"![...document.querySelectorAll('#requests button.link')].some(x => x.textContent === {name!r})")


def test_charts_are_read_by_keyboard(monitor: Page) -> None:
    monitor.keyboard.press("Tab")
    assert monitor.evaluate("document.activeElement.className") == "skip"
    for _ in range(20):
        monitor.keyboard.press("Tab")
        if monitor.evaluate("document.activeElement.closest('#pool') !== null"):
            break
    monitor.keyboard.press("ArrowLeft")
    monitor.keyboard.press("ArrowLeft")
    settled(monitor)
    assert monitor.inner_text("#pool .when").endswith(" ago")
    monitor.keyboard.press("Escape")
    settled(monitor)
    assert monitor.inner_text("#pool .when") == "now"


LEAVING = """[...document.querySelectorAll(".chart > svg")].flatMap(chart => {
  const room = chart.getBoundingClientRect();
  return [...chart.querySelectorAll("text")].filter(text => {
    const { left, right, top, bottom } = text.getBoundingClientRect();
    return left < room.left - 1 || right > room.right + 1 || top < room.top - 2 || bottom > room.bottom + 2;
  }).map(text => text.textContent);
})"""
ABOVE = """[...document.querySelectorAll(".chart > svg")].flatMap(chart => {
  const top = Math.min(...[...chart.querySelectorAll(".grid")].map(line => Number(line.getAttribute("y1"))));
  return [...chart.querySelectorAll("path.line, path.edge")]
    .flatMap(path => path.getAttribute("d").match(/,-?[\\d.]+/g) ?? [])
    .filter(y => Number(y.slice(1)) < top - 0.2);
})"""


@pytest.mark.parametrize("size", [(390, 844), (1280, 800)])
def test_axes_hold_what_they_show(browser: Browser, server: ServerProcess, load: Load, size: tuple[int, int]) -> None:
    """No line is cut off, no label leaves its chart, counts have whole labels, and one glance has all charts."""
    viewport = {"width": size[0], "height": size[1]}
    with watched_page(browser, server.url, path="/#monitor", key=KEYS["alice"], viewport=viewport) as page:
        page.wait_for_selector("#requests tbody tr")
        page.wait_for_selector("#first svg text")
        wait_for(page, "document.querySelectorAll('#gap .chart > svg path.line').length === 2")
        assert page.evaluate(LEAVING) == [] and page.evaluate(ABOVE) == [] and not scrolls_sideways(page)
        for chart in ("pool", "queue", "speed"):
            labels = page.locator(f"#{chart} svg text[text-anchor=end]:not(:text('now'))").all_text_contents()
            assert len(set(labels)) == len(labels) > 1 and all(re.fullmatch(r"[\d,]+", label) for label in labels)
        bottom = page.evaluate("document.querySelector('.charts').getBoundingClientRect().bottom")
        assert bottom <= size[1]
        assert page.evaluate("document.documentElement.scrollHeight") == size[1]  # the monitor alone scrolls


def test_hostile_names_stay_text(browser: Browser, server: ServerProcess) -> None:
    """In a prompt, in an output and in the name of a key."""
    asked = threading.Thread(target=complete, args=(server, HOSTILE, HOSTILE), kwargs={"max_tokens": 3000}, daemon=True)
    asked.start()
    with watched_page(browser, server.url, path="/#monitor", key=KEYS[HOSTILE]) as page:
        row = page.locator("#requests tbody tr", has_text=HOSTILE)
        row.first.wait_for()
        settled(page)
        assert HOSTILE in page.inner_text("#settings")
        row.first.locator("button.link").click()
        page.wait_for_selector("#detail .strip rect")
        page.click("#detail summary >> text=Prompt")
        settled(page)
        assert page.inner_text("#detail pre >> nth=0").startswith(HOSTILE)
        assert page.locator("img").count() == 0 and "harmed" not in page.title()
        page.click("#detail-cancel")
        wait_until(lambda: not asked.is_alive(), "the end")


def test_refused_requests_are_listed_without_their_text(monitor: Page, server: ServerProcess) -> None:
    body = {"model": "none-such-secret", "messages": []}
    assert server.json("/v1/chat/completions", body, authorization("alice"))[0] == 404
    monitor.wait_for_selector("#refused li >> text=404 NotFoundError · /v1/chat/completions · alice")
    assert "secret" not in monitor.inner_text("#refused")
