"""Pairs of a query and a document: the prompts whose scores a reranker gives, or two embeddings that are compared."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

import torch
import torch.nn.functional as F

from kvllm.control_tokens import encode_marked, mark_messages
from kvllm.errors import RequestError
from kvllm.pooling.engine import DEFAULT, PoolingEngine
from kvllm.pooling.params import PoolingParams
from kvllm.pooling.runner import PoolingRequest


class Pairs:
    """The requests that `queries` and `documents` need, and the scores that come of what they give.

    queries: as many as documents, or one for all of them.
    chat_template: what a reranker's prompt is made of, from messages of the roles "query" and "document"; None: the
        query, then the document.

    Raises RequestError for what cannot be computed.
    """

    def __init__(
        self,
        engine: PoolingEngine,
        queries: Sequence[str],
        documents: Sequence[str],
        params: PoolingParams = DEFAULT,
        chat_template: str | None = None,
    ) -> None:
        self._engine = engine
        self._embeds = engine.config.task == "embed"
        self.count = len(documents)
        self.num_queries = len(queries)
        if not queries or not documents or self.num_queries not in (1, self.count):
            raise RequestError(
                f"{self.num_queries} queries and {self.count} documents: give one query, or one for each document"
            )
        if self._embeds:
            self.requests = [engine.request(text, params) for text in (*queries, *documents)]
            return
        if len(engine.config.labels) != 1:
            raise RequestError(
                f"scores need a model with one class, a reranker, and this one has {len(engine.config.labels)}: use "
                "classify"
            )
        every = list(queries) * (self.count // self.num_queries)
        pairs = zip(every, documents, strict=True)
        self.requests = [self._request(*pair, params, chat_template) for pair in pairs]

    def scores(self, found: Sequence[torch.Tensor]) -> list[float]:
        """One for each document, from what the requests gave."""
        if not self._embeds:
            return [float(each) for each in found]
        queries, documents = found[: self.num_queries], found[self.num_queries :]
        every = list(queries) * (self.count // self.num_queries)
        return [float(F.cosine_similarity(*pair, dim=0)) for pair in zip(every, documents, strict=True)]

    def requests_of(self, number: int) -> list[PoolingRequest]:
        """Those of the pair of one document."""
        if not self._embeds:
            return [self.requests[number]]
        query = number if self.num_queries > 1 else 0
        return [self.requests[query], self.requests[self.num_queries + number]]

    def _request(self, query: str, document: str, params: PoolingParams, template: str | None) -> PoolingRequest:
        if template is None:
            return self._engine.request(query + document, params, scores=True)
        tokenizer = self._engine.tokenizer
        if tokenizer is None:
            raise RequestError("chat_template needs a tokenizer, and the checkpoint has none")
        messages = [{"role": "query", "content": query}, {"role": "document", "content": document}]
        options = {"chat_template": template, "add_generation_prompt": False}
        text = tokenizer.apply_chat_template(mark_messages(tokenizer, messages, template), **options)
        return self._engine.request({"prompt_token_ids": encode_marked(tokenizer, text)}, params, scores=True)


def texts_of(given: Any, name: str) -> list[str]:
    """One text or several as a list. Raises RequestError."""
    texts = [given] if isinstance(given, str) or not isinstance(given, Iterable) else list(given)
    for text in texts:
        if not isinstance(text, str):
            raise RequestError(f"{name} must be a text, or a list of texts, and {text!r:.100} is none", param=name)
    return texts
