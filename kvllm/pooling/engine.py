"""An engine for embeddings, scores and classes: a model that computes whole prompts, and keeps nothing of them."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from threading import Lock

import torch

from kvllm.core.input_processor import InputProcessor
from kvllm.engine_args import EngineArgs
from kvllm.engine_builder import dtype_of, local_device, read_tokenizer, runner_settings
from kvllm.errors import ConfigError, RequestError
from kvllm.parallel import SingleRank
from kvllm.pooling.attention import CausalPasses
from kvllm.pooling.head import load_head
from kvllm.pooling.params import PoolingParams
from kvllm.pooling.runner import PoolingRequest, PoolingRunner
from kvllm.pooling_config import PoolingConfig
from kvllm.prompts import PROMPT_KEYS, Prompt
from kvllm.stats import EngineStats
from kvllm.tokenizer import Tokenizer
from kvllm.worker.build import DTYPES, check_device, load_shard
from kvllm.worker.threads import set_up_threads

logger = logging.getLogger(__name__)

DEFAULT = PoolingParams()


class PoolingEngine:
    """Checks prompts and computes them, several in each pass. Any thread may call.

    config: how the model is pooled. size: numbers of a vector. stats: counters of passes.

    Raises ConfigError and CheckpointError, before any weights are read wherever that can be known.
    """

    def __init__(self, args: EngineArgs) -> None:
        set_up_threads()
        assert args.pooling is not None
        _refuse_options(args)
        self.config: PoolingConfig = args.pooling
        self.model_config = args.model_config
        if self.model_config.recurrent is not None:
            raise ConfigError(
                f"{args.path} has recurrent layers, which are computed for text alone: use another model for "
                "embeddings, scores or classes"
            )
        if self.model_config.shares_kv_pairs:
            raise ConfigError(
                f"{args.path} has layers that attend KV pairs of others, which are computed for text alone: use "
                "another model for embeddings, scores or classes"
            )
        self.engine_config = args.engine_config
        self.tokenizer: Tokenizer | None = read_tokenizer(args)
        self.stats = EngineStats(num_blocks=1)  # of which none is ever in use
        self._inputs = InputProcessor(self.engine_config, self.model_config.vocab_size, self.tokenizer)
        self._lock = Lock()
        self._runner = self._load(args)
        self.size = self._runner.head.size
        logger.info(
            "%s (%s, %s) on %s, for %s by %s",
            args.name,
            self.model_config.architecture,
            dtype_of(args),
            local_device(args.device),
            "embeddings" if self.config.task == "embed" else f"scores of {len(self.config.labels)} classes",
            self.config.pooling,
        )

    @property
    def max_model_len(self) -> int:
        return self.engine_config.max_model_len

    def request(
        self, prompt: Prompt, params: PoolingParams = DEFAULT, *, special: bool = True, scores: bool = False
    ) -> PoolingRequest:
        """The request for a prompt.

        special: whether text gets special tokens. scores: the prompt is a pair of texts, for its score.

        Raises RequestError for what cannot be computed.
        """
        params.check(self.config, self.size)
        token_ids = self._token_ids(prompt, params, special)
        self._inputs.check_prompt(token_ids, generates=False)
        activates = self.config.activates if params.activates is None else params.activates
        activation = self.config.score_activation if scores else self.config.activation
        every = params.task is not None and params.task.startswith("token_")
        return PoolingRequest(token_ids, every, params.dimensions, activation if activates else "Identity")

    def compute(self, requests: Sequence[PoolingRequest]) -> list[torch.Tensor]:
        """What becomes of requests, in one pass: float32 on the host, as `PoolingRunner.run` has it."""
        with self._lock:
            found = self._runner.run(requests)
            self.stats.steps += 1
            tokens = sum(len(request.token_ids) for request in requests)
            self.stats.prompt_tokens += tokens
            self.stats.step_tokens.add(tokens)
            return found

    def run(
        self, requests: Sequence[PoolingRequest], report: Callable[[list[PoolingRequest]], object]
    ) -> list[torch.Tensor]:
        """What becomes of requests, in order. The longest are computed first, so that those of a pass are as long.

        report: called with the requests of each pass, after it.
        """
        found: dict[int, torch.Tensor] = {}
        order = sorted(range(len(requests)), key=lambda i: -len(requests[i].token_ids))
        for numbers in self.passes([len(requests[i].token_ids) for i in order]):
            some = [order[number] for number in numbers]
            found |= zip(some, self.compute([requests[i] for i in some]), strict=True)
            report([requests[i] for i in some])
        return [found[i] for i in range(len(requests))]

    def passes(self, lengths: Sequence[int]) -> Iterator[range]:
        """Which prompts of these lengths are computed together: as many as `max_num_batched_tokens` and `max_num_seqs`
        allow, or one."""
        first, tokens = 0, 0
        most_tokens, most = self.engine_config.max_num_batched_tokens, self.engine_config.max_num_seqs
        for number, length in enumerate(lengths):
            if number > first and (tokens + length > most_tokens or number - first == most):
                yield range(first, number)
                first, tokens = number, 0
            tokens += length
        if lengths:
            yield range(first, len(lengths))

    def _token_ids(self, prompt: Prompt, params: PoolingParams, special: bool) -> list[int]:
        most = self.max_model_len if params.truncate_prompt_tokens == -1 else params.truncate_prompt_tokens
        text = prompt
        if isinstance(prompt, Mapping) and prompt.get(PROMPT_KEYS[0]) is None:
            text = prompt.get("prompt")
        if isinstance(text, str) and self.tokenizer is not None and not (special and most is None):
            return self.tokenizer.encode(text, add_special_tokens=special, most=most)
        return self._inputs.tokens_of(prompt)[1][:most]

    def _load(self, args: EngineArgs) -> PoolingRunner:
        model, settings, device = self.model_config, runner_settings(args), torch.device(local_device(args.device))
        check_device(settings, device.type)
        make_passes = partial(
            CausalPasses, model, DTYPES[settings.dtype], args.block_size, args.attention_backend, device
        )
        causal = make_passes() if model.causal else None
        args.fetch_weights()
        decoder = load_shard(settings, SingleRank(), device)
        head = load_head(args.path, self.config, model, self.tokenizer, device)
        return PoolingRunner(decoder, head, model, self.config.pooling, causal, device)


def _refuse_options(args: EngineArgs) -> None:
    """Raise ConfigError for what only generation has."""
    given = {
        "tensor_parallel_size": args.tensor_parallel_size > 1,
        "data_parallel_size": args.data_parallel_size > 1,
        "distributed_executor_backend": args.distributed_executor_backend == "ray",
        "compression": args.compression is not None,
        "speculative_config": args.speculative_config is not None,
    }
    for name, is_given in given.items():
        if is_given:
            raise ConfigError(
                f"{name}={getattr(args, name)!r} is for models that generate text, and {args.path} is run for "
                'embeddings, scores or classes, in one process: leave it out, or give runner="generate"'
            )


def wrong_runner(what: str, *, pooling: bool) -> RequestError:
    """The refusal of what the other kind of engine does. pooling: whether this one is for pooling."""
    if pooling:
        return RequestError(f'{what} needs a model that generates text, and this one runs with runner="pooling"')
    return RequestError(
        f'{what} needs a pooling model: start it with runner="pooling", and convert="embed" or "classify" if its files '
        "do not say which"
    )
