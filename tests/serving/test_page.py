"""The live page in a real browser, while a load runs; and the routes behind it."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any
from urllib.request import Request, urlopen

import pytest

from tests.helpers.browser import open_browser, watched_page
from tests.helpers.checkpoints import make_checkpoint
from tests.helpers.server import ServerProcess
from tests.helpers.tokenizers import byte_level
from tests.helpers.waiting import wait_until

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Page

HOSTILE = "<img src=x onerror=document.title='harmed'>"
KEYS = {"alice": "alice-key", HOSTILE: "bob-key"}
COMPRESSION = "method=kara,period=16,window_blocks=8,retain_blocks=2,buffer=16,chunk_budget=8"
ENGINE = ("--block-size", "16", "--num-gpu-blocks-override", "320", "--max-num-seqs", "4")
PHONE = {"width": 390, "height": 844}


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
    options = ("--api-key-file", str(file), "--shutdown-timeout", "0", "--compression", COMPRESSION)
    process = ServerProcess(str(path), *ENGINE, *options)
    yield process
    with urlopen(Request(process.url + "/live/events", headers=authorization("alice")), timeout=60) as answer:
        assert process.stop() == 0
        assert answer.read().endswith(b"data: [DONE]\n\n")  # an open page does not hold up the end


@pytest.fixture(scope="module")
def load(server: ServerProcess) -> Iterator[Load]:
    running = Load(server, clients=6)
    yield running
    running.stop()


@pytest.fixture(scope="module")
def browser() -> Iterator[Browser]:
    with open_browser() as found:
        yield found


@pytest.fixture
def page(browser: Browser, server: ServerProcess, load: Load) -> Iterator[Page]:
    with watched_page(browser, server.url, key=KEYS["alice"]) as found:
        found.wait_for_selector("#requests tbody tr")
        yield found


def legend(page: Page, chart: str) -> dict[str, str]:
    """Names and values of a chart's series."""
    script = "items => items.map(item => [item.childNodes[1].textContent.trim(), item.lastChild.textContent])"
    return dict(page.locator(f"#{chart} .legend li:not(.when):visible").evaluate_all(script))


def wait_for(page: Page, expression: str) -> None:
    """Wait until JavaScript is true. The page's policy forbids what Playwright's own function does."""
    wait_until(lambda: page.evaluate(expression), expression, 30)


def scrolls_sideways(page: Page) -> bool:
    return page.evaluate("document.documentElement.scrollWidth > document.documentElement.clientWidth")


# In the browser


def test_the_pool_moves_and_compression_shows(page: Page) -> None:
    wait_for(page, "[...document.querySelectorAll('#pool .legend b')][1].textContent !== '0'")
    values = {name: int(value.replace(",", "")) for name, value in legend(page, "pool").items()}
    need = values.pop("without compression")
    assert sum(values.values()) == 320 and values["compressed"] > 0
    assert need > 320 - values["free"] - values["reusable prefixes"]
    shape = "document.querySelector('#pool svg path[fill*=compressed]').getAttribute('d')"
    before = page.evaluate(shape)
    wait_for(page, f"{shape} !== {before!r}")
    assert page.locator("#figures dd").nth(1).inner_text().startswith("4\n")
    assert "2 sequences waiting: the first for a place" in page.inner_text("#waiting-for")


def test_the_price_of_a_step_shows(page: Page) -> None:
    wait_for(page, "!document.querySelector('#gap .legend b').textContent.includes('–')")
    assert re.fullmatch(r"[\d.]+ m?s", legend(page, "step")["model"])
    assert int(legend(page, "speed")["tokens/s"].replace(",", "")) > 0
    assert legend(page, "gap").keys() == legend(page, "first").keys() == {"median", "99th percentile"}


def test_a_request_is_opened_and_cancelled(page: Page, load: Load) -> None:
    wait_for(page, "[...document.querySelectorAll('#requests [data-label=Windows]')].some(x => x.textContent > '0')")
    row = page.locator("#requests tbody tr", has=page.locator("[data-label=Windows]", has_text=re.compile("^[1-9]")))
    name = row.first.locator("button.link").inner_text()
    row.first.locator("button.link").click()
    page.wait_for_selector("#detail .strip svg > rect")
    assert page.inner_text("#detail-title") == name
    page.click("#detail .strip summary")
    spans = page.locator("#detail .strip li").all_inner_texts()
    assert any(re.search(r": 32 of 128 kept$", span) for span in spans), spans
    assert len(page.inner_text("#detail-body pre >> nth=1")) > 20
    before = len(load.outputs)
    page.click("#detail-cancel")
    wait_for(page, "document.querySelector('#detail-note').textContent === 'The request has ended.'")
    wait_until(lambda: any(output.get("finish_reason") == "abort" for output in load.outputs[before:]), "the abort")
    page.click("#detail-close")
    wait_for(page, f"![...document.querySelectorAll('#requests button.link')].some(x => x.textContent === {name!r})")


