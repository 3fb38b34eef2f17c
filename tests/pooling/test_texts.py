"""Rerankers and other prompts of text."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
import torch
import transformers

from kvllm import LLM, CheckpointError, PoolingParams, RequestError
from kvllm.engine_args import DEFAULT_MODEL
from kvllm.models.config import load_model_config
from kvllm.tokenizer import Tokenizer, load_tokenizer
from tests.helpers.checkpoints import make_checkpoint, make_with_package_tokenizer
from tests.helpers.pooling import add_modules, embedding, logits, save
from tests.helpers.tokenizers import byte_level

QUERY, DOCUMENTS = "d3,f9", ["Y0,x9", "#>d+f=k", "k>k-Y=Q\nQ>?Q"]
RERANKER = {
    "architectures": ["Qwen3ForSequenceClassification"],
    "classifier_from_token": ["+", "="],
    "is_original_qwen3_reranker": True,
}
TEMPLATE = "-{% for message in messages %}{{ message.role[0] }}={{ message.content }}+{% endfor %}"


@pytest.fixture(scope="module")
def causal(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of text, as the original Qwen3-Reranker is."""
    path = tmp_path_factory.mktemp("causal")
    make_with_package_tokenizer(path)
    return path


@torch.inference_mode()
def chances(path: Path, texts: list[str], no: str = "+", yes: str = "=") -> list[float]:
    """The softmax of the logits of two tokens at the end of a text, as Qwen3-Reranker's card has it."""
    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(path), load_tokenizer(path)
    ids = tokenizer.hf.convert_tokens_to_ids([no, yes])
    last = [model(torch.tensor([tokenizer.encode(text)])).logits[0, -1, ids] for text in texts]
    return [float(each.softmax(0)[1]) for each in last]


def test_qwen3_reranker(causal: Path) -> None:
    llm = LLM(str(causal), runner="pooling", hf_overrides=RERANKER, dtype="float32")
    outputs = llm.score(QUERY, DOCUMENTS, use_tqdm=False)
    expected = chances(causal, [QUERY + document for document in DOCUMENTS])
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)
    outputs = llm.score([QUERY, "Q=", "k>"], DOCUMENTS, use_tqdm=False)
    expected = chances(causal, [a + b for a, b in zip([QUERY, "Q=", "k>"], DOCUMENTS, strict=True)])
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)
    outputs = llm.score(QUERY, DOCUMENTS, chat_template=TEMPLATE, use_tqdm=False)
    expected = chances(causal, [f"-q={QUERY}+d={document}+" for document in DOCUMENTS])
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)
    with pytest.raises(RequestError, match="2 queries and 3 documents"):
        llm.score(["a", "b"], DOCUMENTS)
    with pytest.raises(RequestError, match="data_2"):
        llm.score(QUERY, [[1, 2]])


def test_reranker_of_sentence_transformers(causal: Path, tmp_path: Path) -> None:
    """A module names the tokens: nothing has to be said."""
    make_with_package_tokenizer(tmp_path)
    no, yes = load_tokenizer(causal).hf.convert_tokens_to_ids(["+", "="])
    types = ("base.modules.transformer.Transformer", "cross_encoder.modules.logit_score.LogitScore")
    paths = ("", "1_LogitScore")
    modules = [
        {"idx": i, "name": str(i), "path": path, "type": f"sentence_transformers.{kind}"}
        for i, (kind, path) in enumerate(zip(types, paths, strict=True))
    ]
    (tmp_path / "modules.json").write_text(json.dumps(modules))
    (tmp_path / "1_LogitScore").mkdir()
    (tmp_path / "1_LogitScore" / "config.json").write_text(json.dumps({"true_token_id": yes, "false_token_id": no}))
    outputs = LLM(str(tmp_path), dtype="float32").score(QUERY, DOCUMENTS, use_tqdm=False)
    expected = chances(tmp_path, [QUERY + document for document in DOCUMENTS])
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)


def test_logits_of_tokens_are_scores(causal: Path) -> None:
    overrides = {"classifier_from_token": ["="], "method": "no_post_processing"}
    llm = LLM(str(causal), convert="classify", hf_overrides=overrides, dtype="float32")
    (output,) = llm.encode(QUERY, PoolingParams(use_activation=False), use_tqdm=False)
    tokenizer, model = load_tokenizer(causal), transformers.AutoModelForCausalLM.from_pretrained(causal)
    with torch.inference_mode():
        expected = model(torch.tensor([tokenizer.encode(QUERY)])).logits[0, -1, tokenizer.token_id("=")]
    assert float(output.outputs.data) == pytest.approx(float(expected), abs=1e-4)


