"""Requests and answers of the routes of pooling models, with the names of OpenAI, vLLM, Jina and Cohere."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from msgspec import Meta, Struct

Input = str | list[str | int | list[int]]
Encoding = Literal["float", "base64"]
Index = Annotated[int, Meta(ge=0)]


class PoolingFields(Struct, kw_only=True):
    """Fields that all requests have.

    use_activation, normalize: see `PoolingParams`, and for truncate_prompt_tokens.
    """

    model: str | None = None
    request_id: str | None = None
    user: str | None = None
    truncate_prompt_tokens: int | None = None
    use_activation: bool | None = None
    normalize: bool | None = None


class InputFields(PoolingFields, kw_only=True):
    """input: a text, token ids, or a list of one of them."""

    input: Input
    add_special_tokens: bool | None = None


class EmbeddingRequest(InputFields, kw_only=True):
    """Body of POST /v1/embeddings."""

    encoding_format: Encoding | None = None
    dimensions: int | None = None


class PoolingBody(EmbeddingRequest, kw_only=True):
    """Body of POST /pooling. task: see `PoolingParams`."""

    task: str | None = None


class ClassificationRequest(InputFields, kw_only=True):
    """Body of POST /classify."""


class Document(Struct):
    """A text as Jina's and Cohere's clients send it, too."""

    text: str


class ScoreRequest(PoolingFields, kw_only=True):
    """Body of POST /score: queries and documents under any of the names that vLLM has for them."""

    text_1: str | list[str] | None = None
    queries: str | list[str] | None = None
    data_1: str | list[str] | None = None
    text_2: str | list[str] | None = None
    documents: str | list[str] | None = None
    data_2: str | list[str] | None = None


class RerankRequest(PoolingFields, kw_only=True):
    """Body of POST /rerank. top_n: documents in the answer; 0 for all."""

    query: str
    documents: list[str | Document]
    top_n: Index | None = None


class PoolingUsage(Struct):
    prompt_tokens: int
    total_tokens: int
    completion_tokens: int = 0
    prompt_tokens_details: Any = None


class PoolingAnswer(Struct, kw_only=True):
    id: str
    object: str = "list"
    created: int
    model: str
    usage: PoolingUsage


class Embedding(Struct):
    """embedding: numbers, or their bytes as little-endian float32 in base64."""

    index: int
    embedding: list[float] | str
    object: str = "embedding"


class EmbeddingResponse(PoolingAnswer, kw_only=True):
    data: list[Embedding]


class Pooled(Struct):
    """data: numbers of a prompt, or of each of its tokens; or the bytes of all, as in Embedding."""

    index: int
    data: list[Any] | str
    object: str = "pooling"


class PoolingResponse(PoolingAnswer, kw_only=True):
    data: list[Pooled]


class Classification(Struct):
    """label: of the class with the highest score."""

    index: int
    label: str
    probs: list[float]
    num_classes: int


class ClassificationResponse(PoolingAnswer, kw_only=True):
    data: list[Classification]


class Score(Struct):
    index: int
    score: float
    object: str = "score"


class ScoreResponse(PoolingAnswer, kw_only=True):
    data: list[Score]


class RerankResult(Struct):
    """index: of the document in the request."""

    index: int
    document: Document
    relevance_score: float


class RerankResponse(Struct):
    """results: the best one first."""

    id: str
    model: str
    usage: PoolingUsage
    results: list[RerankResult]
