"""`kvllm run-batch`: answers beside those of LLM.generate, errors by line, runs that go on where one was cut off."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("httpx2", reason='needs the server\'s packages: pip install "kvllm[serve]"')
pytest.importorskip("starlette", reason='needs the server\'s packages: pip install "kvllm[serve]"')
pytest.importorskip("prometheus_client", reason='needs the server\'s packages: pip install "kvllm[serve]"')

from kvllm import LLM, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.entrypoints import cli
from kvllm.tokenizer import load_tokenizer
from tests.helpers.checkpoints import make_with_package_tokenizer
from tests.helpers.waiting import wait_until

PROMPTS = [f"words: d{i},f9,Y0\n#>d+f=k\nk>k-Y=Q\n" for i in range(8)]
ENGINE = ("--block-size", "16", "--kv-cache-memory-bytes", "64M", "--max-num-seqs", "4")


def request(custom_id: str, prompt: str, **more: Any) -> dict[str, Any]:
    body = {"prompt": prompt, "max_tokens": 30, "temperature": 0}
    return {"custom_id": custom_id, "method": "POST", "url": "/v1/completions", "body": body} | more


def write(path: Path, requests: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(each) + "\n" for each in requests))
    return path


def run(source: Path, target: Path, *more: str) -> int:
    try:
        cli.main(["run-batch", "-i", str(source), "-o", str(target), *ENGINE, *more])
    except SystemExit as ended:
        return ended.code
    return 0


def answers(path: Path) -> dict[str, Any]:
    found = [json.loads(line) for line in path.read_text().splitlines()]
    assert len({each["custom_id"] for each in found}) == len(found)
    return {each["custom_id"]: each for each in found}


def test_answers_are_those_of_the_engine_and_a_second_run_adds_nothing(tmp_path, capsys):
    source = write(tmp_path / "in.jsonl", [request(str(i), prompt) for i, prompt in enumerate(PROMPTS)])
    target = tmp_path / "out.jsonl"
    assert run(source, target, "--max-concurrency", "3") == 0
    assert capsys.readouterr().out == "8 requests: 8 answered, 0 failed; 0 of them in an earlier run\n"
    outputs = LLM(block_size=16).generate(PROMPTS, SamplingParams(temperature=0, max_tokens=30))
    found = answers(target)
    for i, output in enumerate(outputs):
        answer = found[str(i)]
        assert answer["error"] is None and answer["id"].startswith("batch_req_")
        response = answer["response"]
        assert response["status_code"] == 200 and response["request_id"]
        assert response["body"]["choices"][0]["text"] == output.outputs[0].text
        assert response["body"]["object"] == "text_completion"
    before = target.read_bytes()
    assert run(source, target) == 0 and target.read_bytes() == before
    assert "8 of them in an earlier run" in capsys.readouterr().out


def test_embeddings(tmp_path):
    """A pooling model has its own routes."""
    model = tmp_path / "model"
    model.mkdir()
    make_with_package_tokenizer(model)
    requests = [request(str(i), "", url="/v1/embeddings", body={"input": prompt}) for i, prompt in enumerate(PROMPTS)]
    source, target = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    assert run(source, target, "--model", str(model), "--runner", "pooling") == 0
    outputs, found = LLM(str(model), runner="pooling").embed(PROMPTS, use_tqdm=False), answers(target)
    for i, output in enumerate(outputs):
        (data,) = found[str(i)]["response"]["body"]["data"]
        assert data["embedding"] == pytest.approx(output.outputs.embedding, abs=1e-5)


def test_a_file_without_requests_has_no_answers(tmp_path, capsys):
    """A job that has nothing to ask is done, and its next step finds a file."""
    target = tmp_path / "out.jsonl"
    assert run(write(tmp_path / "in.jsonl", []), target) == 0
    assert target.read_bytes() == b"" and capsys.readouterr().out.startswith("0 requests: 0 answered")


def test_failures_stand_in_their_lines(tmp_path, capsys):
    template = tmp_path / "template.jinja"
    template.write_text("{{ messages[0].content }}{{ ends }}\n")
    messages = {"messages": [{"role": "user", "content": "#>d"}], "max_tokens": 5}
    requests = [
        request("good", PROMPTS[0]),
        request("wrong", PROMPTS[0], body={"prompt": "#>d", "temperature": -1}),
        request("model", PROMPTS[0], body={"prompt": "#>d", "model": "gpt"}),
        request("stream", PROMPTS[0], body={"prompt": "#>d", "stream": True}),
        request("route", PROMPTS[0], url="/v1/audio/speech"),
        request("get", PROMPTS[0], method="GET"),
        request("chat", PROMPTS[0], url="/v1/chat/completions", body=messages),
    ]
    source, target = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    options = ("--default-chat-template-kwargs", '{"ends": "+f+f+f"}')
    assert run(source, target, "--served-model-name", "mine", "--chat-template", str(template), *options) == 1
    assert "7 requests: 2 answered, 5 failed" in capsys.readouterr().out
    found = answers(target)
    assert found["good"]["response"]["body"]["model"] == "mine"
    chat = found["chat"]["response"]["body"]
    assert chat["choices"][0]["message"]["role"] == "assistant"
    assert chat["usage"]["prompt_tokens"] == len(load_tokenizer(DEFAULT_MODEL).encode("#>d+f+f+f"))
    assert found["wrong"]["response"]["status_code"] == 400 and found["wrong"]["error"] is None
    assert "temperature" in found["wrong"]["response"]["body"]["error"]["message"]
    assert found["model"]["response"]["status_code"] == 404
    for custom_id in ("stream", "route", "get"):
        assert found[custom_id]["response"] is None and found[custom_id]["error"]["code"] == "invalid_request"
    assert run(source, target) == 1  # the file still has failures


def test_an_interrupted_run_goes_on(tmp_path):
    requests = [
        request(str(i), PROMPTS[i % 8], body={"prompt": "#>d", "max_tokens": 60, "ignore_eos": True}) for i in range(20)
    ]
    source, target = write(tmp_path / "in.jsonl", requests), tmp_path / "out.jsonl"
    command = [sys.executable, "-m", "kvllm", "run-batch", "-i", str(source), "-o", str(target), *ENGINE]
    process = subprocess.Popen(command, env={**os.environ, "OMP_NUM_THREADS": "1"}, stderr=subprocess.DEVNULL)
    wait_until(lambda: target.exists() and target.read_bytes().count(b"\n") >= 3, "the third answer")
    process.send_signal(signal.SIGINT)
    assert process.wait(60) == 130
    done = answers(target)
    assert 3 <= len(done) < 20
    with target.open("a") as file:
        file.write('{"id":"batch_req_cut')  # as a killed process would leave it
    assert run(source, target) == 0
    found = answers(target)
    assert len(found) == 20 and all(found[custom_id] == done[custom_id] for custom_id in done)


@pytest.mark.parametrize(
    ("more", "message"),
    [
        (["--max-concurrency", "0"], "--max-concurrency=0"),
        (["-o", "in.jsonl"], "cannot be input and output"),
        (["-i", "absent.jsonl"], "absent.jsonl cannot be read"),
        (["-o", "absent/out.jsonl"], "cannot be written"),
        (["--tool-call-parser", "perl"], "tool_call_parser='perl' is not known"),
        (["--enable-auto-tool-choice"], "--tool-call-parser auto cannot choose"),
    ],
)
def test_wrong_usage_is_refused(tmp_path, monkeypatch, capsys, more, message):
    monkeypatch.chdir(tmp_path)
    write(tmp_path / "in.jsonl", [request("1", "a")])
    assert run(Path("in.jsonl"), Path("out.jsonl"), *more) == 2
    assert message in capsys.readouterr().err
