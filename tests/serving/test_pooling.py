"""Routes of pooling models, as the openai package and plain clients see them."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import openai
import pytest

from kvllm import LLM, PoolingParams
from kvllm.engine_args import EngineArgs
from kvllm.pooling.async_engine import AsyncPooling
from kvllm.serving.app import make_app
from kvllm.serving.state import ServerOptions, ServerState
from kvllm.tokenizer import load_tokenizer
from tests.helpers.asgi import ask
from tests.helpers.checkpoints import make_with_package_tokenizer
from tests.helpers.pooling import add_modules, save
from tests.helpers.server import ServerProcess
from tests.serving.conftest import SERVERS

pytestmark = SERVERS

TEXTS = ["d3,f9,Y0", "#>d+f=k", "k>k-Y=Q\nQ>?Q"]


@pytest.fixture(scope="module")
def embedder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("embedder")
    make_with_package_tokenizer(path)
    add_modules(path, "lasttoken")
    return path


@pytest.fixture(scope="module")
def reranker(tmp_path_factory: pytest.TempPathFactory, embedder: Path) -> Path:
    """A classifier of one class."""
    path = tmp_path_factory.mktemp("reranker")
    options = json.loads((embedder / "config.json").read_text())
    save(path, "ForSequenceClassification", "qwen3", head_dim=16, num_labels=1, vocab_size=options["vocab_size"])
    load_tokenizer(embedder).hf.save_pretrained(path)
    return path


@pytest.fixture(scope="module")
def embeddings(embedder: Path) -> list[list[float]]:
    """What `LLM` makes of the texts."""
    return [each.outputs.embedding for each in start(embedder).embed(TEXTS, use_tqdm=False)]


@pytest.fixture(scope="module")
def server(embedder: Path) -> Iterator[ServerProcess]:
    overrides = ("--hf-overrides", '{"is_matryoshka": true}', "--served-model-name", "embedder")
    process = ServerProcess(str(embedder), *overrides, "--max-model-len", "64")
    try:
        yield process
    finally:
        assert process.stop() == 0


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


def start(path: Path, **options: Any) -> LLM:
    return LLM(str(path), dtype="float32", **options)


def app_of(path: Path, **options: Any) -> Any:
    args = EngineArgs(str(path), dtype="float32", **options)
    return make_app(ServerState(args, ServerOptions(("model",)), AsyncPooling.from_engine_args(args)))


def post(app: Any, path: str, body: Any) -> tuple[int, Any]:
    status, content = asyncio.run(ask(app, path, body))
    return status, json.loads(content)


def test_openai_client(client: openai.OpenAI, embeddings: list[list[float]], embedder: Path) -> None:
    """It asks for base64 unless it is told otherwise."""
    tokenizer = load_tokenizer(embedder)
    lengths = [len(tokenizer.encode(text)) for text in TEXTS]
    answer = client.embeddings.create(model="embedder", input=TEXTS)
    for i, (each, expected) in enumerate(zip(answer.data, embeddings, strict=True)):
        assert each.index == i and each.embedding == pytest.approx(expected, abs=1e-5)
    assert answer.usage.prompt_tokens == answer.usage.total_tokens == sum(lengths)
    assert answer.object == "list" and answer.model == "embedder"
    answer = client.embeddings.create(model="embedder", input=TEXTS[0], encoding_format="float")
    assert answer.data[0].embedding == pytest.approx(embeddings[0], abs=1e-5)
    for given in (tokenizer.encode(TEXTS[1]), [tokenizer.encode(TEXTS[1])]):
        answer = client.embeddings.create(model="embedder", input=given)
        assert answer.data[0].embedding == pytest.approx(embeddings[1], abs=1e-5)


def test_dimensions(client: openai.OpenAI, embeddings: list[list[float]]) -> None:
    answer = client.embeddings.create(model="embedder", input=TEXTS, dimensions=8)
    for each, whole in zip(answer.data, embeddings, strict=True):
        assert each.embedding == pytest.approx(list(whole[:8] / np.linalg.norm(whole[:8])), abs=1e-5)
    with pytest.raises(openai.BadRequestError, match="dimensions=65"):
        client.embeddings.create(model="embedder", input=TEXTS, dimensions=65)


def test_base64_is_float32(server: ServerProcess, embeddings: list[list[float]]) -> None:
    body = {"input": TEXTS, "encoding_format": "base64"}
    status, answer = server.json("/v1/embeddings", body)
    assert status == 200
    for each, expected in zip(answer["data"], embeddings, strict=True):
        found = np.frombuffer(base64.b64decode(each["embedding"]), "<f4")
        np.testing.assert_allclose(found, expected, atol=1e-5)


def test_refusals(server: ServerProcess) -> None:
    """With status 400, and nothing is computed."""
    before = server.metric("kvllm:steps_total")
    for body, message in (
        ({"input": []}, "input is empty"),
        ({"input": ["a", [1]]}, "mixes"),
        ({"input": ["d3", ""]}, "input[1]: the prompt is empty"),
        ({"input": [[1] * 65]}, "max_model_len=64"),
        ({"input": "d3" * 5000}, "maximum context length is 64"),
        ({"input": [[10**6]]}, "not in the vocabulary"),
        ({"input": "d3", "encoding_format": "hex"}, "hex"),
        ({"input": "d3", "truncate_prompt_tokens": 0}, "truncate_prompt_tokens"),
        ({}, "input"),
    ):
        status, answer = server.json("/v1/embeddings", body)
        assert status == 400 and message in answer["error"]["message"], answer
    for path in ("/v1/completions", "/v1/chat/completions", "/v1/responses"):
        status, answer = server.json(path, {"prompt": "d3"})
        assert status == 404 and 'runner="pooling"' in answer["error"]["message"]
    status, answer = server.json("/classify", {"input": "d3"})
    assert status == 400 and "/v1/embeddings" in answer["error"]["message"]
    assert server.json("/v1/embeddings", {"model": "other", "input": "d3"})[0] == 404
    assert server.metric("kvllm:steps_total") == before


def test_truncation_and_metrics(server: ServerProcess) -> None:
    before = server.metric("vllm:prompt_tokens_total")
    status, answer = server.json("/v1/embeddings", {"input": "d3" * 5000, "truncate_prompt_tokens": -1})
    assert status == 200 and answer["usage"]["prompt_tokens"] == 64
    assert server.metric("vllm:prompt_tokens_total") == before + 64
    assert server.request("/health")[0] == 200 and server.json("/v1/models")[1]["data"][0]["max_model_len"] == 64
    assert server.json("/tokenize", {"prompt": TEXTS[0]})[0] == 200
    assert "/v1/embeddings" in server.json("/openapi.json")[1]["paths"]


def test_pooling(server: ServerProcess, embedder: Path) -> None:
    """A vector of each token, too."""
    status, answer = server.json("/pooling", {"input": TEXTS[1], "task": "token_embed", "use_activation": False})
    llm = start(embedder)
    (expected,) = llm.encode(TEXTS[1], PoolingParams(task="token_embed", use_activation=False), use_tqdm=False)
    assert status == 200
    np.testing.assert_allclose(answer["data"][0]["data"], expected.outputs.data, atol=1e-4)


def test_scores_of_embeddings(server: ServerProcess, embeddings: list[list[float]]) -> None:
    query, *documents = embeddings
    status, answer = server.json("/score", {"text_1": TEXTS[0], "text_2": TEXTS[1:]})
    expected = [float(np.dot(query, document)) for document in documents]
    assert status == 200 and [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)


def test_rerank(reranker: Path) -> None:
    """In the form of Jina and Cohere: the best document first."""
    llm, app = start(reranker), app_of(reranker)
    scores = [each.outputs.score for each in llm.score(TEXTS[0], TEXTS, use_tqdm=False)]
    best_first = sorted(range(3), key=lambda i: -scores[i])
    for path in ("/rerank", "/v1/rerank", "/v2/rerank"):
        status, answer = post(
            app, path, {"model": "model", "query": TEXTS[0], "documents": [*TEXTS[:2], {"text": TEXTS[2]}]}
        )
        assert status == 200
        assert [each["index"] for each in answer["results"]] == best_first
        assert [each["document"]["text"] for each in answer["results"]] == [TEXTS[i] for i in best_first]
        found = [each["relevance_score"] for each in answer["results"]]
        assert found == pytest.approx([scores[i] for i in best_first], abs=1e-5)
    status, answer = post(app, "/rerank", {"query": TEXTS[0], "documents": TEXTS, "top_n": 1})
    assert [each["index"] for each in answer["results"]] == best_first[:1]
    status, answer = post(app, "/v1/score", {"queries": TEXTS, "documents": TEXTS})
    expected = [each.outputs.score for each in llm.score(TEXTS, TEXTS, use_tqdm=False)]
    assert [each["score"] for each in answer["data"]] == pytest.approx(expected, abs=1e-5)
    for path, body, message in (
        ("/rerank", {"query": "d3", "documents": []}, "1 queries and 0 documents"),
        ("/rerank", {"query": "d3", "documents": ["d3"], "top_n": -1}, "top_n"),
        ("/score", {"text_1": ["d3", "f9"], "text_2": TEXTS}, "2 queries and 3 documents"),
        ("/score", {"text_1": "d3", "queries": "d3", "text_2": TEXTS}, "give one of text_1"),
    ):
        status, answer = post(app, path, body)
        assert status == 400 and message in answer["error"]["message"], answer


def test_classify(tmp_path: Path, embedder: Path) -> None:
    options = json.loads((embedder / "config.json").read_text())
    labels = {"id2label": {0: "good", 1: "bad", 2: "neither"}, "label2id": {"good": 0, "bad": 1, "neither": 2}}
    save(tmp_path, "ForSequenceClassification", "llama", num_labels=3, vocab_size=options["vocab_size"], **labels)
    load_tokenizer(embedder).hf.save_pretrained(tmp_path)
    expected = [each.outputs.probs for each in start(tmp_path).classify(TEXTS, use_tqdm=False)]
    app = app_of(tmp_path)
    status, answer = post(app, "/classify", {"input": TEXTS})
    assert status == 200
    for each, probs in zip(answer["data"], expected, strict=True):
        assert each["probs"] == pytest.approx(probs, abs=1e-5) and each["num_classes"] == 3
        assert each["label"] == ["good", "bad", "neither"][int(np.argmax(probs))]
    status, answer = post(app, "/rerank", {"query": "d3", "documents": TEXTS})
    assert status == 400 and "one class" in answer["error"]["message"]


def test_a_generating_server_says_what_it_lacks(keys_server: ServerProcess) -> None:
    for path in ("/v1/embeddings", "/rerank", "/pooling"):
        status, answer = keys_server.json(path, {"input": "d3"}, {"Authorization": "Bearer one"})
        assert status == 404 and 'runner="pooling"' in answer["error"]["message"]


def test_requests_share_passes(embedder: Path) -> None:
    """What waits is computed together, what was given up is not, and a pass that fails takes no other with it."""
    engine = AsyncPooling.from_engine_args(EngineArgs(str(embedder), dtype="float32", max_num_seqs=8))

    async def use() -> None:
        requests = [engine.engine.request(text) for text in TEXTS]
        await asyncio.gather(*(engine.compute([request]) for request in requests))
        assert engine.stats().steps == 1
        await asyncio.gather(*(engine.compute(requests) for _ in range(4)))
        assert engine.stats().steps == 3  # of 8 and of 4
        given_up = asyncio.create_task(engine.compute(requests))
        kept = asyncio.create_task(engine.compute(requests[:1]))
        await asyncio.sleep(0)
        given_up.cancel()
        await kept
        assert engine.stats().prompt_tokens == 5 * sum(len(each.token_ids) for each in requests) + len(
            requests[0].token_ids
        )
        bad = requests[0]._replace(token_ids=[-1 << 40])
        with pytest.raises(Exception):  # noqa: B017  # whatever torch raises
            await engine.compute([bad])
        await engine.compute(requests)

    asyncio.run(use())
    engine.shutdown()
