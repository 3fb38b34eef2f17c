"""The methods of `LLM` for embeddings, scores and classes."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import count
from typing import Any

import torch
from msgspec import structs
from tqdm import tqdm

from kvllm.config import require
from kvllm.errors import RequestError
from kvllm.pooling.engine import DEFAULT, PoolingEngine, wrong_runner
from kvllm.pooling.outputs import (
    ClassificationOutput,
    ClassificationRequestOutput,
    EmbeddingOutput,
    EmbeddingRequestOutput,
    PoolingOutput,
    PoolingRequestOutput,
    ScoringOutput,
    ScoringRequestOutput,
)
from kvllm.pooling.pairs import Pairs, texts_of
from kvllm.pooling.params import PoolingParams
from kvllm.pooling.runner import PoolingRequest
from kvllm.prompts import Prompt, batch_of, one_for_each

Progress = bool | Callable[..., tqdm]
Params = PoolingParams | Iterable[PoolingParams] | None


class PoolingMethods:
    """What `LLM` has with `runner="pooling"`.

    Nothing is computed unless all prompts of a call can be: RequestError names the first that cannot. `prompts` are as
    in `LLM.generate`, and so are `use_tqdm` and `lora_request`. `pooling_params` are for all of them, or an iterable
    with one for each.
    """

    _pooling: PoolingEngine | None
    _request_ids: count[int]

    def embed(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        use_tqdm: Progress = True,
        pooling_params: Params = None,
        lora_request: None = None,
    ) -> list[EmbeddingRequestOutput]:
        """Embed prompts: `output.outputs.embedding` of each is a list of numbers.

        Raises RequestError for a prompt or an option that the model cannot serve.
        """
        engine = self._engine_for("embed", "LLM.embed", lora_request)
        requests, found = self._pool(engine, prompts, pooling_params, use_tqdm, "embed")
        return self._outputs(EmbeddingRequestOutput, requests, [EmbeddingOutput(each.tolist()) for each in found])

    def classify(
        self,
        prompts: Prompt | Iterable[Prompt],
        *,
        use_tqdm: Progress = True,
        pooling_params: Params = None,
        lora_request: None = None,
    ) -> list[ClassificationRequestOutput]:
        """Score the classes of prompts: `output.outputs.probs` of each is a list of numbers.

        Raises RequestError for a prompt or an option that the model cannot serve.
        """
        engine = self._engine_for("classify", "LLM.classify", lora_request)
        requests, found = self._pool(engine, prompts, pooling_params, use_tqdm, "classify")
        made = [ClassificationOutput(each.tolist()) for each in found]
        return self._outputs(ClassificationRequestOutput, requests, made)

    def encode(
        self,
        prompts: Prompt | Iterable[Prompt],
        pooling_params: Params = None,
        *,
        use_tqdm: Progress = True,
        lora_request: None = None,
        pooling_task: str | None = None,
    ) -> list[PoolingRequestOutput[PoolingOutput]]:
        """Whatever the model makes of prompts: `output.outputs.data` of each is a tensor, float32 `[numbers]`, or
        `[tokens, numbers]` of each token.

        pooling_task: as `PoolingParams.task`; default "embed" or "classify", whichever the model does.

        Raises RequestError for a prompt or an option that the model cannot serve.
        """
        engine = self._engine_for(None, "LLM.encode", lora_request)
        requests, found = self._pool(engine, prompts, pooling_params, use_tqdm, pooling_task)
        return self._outputs(PoolingRequestOutput, requests, [PoolingOutput(each) for each in found])

    def score(
        self,
        data_1: str | Sequence[str],
        data_2: str | Sequence[str],
        /,
        *,
        use_tqdm: Progress = True,
        pooling_params: PoolingParams | None = None,
        lora_request: None = None,
        chat_template: str | None = None,
    ) -> list[ScoringRequestOutput]:
        """Score how well documents fit a query, or each its own query: `output.outputs.score`.

        A reranker reads both texts together. Of an embedding model, it is the cosine of two embeddings.

        Args:
            data_1: the query, or one for each document.
            data_2: the documents.
            chat_template: the text of a Jinja template that makes a reranker's prompt of messages with the roles
                "query" and "document". Default: the query, then the document.

        Raises RequestError for a pair or an option that the model cannot serve.
        """
        engine = self._engine_for(None, "LLM.score", lora_request)
        params = DEFAULT if pooling_params is None else pooling_params
        _check_params(params)
        pairs = Pairs(engine, texts_of(data_1, "data_1"), texts_of(data_2, "data_2"), params, chat_template)
        found = self._compute(engine, pairs.requests, use_tqdm)
        scores = [ScoringOutput(score) for score in pairs.scores(found)]
        joined = [[token for each in pairs.requests_of(i) for token in each.token_ids] for i in range(pairs.count)]
        return self._outputs(ScoringRequestOutput, [PoolingRequest(token_ids) for token_ids in joined], scores)

    def _engine_for(self, task: str | None, method: str, lora_request: Any) -> PoolingEngine:
        """Raises RequestError if the engine does not do a task."""
        engine = self._pooling
        if engine is None:
            raise wrong_runner(method, pooling=False)
        if lora_request is not None:
            raise RequestError("lora_request is not supported: merge the adapter into the checkpoint")
        if task not in (None, engine.config.task):
            raise RequestError(f"{method} is not what the model is for: use LLM.{engine.config.task}")
        return engine

    def _pool(
        self, engine: PoolingEngine, prompts: Any, params: Params, use_tqdm: Progress, task: str | None
    ) -> tuple[list[PoolingRequest], list[torch.Tensor]]:
        batch, _ = batch_of(prompts)
        every = one_for_each("pooling_params", DEFAULT if params is None else params, PoolingParams, len(batch))
        requests = []
        for number, (prompt, each) in enumerate(zip(batch, every, strict=True)):
            _check_params(each)
            each = each if task is None or each.task == task else structs.replace(each, task=task)
            try:
                requests.append(engine.request(prompt, each))
            except RequestError as error:
                raise RequestError(f"prompts[{number}]: {error}", param=error.param) from None
        return requests, self._compute(engine, requests, use_tqdm)

    @staticmethod
    def _compute(engine: PoolingEngine, requests: list[PoolingRequest], use_tqdm: Progress) -> list[torch.Tensor]:
        make_bar = use_tqdm if callable(use_tqdm) else tqdm
        with make_bar(total=len(requests), desc="Processed prompts", disable=not use_tqdm) as bar:
            return engine.run(requests, lambda done: bar.update(len(done)))

    def _outputs(self, kind: Any, requests: Sequence[PoolingRequest], outputs: Sequence[Any]) -> list[Any]:
        pairs = zip(requests, outputs, strict=True)
        return [kind(str(next(self._request_ids)), output, request.token_ids) for request, output in pairs]


def _check_params(params: Any) -> None:
    require(isinstance(params, PoolingParams), "pooling_params", params, "they are of type PoolingParams")
