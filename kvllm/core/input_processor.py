"""The door: a prompt with its options becomes a request, or is refused before it can disturb anything."""

from __future__ import annotations

import random
import time
from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from numbers import Integral
from typing import TYPE_CHECKING

from msgspec import structs

from kvllm.config import EngineConfig, require
from kvllm.core.policies import Threshold, WindowOptions
from kvllm.core.request import Request
from kvllm.core.sequence import ANONYMOUS, ServiceClass
from kvllm.errors import RequestError
from kvllm.lora.request import Adapter, LoRARequest
from kvllm.outputs import CompletionOutput, RequestMetrics, RequestOutput
from kvllm.prompts import PROMPT_KEYS, Array, Prompt, check_keys
from kvllm.sampling_params import MAX_INTEGER, SamplingParams, is_unicode
from kvllm.structured_outputs import StructuredOutputsParams

if TYPE_CHECKING:
    from kvllm.lora.files import Adapters
    from kvllm.structured.checker import GrammarChecker
    from kvllm.tokenizer import Tokenizer


class InputProcessor:
    """Checks requests against the limits of an engine, and numbers their sequences.

    tokenizer: None if the checkpoint has none; then prompts are token ids.
    grammars: refuses structured outputs that cannot be followed.
    adapters: opens those of requests; None if there can be none.
    """

    def __init__(
        self,
        config: EngineConfig,
        vocab_size: int,
        tokenizer: Tokenizer | None,
        grammars: GrammarChecker | None = None,
        adapters: Adapters | None = None,
    ) -> None:
        self.config = config
        self.grammars = grammars
        self.adapters = adapters
        self.vocab_size = vocab_size
        self.tokenizer = tokenizer
        self._next_seq_id = 0
        self._seeds = random.Random(config.seed)

    def new_request(
        self,
        request_id: str,
        prompt: Prompt,
        sampling: SamplingParams,
        stream: bool,
        service_class: ServiceClass = ANONYMOUS,
    ) -> Request:
        """A request whose completions are empty. Raises RequestError, and ConfigError for what is no SamplingParams."""
        check_sampling(sampling)
        text, token_ids = self.tokens_of(prompt)
        token_ids = self._truncated(token_ids, sampling)
        sampling = self._with_bad_words(sampling)
        self.check(token_ids, sampling)
        sampling = self._with_all_logprobs(sampling)
        if isinstance(prompt, Mapping) and service_class.cache_salt is None:
            service_class = structs.replace(service_class, cache_salt=prompt.get("cache_salt"))
        _check_service_class(service_class)
        if sampling.structured_outputs is not None:
            self.check_grammar(sampling.structured_outputs)
        seed = self._seeds.getrandbits(63) if sampling.seed is None else sampling.seed
        return self._make(request_id, text, token_ids, sampling, stream, seed, service_class)

    def resumed_request(
        self,
        request_id: str,
        token_ids: list[int],
        prompt_length: int,
        sampling: SamplingParams,
        seed: int,
        service_class: ServiceClass,
    ) -> Request:
        """A request that another engine has begun: see `LLMEngine.resume_request`."""
        prompt, output = token_ids[:prompt_length], token_ids[prompt_length:]
        self.check(prompt, sampling, max_logprobs=-1)  # which the other engine has checked
        request = self._make(request_id, None, prompt, sampling, False, seed, service_class)
        request.output.outputs[0].token_ids += output
        for completion in request.output.outputs:  # whoever resumes it has the log probabilities of earlier tokens
            completion.logprobs = completion.cumulative_logprob = None
        return request

    def take_seq_ids(self, count: int) -> int:
        """The first of `count` sequence ids that nothing has used before."""
        first = self._next_seq_id
        self._next_seq_id += count
        return first

    def tokens_of(self, prompt: Prompt) -> tuple[str | None, list[int]]:
        """The text of a prompt, if it was given as text, and its token ids. Raises RequestError."""
        text = None
        if isinstance(prompt, Mapping):
            check_keys(prompt)
            text = prompt.get("prompt") if isinstance(prompt.get("prompt"), str) else None
            prompt = next(prompt[key] for key in PROMPT_KEYS if prompt.get(key) is not None)
        if isinstance(prompt, str):
            if self.tokenizer is None:
                raise RequestError("the checkpoint has no tokenizer: give the prompt as {'prompt_token_ids': [...]}")
            return prompt, self.tokenizer.encode(prompt)
        if isinstance(prompt, Array):
            prompt = prompt.tolist()
        if not isinstance(prompt, Sequences) or isinstance(prompt, bytes | bytearray):
            raise RequestError(
                f"a prompt is a string, a list of token ids or a dict with one of them, not {type(prompt).__name__}"
            )
        for token_id in prompt:
            if not isinstance(token_id, Integral) or isinstance(token_id, bool):
                raise RequestError(f"a prompt is a list of integer token ids, {token_id!r} is not one")
        return text, [int(token_id) for token_id in prompt]

    def check(self, token_ids: list[int], sampling: SamplingParams, max_logprobs: int | None = None) -> None:
        """Raises RequestError for a prompt or for options that this engine cannot serve. max_logprobs: instead of the
        engine's."""
        self.check_prompt(token_ids, generates=sampling.max_tokens != 0)
        self._check_options(sampling, self.config.max_logprobs if max_logprobs is None else max_logprobs)

    def check_prompt(self, token_ids: list[int], *, generates: bool) -> None:
        """Raises RequestError for a prompt that the model cannot read. generates: a token follows it."""
        longest = self.config.max_model_len - generates
        if not token_ids:
            raise RequestError("the prompt is empty: it needs at least one token")
        if len(token_ids) > longest:
            raise RequestError(
                f"the prompt has {len(token_ids)} tokens; max_model_len={self.config.max_model_len} allows {longest} "
                f"{'and one generated token' if generates else 'of them'}: shorten the prompt or raise max_model_len"
            )
        outside = [token_id for token_id in token_ids if not 0 <= token_id < self.vocab_size]
        if outside:
            largest = self.vocab_size - 1
            raise RequestError(f"token id {outside[0]} is not in the vocabulary: allowed are 0 to {largest}")

    def check_grammar(self, rule: StructuredOutputsParams) -> None:
        """Raises RequestError for structured outputs that cannot be followed. Any thread may call it, and one that does
        so ahead of `new_request` saves the engine's thread the time: the verdict is remembered."""
        if self.tokenizer is None or self.grammars is None:
            raise RequestError("structured_outputs needs the checkpoint's tokenizer, and there is none")
        self.grammars.check(rule)

    def adapter_of(self, request: LoRARequest | Adapter | None) -> Adapter | None:
        """The adapter that a request names, whose files are checked unless that was done. Any thread may call, and one
        that does so ahead saves the engine's thread the time. Raises RequestError."""
        if request is None or isinstance(request, Adapter):
            return request
        if not isinstance(request, LoRARequest):
            raise RequestError(f"lora_request={request!r} is not allowed: a LoRARequest, or None")
        if self.adapters is None:
            raise RequestError(f"lora_request names {request.lora_name!r}, and the engine takes none: set enable_lora")
        return self.adapters.open(request)

    def close(self) -> None:
        if self.grammars is not None:
            self.grammars.close()

    def _make(
        self,
        request_id: str,
        prompt: str | None,
        token_ids: list[int],
        sampling: SamplingParams,
        stream: bool,
        seed: int,
        service_class: ServiceClass,
    ) -> Request:
        output = RequestOutput(
            request_id=request_id,
            prompt=prompt,
            prompt_token_ids=token_ids,
            outputs=[_empty_completion(index, sampling) for index in range(sampling.n)],
            finished=False,
            metrics=RequestMetrics(arrival_time=time.monotonic()),
            prompt_logprobs=None if sampling.prompt_logprobs is None else [None],
        )
        compression = self.config.compression
        return Request(
            output,
            sampling,
            seq_id=self.take_seq_ids(sampling.n),
            seed=seed,
            max_length=self._max_length(len(token_ids), sampling.max_tokens),
            tail_start=0 if compression and compression.compress_prompt else None,
            stream=stream,
            service_class=service_class,
        )

    def _max_length(self, prompt_length: int, max_tokens: int | None) -> int:
        """Tokens at which a sequence ends at the latest. One is sampled even where none is asked for."""
        if max_tokens == 0:
            return prompt_length + 1
        most = self.config.max_model_len
        return most if max_tokens is None else min(most, prompt_length + max_tokens)

    def _truncated(self, token_ids: list[int], sampling: SamplingParams) -> list[int]:
        """What `truncate_prompt_tokens` leaves of a prompt."""
        most = sampling.truncate_prompt_tokens
        if most == -1:
            room = 1 if sampling.max_tokens is None else sampling.max_tokens
            most = max(1, self.config.max_model_len - room)
        return token_ids if most is None else token_ids[-most:]

    def _with_all_logprobs(self, sampling: SamplingParams) -> SamplingParams:
        """The options with the size of the vocabulary in place of -1."""
        if -1 not in (sampling.logprobs, sampling.prompt_logprobs):
            return sampling
        counts = {"logprobs": sampling.logprobs, "prompt_logprobs": sampling.prompt_logprobs}
        counts = {field: self.vocab_size if count == -1 else count for field, count in counts.items()}
        return structs.replace(sampling, **counts)

    def _with_bad_words(self, sampling: SamplingParams) -> SamplingParams:
        """The options with the token ids of their bad words: as these begin a text, and as they stand in one."""
        if not sampling.bad_words:
            return sampling
        if self.tokenizer is None:
            raise RequestError(f"bad_words={sampling.bad_words!r} needs a tokenizer: use bad_words_token_ids")
        texts = [text for word in sampling.bad_words for text in (word, " " + word.lstrip())]
        try:
            encoded = [self.tokenizer.encode(text, add_special_tokens=False) for text in texts]
        except RequestError as error:
            raise RequestError(f"bad_words={sampling.bad_words!r} are not all in the vocabulary: {error}") from None
        found = {tuple(token_ids) for token_ids in encoded if token_ids}
        words = [*(sampling.bad_words_token_ids or ()), *map(list, sorted(found))]
        return structs.replace(sampling, bad_words=None, bad_words_token_ids=words)

    def _check_options(self, sampling: SamplingParams, max_logprobs: int) -> None:
        if sampling.n > self.config.max_num_seqs:
            most = self.config.max_num_seqs
            raise RequestError(f"n={sampling.n} completions of a prompt run together: raise max_num_seqs={most}")
        sampling.check_vocabulary(self.vocab_size, max_logprobs)
        compression = self.config.active_compression
        policy = compression and compression.policy
        if sampling.budget_tokens is not None and not isinstance(policy, Threshold):
            raise RequestError(
                f"budget_tokens={sampling.budget_tokens} needs an engine with "
                'compression=CompressionConfig(policy="threshold", ...) that drops something'
            )
        if sampling.retain_blocks is not None and not isinstance(policy, WindowOptions):
            raise RequestError(
                f"retain_blocks={sampling.retain_blocks} needs an engine with compression of windows, such as "
                'compression=CompressionConfig(policy="pressure"): '
                + ("a threshold has budget_tokens" if compression else "this one drops nothing")
            )
        if sampling.stop and self.tokenizer is None:
            raise RequestError(f"stop={sampling.stop!r} needs a tokenizer, and there is none: use stop_token_ids")


def check_sampling(sampling: SamplingParams) -> None:
    """Raises ConfigError for what is no SamplingParams."""
    require(isinstance(sampling, SamplingParams), "sampling_params", sampling, "they are of type SamplingParams")


def _check_service_class(service_class: ServiceClass) -> None:
    priority, tenant, salt = service_class.priority, service_class.tenant, service_class.cache_salt
    if not isinstance(priority, int) or isinstance(priority, bool) or abs(priority) > MAX_INTEGER:
        raise RequestError(f"priority={priority!r} is not allowed: an integer of 64 bits, a lower one runs first")
    if not isinstance(tenant, str) or not is_unicode(tenant):
        raise RequestError(f"tenant={tenant!r} is not allowed: a string")
    if salt is not None and (not isinstance(salt, str) or not salt or not is_unicode(salt)):
        raise RequestError(f"cache_salt={salt!r} is not allowed: a string of at least one character, or None")


def _empty_completion(index: int, sampling: SamplingParams) -> CompletionOutput:
    if sampling.logprobs is None:
        return CompletionOutput(index, "", [])
    return CompletionOutput(index, "", [], cumulative_logprob=0.0, logprobs=[])
