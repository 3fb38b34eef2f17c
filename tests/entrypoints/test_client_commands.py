"""`kvllm complete`, `chat`, `top` and `bench serve`, each against `kvllm serve` itself."""

from __future__ import annotations

import io
import json
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("aiohttp", reason='needs the server\'s packages: pip install "kvllm[serve]"')
pytest.importorskip("httpx2", reason='needs the server\'s packages: pip install "kvllm[serve]"')
pytest.importorskip("starlette", reason='needs the server\'s packages: pip install "kvllm[serve]"')
pytest.importorskip("prometheus_client", reason='needs the server\'s packages: pip install "kvllm[serve]"')

import kvllm as package
from kvllm import LLM, SamplingParams
from kvllm.client import address, scrape
from kvllm.client.load import arrival_times
from kvllm.entrypoints import cli
from tests.helpers.server import ServerProcess
from tests.helpers.terminal import Terminal

KEY = "a secret key"
PROMPT = "words: d3,f9,Y0,x9\n#>d+f=k\nk>k-Y=Q\nQ>?Q,k,f\n"
TEMPLATE = "{% for message in messages %}{{ message.content | replace('/', '+') }}\n{% endfor %}"
"""The model's vocabulary has no slash."""


@pytest.fixture(scope="module")
def server(tmp_path_factory) -> Iterator[ServerProcess]:
    """A server with a key, and with a chat template for the model in the package, which has none."""
    template = tmp_path_factory.mktemp("server") / "template.jinja"
    template.write_text(TEMPLATE)
    options = ("--block-size", "16", "--kv-cache-memory-bytes", "64M", "--chat-template", str(template))
    drafts = '{"method": "ngram", "prompt_lookup_min": 1, "prompt_lookup_max": 3}'
    process = ServerProcess(*options, "--speculative-config", drafts, environment={"KVLLM_API_KEY": KEY})
    try:
        yield process
    finally:
        assert process.stop() == 0


@pytest.fixture(scope="module")
def expected() -> str:
    """What the model writes, greedily, in 40 tokens."""
    (output,) = LLM(block_size=16).generate([PROMPT], SamplingParams(temperature=0, max_tokens=40))
    return output.outputs[0].text


@pytest.fixture
def kvllm(server, monkeypatch, capsys) -> Callable[..., tuple[int, str, str]]:
    """Runs a command. Returns its exit code, standard output and standard error."""
    monkeypatch.setenv("KVLLM_API_KEY", KEY)

    def run(*arguments: str, stdin: str = "") -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "stdin", io.StringIO(stdin))
        code = 0
        try:
            cli.main(arguments)
        except SystemExit as ended:
            code = ended.code
        printed = capsys.readouterr()
        return code, printed.out, printed.err

    return run


def metric(server: ServerProcess, name: str) -> float:
    """The sum of a metric's samples."""
    _, _, text = server.request("/metrics", headers={"Authorization": f"Bearer {KEY}"})
    return scrape.parse(text.decode()).values[name]


GREEDY = ("--temperature", "0", "--max-tokens", "40")


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_complete_writes_what_the_model_does(kvllm, server, expected, suffix):
    assert kvllm("complete", "--url", server.url + suffix, "-q", PROMPT, *GREEDY) == (0, expected + "\n", "")


def test_complete_reads_standard_input_and_tells_its_speed(kvllm, server, expected):
    code, out, err = kvllm("complete", "--url", server.url, *GREEDY, "--stats", stdin=PROMPT)
    assert (code, out) == (0, expected + "\n")
    assert err.startswith("TTFT: ") and "40 prompt tokens, 40 tokens in" in err


def test_chat_sends_the_system_prompt_first(kvllm, server):
    """The template joins the messages, so the chat's text continues the same prompt."""
    first, _, rest = PROMPT.partition("\n")
    completed = kvllm("complete", "--url", server.url, "-q", PROMPT, *GREEDY)
    chatted = kvllm("chat", "--url", server.url, "--system-prompt", first, "-q", rest.removesuffix("\n"), *GREEDY)
    assert chatted == completed


