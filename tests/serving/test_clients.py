"""The server through clients of other projects, unmodified: curl, litellm, langchain-openai, openai-agents,
pydantic-ai, lm-eval, guidellm and schemathesis."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from kvllm import LLM, SamplingParams
from kvllm.engine_args import DEFAULT_MODEL
from tests.helpers.server import ServerProcess
from tests.serving.clients.environment import Clients
from tests.serving.conftest import PROMPT, SERVERS

pytestmark = SERVERS

TEMPLATE = "{%- for message in messages %}{{ message.content }}{% if not loop.last %},{% endif %}{% endfor -%}"
ANSWER = 'Let me look.<tool_call>{"name": "get_weather", "arguments": {"city": "Paris"}}</tool_call>'
PROMPTS = (PROMPT, "words: a1,b2\n#>a+b=c\n", "words: d3,f9\n#>d+f=k\n")
CHOOSE = {
    "task": "choose",
    "output_type": "multiple_choice",
    "doc_to_text": "stem",
    "doc_to_choice": "choices",
    "doc_to_target": 0,
    "metric_list": [{"metric": "acc"}],
}
PERPLEXITY = {
    "task": "perplexity",
    "output_type": "loglikelihood_rolling",
    "doc_to_text": "",
    "doc_to_target": "question",
    "metric_list": [{"metric": "word_perplexity"}],
}
WRITE = {
    "task": "write",
    "output_type": "generate_until",
    "doc_to_text": "question",
    "doc_to_target": "{{choices[0]}}",
    "generation_kwargs": {"until": ["\n"], "max_gen_toks": 24, "do_sample": False},
    "metric_list": [{"metric": "exact_match"}],
}


@pytest.fixture(scope="module")
def clients(tmp_path_factory: pytest.TempPathFactory) -> Clients:
    return Clients(tmp_path_factory.mktemp("clients"))


@pytest.fixture(scope="module")
def chat_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """The model in the package, with a chat template that adds nothing to a single message."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text(TEMPLATE)
    process = ServerProcess("--chat-template", str(template), "--block-size", "16", "--kv-cache-memory-bytes", "256M")
    try:
        yield process
    finally:
        assert process.stop() == 0


def greedy(prompts: Iterable[str], max_tokens: int, **options: Any) -> list[str]:
    """What the engine itself writes after prompts."""
    llm = LLM(block_size=16, kv_cache_memory_bytes=64 << 20)
    params = SamplingParams(temperature=0, max_tokens=max_tokens, **options)
    return [output.outputs[0].text for output in llm.generate(list(prompts), params, use_tqdm=False)]


# curl


def curl(*arguments: str) -> str:
    if shutil.which("curl") is None:
        pytest.skip("needs curl: apt-get install curl")
    return subprocess.run(
        ["curl", "-sS", "--max-time", "60", *arguments], capture_output=True, text=True, check=True
    ).stdout


def test_curl(parrot_server: ServerProcess) -> None:
    url, json_type = parrot_server.url, ("-H", "Content-Type: application/json")
    body = {"messages": [{"role": "user", "content": "Is it fine?"}], "temperature": 0}
    answer = json.loads(curl(f"{url}/v1/chat/completions", *json_type, "-d", json.dumps(body)))
    assert answer["choices"][0]["message"]["content"] == ANSWER
    lines = curl("-N", f"{url}/v1/chat/completions", *json_type, "-d", json.dumps(body | {"stream": True})).splitlines()
    assert lines[-2] == "data: [DONE]" and lines[-1] == ""
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines[:-2] if line]
    assert "".join(chunk["choices"][0]["delta"].get("content") or "" for chunk in chunks) == ANSWER
    assert curl("-o", "/dev/null", "-w", "%{http_code}", f"{url}/v1/completions", *json_type, "-d", "{") == "400"
    assert curl("-o", "/dev/null", "-w", "%{http_code}", "-I", f"{url}/health") == "200"
    # curl asks before it sends a body of this size, and declares no JSON unless it is told to.
    big = {"prompt": [1] * 100, "max_tokens": 1, "user": "x" * 2_000_000}
    expecting = ("-H", "Expect: 100-continue", "--data-binary", "@-", "-o", "/dev/null", "-w", "%{http_code}")
    sent = subprocess.run(
        ["curl", "-sS", "--max-time", "60", f"{url}/v1/completions", *json_type, *expecting],
        input=json.dumps(big), capture_output=True, text=True, check=True)  # fmt: skip
    assert sent.stdout == "200"
    assert curl("-o", "/dev/null", "-w", "%{http_code}", f"{url}/v1/completions", "-d", "{}") == "415"


# Clients in .venv-clients


def test_litellm(clients: Clients, parrot_server: ServerProcess) -> None:
    found = clients.call("use_litellm", parrot_server.url, "parrot")
    assert found["content"] == found["streamed"] == ANSWER and found["reasoning"] == "Hm, weather."
    assert found["tokens"] > 0 and len(found["texts"]) == 2
    assert found["too_long"] == "ContextWindowExceededError"
    assert found["no_model"] == "NotFoundError" and found["bad_value"] == "BadRequestError"


def test_langchain(clients: Clients, parrot_server: ServerProcess) -> None:
    found = clients.call("use_langchain", parrot_server.url, "parrot")
    assert found["content"] == found["streamed"] == ANSWER and found["batch"] == [ANSWER, ANSWER]
    assert found["call"]["name"] == "GetWeather" and found["call"]["args"]["city"] in ("Paris", "Rome")
    assert len(found["parsed"]) == 2 and set(found["parsed"]) <= {"Paris", "Rome"}
    assert found["tokens"] > 0 and isinstance(found["text"], str)


