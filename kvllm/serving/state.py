"""What the routes share: the engine, which may be replaced, and the settings of the server."""

from __future__ import annotations

import itertools
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from kvllm.async_llm import AsyncLLM
from kvllm.engine_args import EngineArgs
from kvllm.errors import RequestError
from kvllm.lora.request import Adapter
from kvllm.pooling.async_engine import AsyncPooling
from kvllm.serving.admission import Admission
from kvllm.serving.auth import Keys
from kvllm.serving.bodies import BodyMemory
from kvllm.serving.chat_template import ChatTemplate
from kvllm.serving.errors import unavailable
from kvllm.serving.kept_answers import KeptAnswers
from kvllm.serving.live_feed import LiveFeed
from kvllm.serving.metrics import ServerMetrics
from kvllm.serving.response_store import ResponseStore
from kvllm.tokenizer import Tokenizer

THREADS = 4
"""For what would hold up the event loop: big bodies, long prompts, chat templates."""


@dataclass(frozen=True)
class CorsOptions:
    """What scripts of other origins may do in a browser; "*" stands for all."""

    allow_origins: tuple[str, ...]
    allow_methods: tuple[str, ...] = ("*",)
    allow_headers: tuple[str, ...] = ("*",)
    allow_credentials: bool = False


@dataclass(frozen=True)
class ServerOptions:
    """Settings of the server, beside those of its engine.

    served_model_names: names that requests may use; the first one stands in answers to those that use none.
    chat_template: instead of the checkpoint's.
    chat_template_kwargs: what each chat passes to it; a request's own override them.
    max_num_queued_reqs: most completions in flight; None for no limit.
    max_num_queued_tokens: prompt tokens without a first token at which no request is taken; None for no limit.
    shutdown_timeout: seconds that requests in flight get to end.
    enable_auto_tool_choice: whether the model may call tools as it likes.
    tool_call_parser: how it writes calls, a name out of `TOOL_PARSERS`; None for "hermes".
    reasoning_parser: how the model marks its thoughts, see `thought_tags`; None for no thoughts.
    cors: None lets no script of another origin use the server.
    root_path: the path of the server behind a proxy; requests may come with it or without.
    enable_force_include_usage: every chunk of a stream has the usage, whether its request asks for it or not.
    return_tokens_as_token_ids: log probabilities name tokens "token_id:7", unless a request says otherwise.
    enable_tokenizer_info_endpoint: /tokenizer_info tells the tokenizer's configuration and the chat template.
    lora_modules: directories of adapters that are served from the start, by name.
    allow_runtime_lora_updating: whether clients may load adapters from directories of this machine, and unload them.
    """

    served_model_names: tuple[str, ...]
    keys: Keys = field(default_factory=Keys)
    chat_template: str | None = None
    chat_template_kwargs: dict[str, Any] = field(default_factory=dict)
    max_num_queued_reqs: int | None = None
    max_num_queued_tokens: int | None = None
    shutdown_timeout: float = 30.0
    enable_auto_tool_choice: bool = False
    tool_call_parser: str | None = None
    reasoning_parser: str | None = None
    cors: CorsOptions | None = None
    root_path: str = ""
    enable_force_include_usage: bool = False
    return_tokens_as_token_ids: bool = False
    enable_tokenizer_info_endpoint: bool = False
    lora_modules: dict[str, str] = field(default_factory=dict)
    allow_runtime_lora_updating: bool = False


def start_engine(args: EngineArgs) -> AsyncLLM | AsyncPooling:
    """The engine of a server. Raises ConfigError and CheckpointError as `LLM` does."""
    return (AsyncPooling if args.pooling else AsyncLLM).from_engine_args(args)


class ServerState:
    """The engine and all that belongs to it. Used on the event loop alone.

    engine: the one that runs now: `llm` or `pooling`, by what the model is run for.
    running: ids of the engine's requests. numbers: what makes these ids differ, whatever clients call their requests.
    adapters: by the names that requests may use as a model's.
    live: what the page's monitor shows. responses: those that are kept. kept_answers: streams that can be read again.
    """

    def __init__(
        self,
        args: EngineArgs,
        options: ServerOptions,
        engine: AsyncLLM | AsyncPooling,
        adapters: dict[str, Adapter] | None = None,
    ) -> None:
        self.args = args
        self.options = options
        self.engine = engine
        self.adapters = adapters or {}
        self.running: set[str] = set()
        self.numbers = itertools.count()
        self.requests = 0  # to routes that compute, which have no answer yet
        self.created = int(time.time())
        self.live = LiveFeed()
        self.responses = ResponseStore()
        self.kept_answers = KeptAnswers()
        self.pool = ThreadPoolExecutor(THREADS, "kvllm-text")
        self.bodies = BodyMemory()
        self.admission = Admission(options.max_num_queued_reqs, options.max_num_queued_tokens)
        self.chat_template = ChatTemplate(engine.tokenizer, options.chat_template, self.pool)
        self.sampling_defaults = args.sampling_defaults
        self.longest_token = _longest_token(engine.tokenizer)
        read = lambda: (self.engine.stats(), self.admission.in_flight)  # noqa: E731
        cache = {
            "block_size": str(engine.config.block_size),
            "num_gpu_blocks": str(engine.config.num_blocks),
            "enable_prefix_caching": str(engine.config.enable_prefix_caching),
        }
        self.metrics = ServerMetrics(self.model_name, read, self.admission.rejections, cache)

    @property
    def pools(self) -> bool:
        """Whether the model makes embeddings, scores or classes, and no text."""
        return isinstance(self.engine, AsyncPooling)

    @property
    def llm(self) -> AsyncLLM:
        """For the routes that generate: there are no others where it is missing."""
        assert isinstance(self.engine, AsyncLLM)
        return self.engine

    @property
    def pooling(self) -> AsyncPooling:
        """For the routes of pooling models, in the same way."""
        assert isinstance(self.engine, AsyncPooling)
        return self.engine

    @property
    def model_name(self) -> str:
        return self.options.served_model_names[0]

    @property
    def model_names(self) -> tuple[str, ...]:
        """All names that requests may use, those of adapters last."""
        return (*self.options.served_model_names, *self.adapters)

    @property
    def updates_adapters(self) -> bool:
        """Whether clients may load adapters, and unload them."""
        return self.args.enable_lora and self.options.allow_runtime_lora_updating

    @property
    def max_model_len(self) -> int:
        return self.engine.config.max_model_len

    @property
    def tokenizer(self) -> Tokenizer:
        """Raises RequestError if the checkpoint has none."""
        if self.engine.tokenizer is None:
            raise RequestError("the model has no tokenizer: give prompts as token ids")
        return self.engine.tokenizer

    def check_ready(self) -> None:
        """Raises ApiError with status 503 while requests are not taken."""
        self.admission.check_draining()
        if self.engine.errored:
            raise unavailable("the engine has failed and is being started again: try again later", 5)


def _longest_token(tokenizer: Tokenizer | None) -> int:
    """Most characters that one token stands for."""
    return 1 if tokenizer is None else max(map(len, tokenizer.hf.get_vocab()))
