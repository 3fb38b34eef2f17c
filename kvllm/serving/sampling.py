"""From the fields of a request to `SamplingParams`, and checks of those that can be seen before the engine."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from msgspec import structs

from kvllm.sampling_params import BeamSearchParams, SamplingParams
from kvllm.serving.errors import bad_request, check_count
from kvllm.serving.protocol import ChatCompletionRequest, CompletionRequest, StreamOptions, check_fields
from kvllm.serving.state import ServerOptions

MAX_N = 128
MAX_BEAMS = 128
"""Of all prompts of a request."""
MAX_STOP_STRINGS = 64
MAX_STOP_CHARACTERS = 1024
MAX_LOGIT_BIAS = 1024
MAX_LOGPROBS = 1 << 22
"""Log probabilities that an answer may come to have. Each takes up to 0.4 KB until the answer is sent."""
MAX_BAD_WORDS = 256
MAX_STOP_TOKEN_IDS = 1024
GenerationRequest = CompletionRequest | ChatCompletionRequest
COMPUTED = ("max_tokens", "logprobs", "structured_outputs", "truncate_prompt_tokens")
"""Options that follow from several fields."""
SAME_NAME = (set(SamplingParams.__struct_fields__) & set(CompletionRequest.__struct_fields__)).difference(COMPUTED)
"""The engine's options that are a request's fields as they are."""
NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "logprobs": (),
    "prompt_logprobs": (),
    "stop": ([], ""),
    "stop_token_ids": ([],),
    "min_tokens": (0,),
    "logit_bias": ({},),
    "allowed_token_ids": ([],),
    "bad_words": ([],),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "skip_special_tokens": (True,),
    "compression": (),
    "structured_outputs": ({},),
    "tools": ([],),
}
"""Fields that a search cannot obey, and their values that ask for nothing. Those of sampling mean nothing to it."""


def check_generation(request: GenerationRequest) -> None:
    """Raises ApiError for fields that cannot be obeyed, or that ask for too much."""
    check_fields(request)
    if (request.n or 1) > MAX_N:
        raise bad_request(f"n={request.n} is not allowed: at most {MAX_N}", "n")
    stop = request.stop if isinstance(request.stop, list) else [request.stop or ""]
    check_count("stop", len(stop), MAX_STOP_STRINGS)
    if any(len(text) > MAX_STOP_CHARACTERS for text in stop):
        raise bad_request(f"a stop string has at most {MAX_STOP_CHARACTERS} characters", "stop")
    check_count("bad_words", len(request.bad_words or ()), MAX_BAD_WORDS)
    check_count("stop_token_ids", len(request.stop_token_ids or ()), MAX_STOP_TOKEN_IDS)
    check_count("logit_bias", len(request.logit_bias or ()), MAX_LOGIT_BIAS)
    if request.stream_options is not None and not request.stream:
        raise bad_request("Stream options can only be defined when `stream=True`.", "stream_options")
    if request.stream and request.prompt_logprobs is not None:
        raise bad_request("prompt_logprobs are not available when `stream=True`", "prompt_logprobs")
    if request.request_id is not None and not request.request_id:
        raise bad_request("request_id is empty: leave it out or give one", "request_id")


def num_logprobs(request: GenerationRequest, most: int) -> int | None:
    """Most likely tokens to report at each position; None for no log probabilities. most: `max_logprobs` of the engine.
    Raises ApiError."""
    if isinstance(request, CompletionRequest):
        number = request.logprobs
        field = "logprobs"
    else:
        if request.top_logprobs and not request.logprobs:
            raise bad_request("when using `top_logprobs`, `logprobs` must be set to true.", "top_logprobs")
        number = (request.top_logprobs or 0) if request.logprobs else None
        field = "top_logprobs"
    if number is not None and (number < -1 or number > most != -1):
        allowed = "at least 0, or -1 for all tokens" if most == -1 else f"between 0 and {most}"
        raise bad_request(f"{field}={number} is not allowed: {allowed}", field)
    return number


def check_logprobs(lengths: Sequence[int], params: Sequence[SamplingParams], model_len: int, vocab_size: int) -> None:
    """Raises ApiError if the answers to prompts of these lengths may have too many log probabilities."""
    count = 0
    for length, each in zip(lengths, params, strict=True):
        output = each.n * (model_len - length if each.max_tokens is None else each.max_tokens)
        for number, positions in ((each.logprobs, output), (each.prompt_logprobs, length)):
            count += positions * (vocab_size if number == -1 else number or 0)
    if count > MAX_LOGPROBS:
        problem = f"the answer may have {count} log probabilities, and at most {MAX_LOGPROBS} are allowed"
        raise bad_request(f"{problem}: lower their number at each position, max_tokens or n", "logprobs")


def streamed_usage(asked: StreamOptions | None, options: ServerOptions) -> tuple[bool, bool]:
    """Whether the usage ends a stream, and whether it is in every chunk."""
    if options.enable_force_include_usage:
        return True, True
    at_end = asked is not None and bool(asked.include_usage)
    return at_end, at_end and asked is not None and bool(asked.continuous_usage_stats)


def sampling_params(
    request: GenerationRequest, max_tokens: int | None, model_defaults: dict[str, Any], **own: Any
) -> SamplingParams:
    """The engine's options of a request whose fields were checked.

    max_tokens: as the prompt's length allows; None for as many as fit.
    own: options that the route sets itself.

    Raises:
        ConfigError: a value is not allowed.
    """
    given = {name: getattr(request, name) for name in SAME_NAME}
    if request.compression is not None:
        given |= structs.asdict(request.compression)
    options: dict[str, Any] = dict(model_defaults)
    for fields in (given, own):
        options |= {name: value for name, value in fields.items() if value is not None}
    options["max_tokens"] = max_tokens
    return SamplingParams(**options)


def beam_search(body: GenerationRequest, max_tokens: list[int]) -> list[BeamSearchParams] | None:
    """The search for each prompt of a request, None if it asks for none: the best `n` of `best_of` beams.

    max_tokens: most tokens after each prompt.

    Raises:
        ApiError: a field cannot be obeyed, or the request asks for too much.
        ConfigError: a value is not allowed.
    """
    n = body.n or 1
    width = body.best_of if body.best_of is not None else n
    if not body.use_beam_search:
        if width not in (1, n):
            raise bad_request(f"best_of={width} needs use_beam_search: true; without it, use n", "best_of")
        if body.length_penalty not in (None, 1):
            raise bad_request("length_penalty needs use_beam_search: true", "length_penalty")
        return None
    for field, neutral in NOT_WITH_BEAMS.items():
        value = getattr(body, field, None)
        is_off = field == "logprobs" and value is False  # 0 asks for those of the tokens
        if value is not None and not is_off and value not in neutral:
            raise bad_request(f"{field} is not supported with use_beam_search", field)
    if body.response_format is not None and body.response_format.type != "text":
        raise bad_request("response_format is not supported with use_beam_search", "response_format")
    if width < n:
        raise bad_request(f"best_of={width} is not allowed with n={n}: at least n", "best_of")
    if width * len(max_tokens) > MAX_BEAMS:
        count = f"{len(max_tokens)} prompts with {width} beams each"
        raise bad_request(f"{count} are more than {MAX_BEAMS} beams", "best_of" if body.best_of else "n")
    if min(max_tokens) < 1:
        raise bad_request("max_tokens=0 is not allowed with use_beam_search: at least 1", "max_tokens")
    penalty = 1.0 if body.length_penalty is None else body.length_penalty
    options: Any = {"beam_width": width, "length_penalty": penalty, "ignore_eos": bool(body.ignore_eos)}
    return [BeamSearchParams(max_tokens=most, **options) for most in max_tokens]