def test_openai_agents(clients: Clients, parrot_server: ServerProcess) -> None:
    """A tool of an MCP server is called, and a stored response goes on."""
    found = clients.call("use_openai_agents", parrot_server.url, "parrot")
    assert all("Paris: fine" in found[name] for name in ("OpenAIChatCompletionsModel", "OpenAIResponsesModel"))
    first, second = found["tokens"]
    assert found["text"] == found["kept"] == ANSWER and second > first


def test_pydantic_ai(clients: Clients, parrot_server: ServerProcess) -> None:
    """The second turn has the tokens of both, and sends one."""
    found = clients.call("use_pydantic_ai", parrot_server.url, "parrot")
    first, second = found["tokens"]
    assert found["texts"] == [ANSWER, ANSWER] and second > first


@pytest.fixture(scope="module")
def task(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tasks. The first choice of each question is what the model would write."""
    folder = tmp_path_factory.mktemp("task")
    begun = zip(PROMPTS, greedy(PROMPTS, 1), greedy(PROMPTS, 7), strict=True)
    rows = [  # the answer goes on after its first token: lm-eval moves white space from one side to the other
        {"question": prompt, "stem": prompt + first, "choices": [text.removeprefix(first), "=d", "#>", "+f=9"]}
        for prompt, first, text in begun
    ]
    (folder / "data.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    common = {
        "dataset_path": "json",
        "dataset_kwargs": {"data_files": {"test": str(folder / "data.jsonl")}},
        "test_split": "test",
        "target_delimiter": "",
    }
    for options in (CHOOSE, PERPLEXITY, WRITE):  # YAML may be JSON
        (folder / f"{options['task']}.yaml").write_text(json.dumps(common | options))
    return folder


def test_lm_eval(clients: Clients, chat_server: ServerProcess, task: Path) -> None:
    """Log likelihoods and texts are those of lm-eval's own backend, which runs the checkpoint with transformers."""
    base, tokenizer = f"{chat_server.url}/v1", f"tokenizer={DEFAULT_MODEL}"
    arguments = f"model=reasoner,base_url={base}/completions,num_concurrent=2,{tokenizer}"
    found = clients.call("use_lm_eval", str(task), "local-completions", arguments)
    expected = clients.call("use_lm_eval", str(task), "hf", f"pretrained={DEFAULT_MODEL},dtype=float32")
    for name in ("choose", "perplexity"):
        pairs = [(_flat(one), _flat(other)) for one, other in zip(found[name], expected[name], strict=True)]
        for ours, theirs in pairs:
            assert ours == pytest.approx(theirs, abs=1e-3)
    chosen = [[choice[0][1] for choice in question] for question in found["choose"]]
    assert [of_question[0] for of_question in chosen] == [True] * 3 and not all(map(all, chosen))
    assert _texts(found["write"]) == _texts(expected["write"]) == greedy(PROMPTS, 24, stop=["\n"])
    chat = clients.call("use_lm_eval", str(task), "local-chat-completions",
                        f"model=reasoner,base_url={base}/chat/completions")  # fmt: skip
    assert _texts(chat["write"]) == _texts(found["write"])


def _texts(answers: Any) -> list[str]:
    return [text for ((text,),) in answers]


def _flat(answers: Any) -> list[float]:
    """All numbers of nested lists."""
    return [number for answer in answers for number in _flat(answer)] if isinstance(answers, list) else [float(answers)]


@pytest.mark.parametrize("route", ["/v1/completions", "/v1/chat/completions"])
def test_guidellm(clients: Clients, chat_server: ServerProcess, route: str, tmp_path: Path) -> None:
    data, report = tmp_path / "prompts.jsonl", tmp_path / "report.json"
    row = {"prompt": PROMPT, "output_tokens_count": 16}
    data.write_text((json.dumps(row) + "\n") * 16)
    options = {
        "backend": f"kind=openai_http,target={chat_server.url},model=reasoner,request_format={route}",
        "profile": "kind=concurrent,streams=4",
        "constraint": "kind=max_requests,count=12",
        "data": f"kind=json_file,path={data}",
        "tokenizer": f"kind=hf_auto,model={DEFAULT_MODEL}",
        "output": f"kind=json,path={report}",
    }
    clients.run("guidellm", "run", "--disable-console", *(x for k, v in options.items() for x in (f"--{k}", v)))
    (benchmark,) = json.loads(report.read_text())["benchmarks"]
    metrics = benchmark["metrics"]
    assert metrics["request_totals"] == {"successful": 12, "errored": 0, "incomplete": 0, "total": 12}
    assert metrics["output_token_count"]["successful"]["mean"] == 16
    assert metrics["time_to_first_token_ms"]["successful"]["mean"] > 0
    assert {request["output"] for request in benchmark["requests"]["successful"]} == {greedy([PROMPT], 16)[0]}


def test_schemathesis(clients: Clients, chat_server: ServerProcess) -> None:
    """Requests made from /openapi.json, right and wrong ones: each gets an answer that the document describes.

    What is right by the schema may still be refused, such as two fields that exclude each other.
    """
    options = ("--max-examples", "10", "--phases", "coverage,fuzzing", "--generation-deterministic", "--no-color")
    checks = ("--exclude-checks", "positive_data_acceptance", "--request-timeout", "30")
    text = clients.run("schemathesis", "run", f"{chat_server.url}/openapi.json", *options, *checks)
    assert "0 passed" not in text and "Tested: " in text, text