def test_all_can_be_done_by_keyboard(page: Page) -> None:
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.className") == "skip"
    for _ in range(20):
        page.keyboard.press("Tab")
        if page.evaluate("document.activeElement.closest('#pool') !== null"):
            break
    page.keyboard.press("ArrowLeft")
    page.keyboard.press("ArrowLeft")
    assert page.inner_text("#pool .when").endswith(" ago")
    page.keyboard.press("Escape")
    assert page.inner_text("#pool .when") == "now"
    opener = page.locator("#requests button.link").first
    opener.focus()
    page.keyboard.press("Enter")
    page.wait_for_selector("#detail[open]")
    page.keyboard.press("Escape")
    page.wait_for_selector("#detail:not([open])", state="attached")
    assert page.evaluate("document.activeElement.className") == "link"


@pytest.mark.parametrize("scheme", ["light", "dark"])
def test_a_phone_shows_all_without_scrolling_sideways(
    browser: Browser, server: ServerProcess, load: Load, scheme: str
) -> None:
    options = {"viewport": PHONE, "color_scheme": scheme, "reduced_motion": "reduce"}
    with watched_page(browser, server.url, key=KEYS["alice"], **options) as page:
        page.wait_for_selector("#requests tbody tr")
        page.check("#compare")
        assert not scrolls_sideways(page)
        bright = page.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/)[0] > 128")
        assert bright == (scheme == "light")
        page.locator("#requests button.link").first.click()
        page.wait_for_selector("#detail .strip svg > rect")
        assert not scrolls_sideways(page)
        box = page.locator("#detail").bounding_box()
        assert box and box["x"] >= 0 and box["x"] + box["width"] <= PHONE["width"]


WIDE = """async () => {
  const { Chart } = await import("/page/chart.js"), format = await import("/page/format.js");
  for (const [name, top] of [["seconds", 0.0799], ["seconds", 0.801], ["seconds", 3590], ["whole", 1234567]]) {
    const series = [{ name: "value", tone: "prompt", value: point => point.value }];
    const options = { label: name, series, format: format[name], marks: () => "▾" };
    const chart = new Chart(document.querySelector("#queue"), options);
    chart.update([{ time: 0, value: 0 }, { time: 60, value: top }], 60);
  }
}"""
LEAVING = """[...document.querySelectorAll(".chart > svg, .strip > svg")].flatMap(chart => {
  const room = chart.getBoundingClientRect();
  return [...chart.querySelectorAll("text")].filter(text => {
    const box = text.getBoundingClientRect();
    return box.left < room.left || box.right > room.right || box.top < room.top || box.bottom > room.bottom;
  }).map(text => text.textContent);
})"""


@pytest.mark.parametrize("width", [PHONE["width"], 1280])
def test_no_label_leaves_its_chart(browser: Browser, server: ServerProcess, load: Load, width: int) -> None:
    """In the charts of the page, in others with long labels, and under the strip of a request."""
    viewport = {"width": width, "height": PHONE["height"]}
    with watched_page(browser, server.url, key=KEYS["alice"], viewport=viewport) as page:
        page.wait_for_selector("#requests tbody tr")
        page.wait_for_selector("#first svg text")
        page.evaluate(WIDE)
        labels = page.locator(".chart > svg text").all_text_contents()
        assert {"80.0 ms", "1,500,000", "▾", "now"} <= set(labels) and len(labels) > 40
        assert page.evaluate(LEAVING) == []
        page.locator("#requests button.link").first.click()
        page.wait_for_selector("#detail .strip svg > rect")
        assert page.evaluate(LEAVING) == [] and not scrolls_sideways(page)
        sizes = (
            "[...document.querySelectorAll('.strip svg text, .strip .ends')].map(x => x.getBoundingClientRect().height)"
        )
        assert page.evaluate(sizes) and min(page.evaluate(sizes)) > 10  # it can be read on a phone, too


