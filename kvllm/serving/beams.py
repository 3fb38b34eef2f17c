"""Beam search in requests, with the fields of vLLM: `use_beam_search`, `best_of`, `length_penalty`."""

from __future__ import annotations

from typing import Any

from kvllm.sampling_params import BeamSearchParams
from kvllm.serving.errors import bad_request
from kvllm.serving.limits import MAX_BEAMS
from kvllm.serving.protocol import ChatCompletionRequest, CompletionRequest

NOT_WITH_BEAMS: dict[str, tuple[Any, ...]] = {
    "logprobs": (False,),
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


def beam_search(
    body: CompletionRequest | ChatCompletionRequest, max_tokens: list[int]
) -> list[BeamSearchParams] | None:
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
        if value is not None and value not in neutral:
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
