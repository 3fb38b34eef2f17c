"""Adapters as models of a server: with both clients, loaded and unloaded while requests run."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import anthropic
import openai
import pytest

from kvllm import LLM, SamplingParams
from tests.helpers.adapters import make_adapter, merge
from tests.helpers.checkpoints import make_with_package_tokenizer
from tests.helpers.server import ServerProcess
from tests.serving.conftest import SERVERS

pytestmark = SERVERS
ASK: Any = {"messages": [{"role": "user", "content": "a+b"}], "max_tokens": 12}
PROMPT = [5, 9, 17, 30, 41, 8, 12, 60, 33, 21, 7, 19, 11, 4, 90, 33, 27]


class Served(NamedTuple):
    server: ServerProcess
    base: Path
    adapters: dict[str, Path]
    merged: dict[str, Path]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server with the adapter "one"."""
    root = tmp_path_factory.mktemp("adapters")
    base = root / "base"
    make_with_package_tokenizer(base)
    adapters = {name: make_adapter(root / name, base, seed=seed) for seed, name in enumerate(("one", "two"))}
    merged = {name: merge(root / f"{name}-merged", base, path) for name, path in adapters.items()}
    template = root / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    flags = ("--enable-lora", "--max-loras", "2", "--allow-runtime-lora-updating", "--chat-template", str(template))
    modules = ("--lora-modules", f"one={adapters['one']}", "--served-model-name", "base")
    process = ServerProcess(str(base), *flags, *modules, "--kv-cache-memory-bytes", "64M")
    try:
        yield Served(process, base, adapters, merged)
    finally:
        assert process.stop() == 0


@pytest.fixture(scope="module")
def client(served: Served) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{served.server.url}/v1", api_key="unused", max_retries=0)


def complete(client: openai.OpenAI, model: str, **options: Any) -> Any:
    extra = {"ignore_eos": True, "return_token_ids": True}
    return client.completions.create(
        model=model, prompt=PROMPT, temperature=0, max_tokens=20, extra_body=extra, **options
    )


def greedy_text(path: Path, max_tokens: int = 20) -> str:
    params = SamplingParams(temperature=0, max_tokens=max_tokens, ignore_eos=True)
    return LLM(path, kv_cache_memory_bytes=16 << 20).generate([PROMPT], params, use_tqdm=False)[0].outputs[0].text


def test_an_adapter_is_a_model(served: Served, client: openai.OpenAI) -> None:
    names = {model.id: model for model in client.models.list().data}
    assert list(names) == ["base", "one"]
    assert names["one"].parent == "base" and names["base"].parent is None  # type: ignore[attr-defined]
    assert client.models.retrieve("one").id == "one"
    texts = {name: complete(client, name).choices[0].text for name in ("one", "base")}
    assert texts == {"one": greedy_text(served.merged["one"]), "base": greedy_text(served.base)}
    assert texts["one"] != texts["base"]
    answers = {name: client.chat.completions.create(model=name, temperature=0, **ASK) for name in names}
    assert answers["one"].model == "one"
    found = {name: answer.choices[0].message.content for name, answer in answers.items()}
    assert found["one"] != found["base"]
    messages = anthropic.Anthropic(base_url=served.server.url, api_key="unused", max_retries=0).messages
    for name in names:
        message = messages.create(model=name, extra_body={"temperature": 0}, **ASK)
        assert (message.model, message.content[0].text) == (name, found[name])
        response = client.responses.create(model=name, input="a+b", max_output_tokens=16, temperature=0)
        assert response.output_text.startswith(found[name])


def test_adapters_come_and_go_while_requests_run(served: Served, client: openai.OpenAI) -> None:
    """A stream whose adapter is unloaded ends as it would have, and a bad adapter changes nothing."""
    server = served.server

    def ask(route: str, **body: Any) -> tuple[int, str]:
        status, _, content = server.request(f"/v1/{route}_lora_adapter", body)
        return status, content.decode()

    with pytest.raises(openai.NotFoundError, match="The model `two` does not exist"):
        complete(client, "two")
    assert ask("load", lora_name="two", lora_path=str(served.adapters["two"]))[0] == 200
    status, text = ask("load", lora_name="two", lora_path=str(served.adapters["two"]))
    assert status == 400 and "already been loaded" in text
    assert ask("load", lora_name="base", lora_path=str(served.adapters["two"]))[0] == 400
    extra = {"ignore_eos": True}
    stream = client.completions.create(
        model="two", prompt=PROMPT, temperature=0, max_tokens=300, stream=True, extra_body=extra
    )
    chunks = [next(stream).choices[0].text]
    assert ask("unload", lora_name="two")[0] == 200
    assert ask("unload", lora_name="two")[0] == 404
    status, text = ask("load", lora_name="bad", lora_path=str(served.base))
    assert status == 400 and "has no adapter_config.json" in text
    with pytest.raises(openai.NotFoundError, match="The model `two` does not exist"):
        complete(client, "two")
    chunks += [chunk.choices[0].text for chunk in stream]
    assert "".join(chunks) == greedy_text(served.merged["two"], 300)
    assert ask("load", lora_name="one", lora_path=str(served.adapters["two"]), load_inplace=True)[0] == 200
    assert complete(client, "one").choices[0].text == greedy_text(served.merged["two"])
    assert [model.id for model in client.models.list().data] == ["base", "one"]
    assert server.tracebacks == []