def test_hostile_text_stays_text(browser: Browser, server: ServerProcess) -> None:
    """In a prompt, in an output and in the name of a key."""
    asked = threading.Thread(target=complete, args=(server, HOSTILE, HOSTILE), kwargs={"max_tokens": 3000}, daemon=True)
    asked.start()
    with watched_page(browser, server.url, key=KEYS[HOSTILE]) as page:
        row = page.locator("#requests tbody tr", has_text=HOSTILE)
        row.first.wait_for()
        assert HOSTILE in page.inner_text("#settings")
        row.first.locator("button.link").click()
        page.wait_for_selector("#detail .strip svg > rect")
        page.click("#detail summary >> text=Prompt")
        assert page.inner_text("#detail-body pre >> nth=0").startswith(HOSTILE)
        assert page.locator("img").count() == 0 and "harmed" not in page.title()
        page.click("#detail-cancel")
        wait_until(lambda: not asked.is_alive(), "the end")


def test_a_prompt_is_answered_at_two_settings(browser: Browser, server: ServerProcess, load: Load) -> None:
    with watched_page(browser, server.url, key=KEYS[HOSTILE]) as page:
        page.wait_for_selector("#sides fieldset")
        compare_two_settings(page)


def compare_two_settings(page: Page) -> None:
    """The same prompt with all KV pairs and with few: the texts are equal up to the first compression."""
    page.fill("#prompt", "def add(a, b):")
    page.fill("#max-tokens", "300")
    page.check("#compare")
    page.click("#send")
    page.wait_for_selector("#stop:not([disabled])")
    page.wait_for_selector("#stop[disabled]")
    whole, few = page.locator(".measured").all_inner_texts()
    assert re.match(r"300 tokens · [\d,]+ tokens/s · first token .* · 100% of KV pairs kept$", whole)
    assert re.match(r"300 tokens · [\d,]+ tokens/s · first token .* · [2-7]\d% of KV pairs kept$", few)
    first, second = page.locator("#sides pre[aria-label]").all_inner_texts()
    assert first[:60] == second[:60] and len(first) > 200


def test_a_key_is_asked_for(browser: Browser, server: ServerProcess) -> None:
    context = browser.new_context()
    page = context.new_page()
    page.goto(server.url)
    page.wait_for_selector("#key-dialog[open]")
    page.fill("#key", KEYS["alice"])
    page.keyboard.press("Enter")
    wait_for(page, "document.querySelector('#status').textContent === 'live'")
    assert "key alice" in page.inner_text("#settings")
    context.close()


# The routes


def test_the_files_allow_nothing_foreign_and_need_no_key(server: ServerProcess) -> None:
    status, headers, content = server.request("/")
    assert status == 200
    names = re.findall(r'(?:href|src)="([^"#]+)"', content.decode())
    assert {"page/main.js", "page/style.css"} <= set(names)  # relative, for proxies that give the server a path
    for path in ("/", *(f"/{name}" for name in names)):
        status, headers, content = server.request(path)
        policy = headers["content-security-policy"]
        assert status == 200 and "default-src 'none'" in policy and "unsafe" not in policy
        assert b"http://" not in content.replace(b"http://www.w3.org/", b"") and b"https://" not in content
        assert headers["x-content-type-options"] == "nosniff"
    for path in ("/page/none.js", "/page/..%2Flive.py", "/page/"):
        assert server.request(path)[0] == 404


def test_figures_and_actions_need_a_key(server: ServerProcess) -> None:
    for path, method in (("/live/events", "GET"), ("/live/requests/a", "GET"), ("/live/requests/a", "DELETE")):
        assert server.request(path, method=method)[0] == 401


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


def requests_of(server: ServerProcess, key: str) -> list[str]:
    """Ids of a key's requests, as the stream has them."""
    return [row["id"] for row in first_tick(server, key)["requests"] if row["tenant"] == key]


def first_tick(server: ServerProcess, key: str) -> dict[str, Any]:
    return stream(server, key, 2)[1]


def stream(server: ServerProcess, key: str, count: int) -> list[dict[str, Any]]:
    """The first events of the stream."""
    events = []
    with urlopen(Request(server.url + "/live/events", headers=authorization(key)), timeout=20) as answer:
        while len(events) < count:
            line = answer.readline()
            if line.startswith(b"data: {"):
                events.append(json.loads(line[6:]))
    return events


def test_the_stream_begins_with_history_and_goes_on_at_two_hertz(server: ServerProcess) -> None:
    time.sleep(1)
    start, *ticks = stream(server, "alice", 4)
    info = start["info"]
    assert start["type"] == "start" and info["key"] == "alice"
    assert (info["kept_option"], info["kept_default"]) == ("retain_blocks", 2)
    assert len(start["history"]) >= 2 and all(len(sample) == len(start["columns"]) for sample in start["history"])
    times = [tick["sample"][0] for tick in ticks]
    assert start["history"][-1][0] < times[0] and times[2] - times[0] == pytest.approx(1, abs=0.6)