def test_wrong_keys_models_and_urls_are_told(kvllm, server, monkeypatch):
    for name in (["gpt"], ["--model", "gpt"], ["--model-name", "gpt"]):
        code, out, err = kvllm("complete", *name, "--url", server.url, "-q", "a")
        assert (code, out) == (1, "") and "404: The model `gpt` does not exist" in err
    code, out, err = kvllm("complete", "--url", server.url, "--api-key", "another", "-q", "a")
    assert (code, out) == (1, "") and "/v1/models was refused with 401" in err
    code, _, err = kvllm("complete", "--url", "ftp://nowhere", "-q", "a")
    assert code == 2 and "is no URL of a server" in err
    code, _, err = kvllm("complete", "--url", "http://127.0.0.1:1", "-q", "a")
    assert code == 1 and "cannot be reached" in err
    code, _, err = kvllm("complete", "--url", server.url)
    assert code == 2 and "standard input is empty" in err


@contextmanager
def other_server(get: dict[str, bytes]) -> Iterator[str]:
    """The URL of a server that answers GET by path, b"" with 404, and dies of a POST."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            body = get.get(self.path, get.get("*", b""))
            self.send_response(200 if body else 404)
            self.send_header("Content-Type", "application/json")
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def do_POST(self) -> None:
            http.socket.close()
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as http:
        thread = threading.Thread(target=http.serve_forever, kwargs={"poll_interval": 0.05})
        thread.start()
        try:
            yield f"http://127.0.0.1:{http.server_port}"
        finally:
            http.shutdown()
            thread.join()


@pytest.mark.parametrize("body", [b"<!doctype html><p>An application</p>", b'{"status": "ok"}', b"[]"])
def test_what_is_no_server_of_models_is_told(kvllm, body):
    with other_server({"*": body}) as url:
        for command in (["chat", "-q", "a", "--url"], ["bench", "serve", "--base-url"], ["top", "--url"]):
            code, out, err = kvllm(*command, url)
            assert (code, out) == (1, "") and "is another server there?" in err


def test_a_server_that_dies_leaves_the_figures(kvllm, tmp_path):
    file = tmp_path / "prompts.jsonl"
    file.write_text('{"prompt": "a"}')
    given = ("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "3", "--max-concurrency", "1")
    files = ("--save-result", "--result-dir", str(tmp_path), "--result-filename", "result.json")
    with other_server({"/v1/models": b'{"data": [{"id": "a"}]}'}) as url:
        code, out, err = kvllm("bench", "serve", "--base-url", url, *given, *files)
    assert code == 1 and "Failed requests:                         3" in out and "connection" in err
    assert json.loads((tmp_path / "result.json").read_text())["failed"] == 3


@pytest.mark.parametrize("url", ["http://127.0.0.1:80a0", "http://?", "http://[::1"])
def test_urls_without_a_host_or_with_a_wrong_port(kvllm, url):
    for command in (["complete", "-q", "a", "--url"], ["bench", "serve", "--base-url"], ["top", "--url"]):
        code, _, err = kvllm(*command, url)
        assert code == 2 and "is no URL of a server" in err


@pytest.mark.parametrize("key", ["sesame\n", "sesame\r", "sésame"])
def test_a_key_that_no_header_can_hold_is_told_and_not_shown(kvllm, monkeypatch, key):
    monkeypatch.setenv("KVLLM_API_KEY", key)
    for command in (["complete", "-q", "a"], ["bench", "serve"], ["top"]):
        code, _, err = kvllm(*command)
        assert code == 2 and "KVLLM_API_KEY has a line end or another" in err and "same" not in err


def test_a_request_that_is_no_json_is_told(kvllm, server):
    code, _, err = kvllm("complete", "--url", server.url, "-q", "a\udcff")
    assert code == 2 and "cannot be written as JSON in UTF-8" in err
    code, _, err = kvllm("complete", "--url", server.url, "-q", "a", "--temperature", "nan")
    assert code == 2 and "cannot be written as JSON in UTF-8" in err


def test_settings_of_compression_reach_the_server(kvllm, server):
    """A server without compression refuses them."""
    for settings in ("budget_tokens=64", '{"budget_tokens": 64}'):
        code, _, err = kvllm("complete", "--url", server.url, "-q", PROMPT, "--compression", settings)
        assert code == 1 and "refused with 400" in err and "compression" in err
    code, _, err = kvllm("chat", "--url", "http://127.0.0.1:1", "-q", PROMPT, "--compression", "budget_token=64")
    assert code == 2 and "did you mean budget_tokens?" in err


def test_a_chat_at_a_terminal_remembers_and_survives_errors(server, expected):
    command = [sys.executable, "-m", "kvllm", "chat", "--url", server.url, "--api-key", KEY, *GREEDY]
    terminal = Terminal(command)
    terminal.wait_for("> ")
    terminal.type("\x1b\x1b~~~ € ~~~\n")  # the model has no such characters
    terminal.wait_for("error: ")
    terminal.wait_for("> ")
    counts = [metric(server, "vllm:prompt_tokens_total")]
    for question in (PROMPT.splitlines()[0], "#>d+f=k"):
        terminal.type(question + "\n")
        terminal.wait_for("\r\n> ")
        counts.append(metric(server, "vllm:prompt_tokens_total"))
    # The second question has 7 tokens. Before it stand the first question and its answer, each with a line break.
    assert counts[2] - counts[1] > counts[1] - counts[0] + 1 + 7 + 1
    terminal.type("\x04")
    assert terminal.close() == 0


def test_commands_of_a_chat_stay_out_of_it(server, tmp_path):
    """At a terminal. What is saved is what was sent, and the server counts what was sent."""
    command = [sys.executable, "-m", "kvllm", "chat", "reasoner", "--url", server.url, "--api-key", KEY]
    terminal = Terminal([*command, "--temperature", "0", "--max-tokens", "5"])
    file = tmp_path / "chat.json"

    def say(line: str) -> str:
        terminal.type(line + "\n")
        return terminal.wait_for("\r\n> ")

    assert "/help lists commands" in terminal.wait_for("> ")
    before = metric(server, "vllm:prompt_tokens_total")
    assert "/save FILE" in say("/help")
    assert "error: /sytem is no command; did you mean /system? Write //sytem to send it" in say("/sytem a")
    assert "error: /etc/hosts is no command" in say("  /etc/hosts")
    assert "There is no system prompt" in say("/system")
    say("/system carry")
    assert "\r\ncarry" in say("/system")
    assert "error: /save needs the name of a file" in say("/save")
    assert f"error: {tmp_path} cannot be written: Is a directory" in say(f"/save {tmp_path}")
    assert metric(server, "vllm:prompt_tokens_total") == before
    say("//d>")
    say("#>d")
    say(f"/save {file}")
    saved = json.loads(file.read_text())
    contents = [(message["role"], message["content"]) for message in saved["messages"]]
    assert saved["model"] == "reasoner" and [role for role, _ in contents] == ["system", *("user", "assistant") * 2]
    assert [contents[i][1] for i in (0, 1, 3)] == ["carry", "/d>", "#>d"]
    status, answer = server.json(
        "/v1/chat/completions", saved | {"max_tokens": 1}, {"Authorization": f"Bearer {KEY}"}
    )  # it is a request
    assert status == 200 and answer["usage"]["prompt_tokens"] > 10
    say("/system note")
    say("/cl\t")  # the Tab key completes it
    say(f"/save {file}")
    assert json.loads(file.read_text())["messages"] == [{"role": "system", "content": "note"}]
    terminal.type("/quit\n")
    assert terminal.close() == 0


def test_one_prompt_is_sent_as_it_is(kvllm, server, expected):
    """Without a terminal, where nobody types commands."""
    completed = kvllm("complete", "--url", server.url, "-q", "+d>\n", *GREEDY)
    assert kvllm("chat", "--url", server.url, "-q", "/d>", *GREEDY) == completed


def test_an_interrupt_ends_the_answer_alone(server):
    command = [sys.executable, "-m", "kvllm", "complete", "--url", server.url, "--api-key", KEY, "--max-tokens", "4000"]
    terminal = Terminal([*command, "--temperature", "0"])
    terminal.wait_for("> ")
    terminal.type("#>d\n")
    terminal.wait_for("dddd")  # which the model goes on with
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("\r\n> ")
    assert terminal.interrupt_and_close() == 130  # at the prompt it ends the command


def test_top_shows_what_the_server_counts(kvllm, server):
    body = {"prompt": "#>d", "max_tokens": 50, "ignore_eos": True}
    server.request("/v1/completions", body, {"Authorization": f"Bearer {KEY}"})
    code, out, _ = kvllm("top", "--url", server.url)
    assert code == 0 and "\x1b" not in out and "reasoner" in out
    tokens = int(metric(server, "vllm:generation_tokens_total"))
    rows = {line[:28].strip(): line[28:].split() for line in out.splitlines()}
    assert rows["output tokens"] == [f"{tokens:,}"] and tokens > 40
    assert float(rows["time to first token"][0].replace(",", "")) > 0


def test_top_refreshes_a_terminal_while_requests_run(server):
    command = [sys.executable, "-m", "kvllm", "top", "--url", server.url, "--api-key", KEY, "--interval", "0.2"]
    body = {"prompt": "#>d", "max_tokens": 500, "ignore_eos": True}
    seen = threading.Event()

    def load() -> None:
        while not seen.is_set():
            server.request("/v1/completions", body, {"Authorization": f"Bearer {KEY}"})

    thread = threading.Thread(target=load)
    thread.start()
    terminal = Terminal(command)
    try:
        terminal.wait_for("running 1")
        terminal.wait_for("/s")
    finally:
        seen.set()
        thread.join()
    terminal.wait_for("running 0")
    terminal.process.send_signal(signal.SIGINT)
    terminal.wait_for("\x1b[?1049l")
    assert terminal.close() == 130


def bench(kvllm: Callable[..., tuple[int, str, str]], server: ServerProcess, folder: Path, *more: str) -> Any:
    """The result file of a load that ended well, with what was printed."""
    files = ("--save-detailed", "--result-dir", str(folder), "--result-filename", "result.json")
    code, out, err = kvllm("bench", "serve", "--base-url", server.url, *files, *more)
    assert (code, err) == (0, ""), out + err
    return json.loads((folder / "result.json").read_text()) | {"printed": out}


def test_a_closed_loop_counts_what_the_server_counts(kvllm, server, tmp_path):
    names = ("vllm:prompt_tokens_total", "vllm:generation_tokens_total", "vllm:time_to_first_token_seconds_sum")
    before = [metric(server, name) for name in names]
    load = ("--num-prompts", "12", "--max-concurrency", "3", "--random-input-len", "30", "--random-output-len", "20")
    result = bench(kvllm, server, tmp_path, *load, "--random-range-ratio", "0.5", "--ignore-eos", "--plot")
    prompts, outputs, seconds = (metric(server, name) - each for name, each in zip(names, before, strict=True))
    assert (result["completed"], result["total_input_tokens"], result["total_output_tokens"]) == (12, prompts, outputs)
    assert len(set(result["input_lens"])) > 3 and set(result["input_lens"]) <= set(range(15, 46))
    assert len(set(result["output_lens"])) > 3 and set(result["output_lens"]) <= set(range(10, 31))
    assert result["max_concurrent_requests"] == 3
    assert result["mean_ttft_ms"] >= 1000 * seconds / 12  # the client's time holds the server's
    assert f"Total generated tokens:                  {outputs:.0f}\n" in result["printed"]
    assert "P99 ITL (ms):" in result["printed"] and "Client CPU time per chunk (us):" in result["printed"]
    assert result["versions"]["aiohttp"]
    assert (tmp_path / "result.png").read_bytes().startswith(b"\x89PNG")


def test_a_result_has_its_command_without_the_key(kvllm, server, tmp_path, monkeypatch):
    load = ("--num-prompts", "1", "--random-input-len", "5", "--random-output-len", "2")
    for given in (["--api-key", KEY], [f"--api-key={KEY}"]):
        monkeypatch.setattr(sys, "argv", ["kvllm", "bench", "serve", *given, "--seed", "0"])
        result = bench(kvllm, server, tmp_path, *load, *given)
        assert KEY not in json.dumps(result)
        assert result["command"] in (
            "kvllm bench serve --api-key ... --seed 0",
            "kvllm bench serve --api-key=... --seed 0",
        )


def test_an_open_loop_keeps_to_its_arrivals(kvllm, server, tmp_path):
    load = ("--num-prompts", "15", "--request-rate", "20", "--burstiness", "0.5", "--seed", "3")
    sizes = ("--random-input-len", "8", "--random-output-len", "4", "--random-prefix-len", "32")
    result = bench(kvllm, server, tmp_path, *load, *sizes, "--ignore-eos", "--goodput", "ttft:60000")
    due = arrival_times(15, 20.0, 0.5, seed=3)
    late = [start - when for start, when in zip(result["start_times"], due, strict=True)]
    assert min(late) >= 0 and sorted(late)[7] < 0.5
    assert result["input_lens"] == [40] * 15
    assert result["request_goodput"] == pytest.approx(15 / result["duration"])


def test_prompts_of_a_file(kvllm, server, tmp_path, expected):
    file = tmp_path / "prompts.jsonl"
    lines = [{"prompt": PROMPT, "output_tokens": 40}, {"prompt": [5, 6, 7], "output_tokens": 3}]
    file.write_text("\n".join(map(json.dumps, lines)))
    given = ("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "3", "--ignore-eos")
    result = bench(kvllm, server, tmp_path, *given)
    assert result["input_lens"] == [40, 3, 40] and result["output_lens"] == [40, 3, 40]


def test_a_load_says_what_was_drafted(kvllm, server, tmp_path):
    names = ("drafts", "draft_tokens", "accepted_tokens")
    before = [metric(server, f"vllm:spec_decode_num_{name}_total") for name in names]
    file = tmp_path / "prompts.jsonl"
    file.write_text(json.dumps({"prompt": PROMPT, "output_tokens": 100}))
    given = ("--dataset-name", "custom", "--dataset-path", str(file), "--num-prompts", "2", "--max-concurrency", "1")
    result = bench(kvllm, server, tmp_path, *given, "--ignore-eos", "--temperature", "0")
    after = [metric(server, f"vllm:spec_decode_num_{name}_total") for name in names]
    drafts, tokens, right = (now - then for now, then in zip(after, before, strict=True))
    assert 0 < right < tokens
    found = [result[f"spec_decode_{name}"] for name in ("num_drafts", "draft_tokens", "accepted_tokens")]
    assert found == [drafts, tokens, right]
    assert sum(result["spec_decode_per_position_acceptance_rates"]) == pytest.approx(right / drafts)
    assert f"Acceptance length:                       {1 + right / drafts:.2f}" in result["printed"]


def test_chats(kvllm, server, tmp_path):
    load = ("--endpoint-type", "chat", "--num-prompts", "4", "--random-input-len", "20", "--random-output-len", "10")
    result = bench(kvllm, server, tmp_path, *load, "--ignore-eos", "--temperature", "0")
    assert result["total_output_tokens"] == 40
    assert all(21 <= length <= 22 for length in result["input_lens"])  # the template adds a line break
    assert max(map(len, result["itls"])) <= 9  # the chunk with the role alone is no token


def test_files_that_cannot_be_written_are_told_before_the_load(kvllm, server, tmp_path):
    taken = tmp_path / "file"
    taken.write_text("")
    before = metric(server, "vllm:prompt_tokens_total")
    load = ("--num-prompts", "1", "--random-input-len", "5", "--save-result", "--result-dir", str(taken))
    code, out, err = kvllm("bench", "serve", "--base-url", server.url, *load)
    assert (code, out) == (1, "") and f"error: {taken}: " in err
    assert metric(server, "vllm:prompt_tokens_total") == before


def test_plots_have_the_names_of_their_results(kvllm, server, tmp_path):
    load = ("--num-prompts", "1", "--random-input-len", "5", "--random-output-len", "2", "--result-dir", str(tmp_path))
    for name in ("rate0.25", "rate0.5"):
        kvllm("bench", "serve", "--base-url", server.url, *load, "--plot", "--result-filename", name)
    assert {file.name for file in tmp_path.iterdir()} == {"rate0.25.png", "rate0.5.png"}


def test_a_trace_at_its_own_times(kvllm, server, tmp_path):
    file = tmp_path / "trace.jsonl"
    requests = [(1000, 9, 3), (1500, 9000, 3), (1250, 7, 2), (2000, 5, 4)]  # one is longer than the model allows
    names = ("timestamp", "input_length", "output_length")
    file.write_text("\n".join(json.dumps(dict(zip(names, each, strict=True))) for each in requests))
    given = ("--dataset-name", "trace", "--dataset-path", str(file), "--self-timed", "--ignore-eos")
    result = bench(kvllm, server, tmp_path, *given)
    assert (result["input_lens"], result["output_lens"]) == ([9, 7, 5], [3, 2, 4])
    late = [start - due for start, due in zip(result["start_times"], (0, 0.25, 1.0), strict=True)]
    assert min(late) >= 0 and late[0] < 0.5


def test_failures_are_counted_by_kind(kvllm, server):
    load = ("--num-prompts", "2", "--random-input-len", "9000", "--random-output-len", "5")
    code, out, err = kvllm("bench", "serve", "--base-url", server.url, *load)
    assert code == 1 and "HTTP 400 invalid_request_error:          2\n" in out
    assert "maximum context length is 4096 tokens" in err


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--request-rate", "0"], "--request-rate=0.0"),
        (["--goodput", "ttft"], "--goodput 'ttft' is no limit"),
        (["--dataset-name", "trace"], "need --dataset-path"),
        (["--self-timed"], "--self-timed takes the arrivals of a trace"),
        (["--compression", "often"], "'often' is no setting"),
        (["--compression", '{"retain_block": 4}'], "did you mean retain_blocks?"),
        (["--extra-body", "[]"], "is no JSON object"),
        (["--percentile-metrics", "speed"], "'speed'"),
        (["--metric-percentiles", "101"], "'101'"),
        (["--max-concurrency", "0"], "--max-concurrency=0"),
    ],
)
def test_wrong_loads_are_refused(kvllm, server, more, message):
    code, out, err = kvllm("bench", "serve", "--base-url", server.url, *more)
    assert (code, out) == (2, "") and message in err


def test_a_chat_without_a_server_starts_one(kvllm, monkeypatch) -> None:
    monkeypatch.setattr(address, "DEFAULT_URL", "http://127.0.0.1:1")
    model = str(Path(package.__file__).parent / "assets/reasoner")
    code, _, err = kvllm("chat", model, "-q", "d>", *GREEDY)
    assert code != 0 and f"loading {model} here" in err and "chat template" in err
    assert not [thread for thread in threading.enumerate() if thread.name == "kvllm-server"]