def test_logits_have_the_scale_of_the_model(tmp_path: Path) -> None:
    vocab_size = load_model_config(DEFAULT_MODEL).vocab_size
    model = make_checkpoint(tmp_path, "granite", vocab_size=vocab_size, logits_scaling=8.0)
    overrides = {"classifier_from_token": ["=", "+"], "method": "from_2_way_softmax"}
    for name in ("tokenizer.json", "tokenizer_config.json"):
        shutil.copy(DEFAULT_MODEL / name, tmp_path)
    llm = LLM(str(tmp_path), convert="classify", hf_overrides=overrides, dtype="float32")
    (output,) = llm.encode(QUERY, PoolingParams(use_activation=False), use_tqdm=False)
    tokenizer = load_tokenizer(tmp_path)
    with torch.inference_mode():
        logits = model(torch.tensor([tokenizer.encode(QUERY)])).logits[0, -1]
    expected = logits[tokenizer.token_id("+")] - logits[tokenizer.token_id("=")]
    assert float(output.outputs.data) == pytest.approx(float(expected), abs=1e-4)


def test_rerankers_that_cannot_be(causal: Path) -> None:
    for overrides, message in (
        ({"classifier_from_token": ["no", "yes", "="]}, "two tokens"),
        ({"classifier_from_token": ["+", "notatoken"]}, "notatoken"),
        ({}, "classifier_from_token"),
    ):
        with pytest.raises(CheckpointError, match=message):
            options = {"is_original_qwen3_reranker": True, **overrides}
            LLM(str(causal), convert="classify", hf_overrides=options)


def test_a_classifier_of_one_class_scores(tmp_path: Path, causal: Path) -> None:
    tokenizer = load_tokenizer(causal)
    vocab_size = max(tokenizer.hf.get_vocab().values()) + 1
    model = save(
        tmp_path, "ForSequenceClassification", "qwen3", head_dim=16, num_labels=1, vocab_size=max(256, vocab_size)
    )
    tokenizer.hf.save_pretrained(tmp_path)
    outputs = LLM(str(tmp_path), dtype="float32").score(QUERY, DOCUMENTS, use_tqdm=False)
    expected = [float(logits(model, tokenizer.encode(QUERY + text)).sigmoid()) for text in DOCUMENTS]
    assert [output.outputs.score for output in outputs] == pytest.approx(expected, abs=1e-5)
    assert outputs[0].prompt_token_ids == tokenizer.encode(QUERY + DOCUMENTS[0])


def test_embeddings_are_compared(tmp_path: Path, causal: Path) -> None:
    make_with_package_tokenizer(tmp_path)
    add_modules(tmp_path, "lasttoken")
    model, tokenizer = transformers.AutoModelForCausalLM.from_pretrained(tmp_path), load_tokenizer(causal)
    query, *documents = (embedding(model, tokenizer.encode(text), "LAST") for text in (QUERY, *DOCUMENTS))
    outputs = LLM(str(tmp_path), dtype="float32").score(QUERY, DOCUMENTS, use_tqdm=False)
    assert [output.outputs.score for output in outputs] == pytest.approx(
        [float(query @ d) for d in documents], abs=1e-5
    )


def test_template_of_qwen3_reranker() -> None:
    """The prompt is the one of the model's card."""
    template = (Path(__file__).parents[2] / "examples" / "qwen3_reranker.jinja").read_text()
    messages = [{"role": "query", "content": "a query"}, {"role": "document", "content": "a document"}]
    text = byte_level("plain").apply_chat_template(messages, chat_template=template, add_generation_prompt=False)
    assert text == (
        "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query and the Instruct "
        'provided. Note that the answer can only be "yes" or "no".<|im_end|>\n<|im_start|>user\n'
        "<Instruct>: Given a web search query, retrieve relevant passages that answer the query\n"
        "<Query>: a query\n<Document>: a document<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n"
    )


@pytest.mark.parametrize("kind", ["plain", "bos"])
def test_texts_are_cut_before_their_special_tokens(kind: str) -> None:
    """As transformers cuts them, on the right."""
    tokenizer: Tokenizer = byte_level(kind)
    text = "The quick brown fox isn't lazy"
    for most in (1, 3, 100):
        expected = tokenizer.hf(text, truncation=True, max_length=most).input_ids
        tokenizer.hf.backend_tokenizer.no_truncation()
        assert tokenizer.encode(text, most=most) == expected
    assert tokenizer.encode(text, most=100) == tokenizer.encode(text)
