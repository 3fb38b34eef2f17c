"""What a prompt is: text, token ids, or a dict with one of them."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Sequences
from typing import Any, NotRequired, Protocol, TypedDict, runtime_checkable

from kvllm.errors import RequestError
from kvllm.spelling import did_you_mean


@runtime_checkable
class Array(Protocol):
    """The methods that NumPy's arrays and torch's tensors have in common."""

    def tolist(self) -> Any: ...


Prompt = str | Sequences[int] | Array | Mapping[str, Any]
"""Text, integer token ids (a sequence, or a one-dimensional array), or a dict with `prompt` or `prompt_token_ids`.

A dict with both brings text that was encoded before: the token ids are the prompt."""

PROMPT_KEYS = ("prompt_token_ids", "prompt")
"""The first one counts."""
NOT_TEXT = (
    "multi_modal_data",
    "multi_modal_uuids",
    "mm_processor_kwargs",
    "prompt_embeds",
    "encoder_prompt",
    "decoder_prompt",
    "token_type_ids",
)
"""Keys of vLLM's prompts for what is not supported."""


class TextPrompt(TypedDict):
    """A prompt as text."""

    prompt: str
    cache_salt: NotRequired[str]


class TokensPrompt(TypedDict):
    """A prompt as token ids. prompt: the text that they encode, for the output."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]


def check_keys(prompt: Mapping[Any, Any]) -> None:
    """Raises RequestError for a dict that is no prompt, or that has more than text."""
    allowed = "a prompt given as a dict needs 'prompt' or 'prompt_token_ids'"
    for key, value in prompt.items():
        if key in NOT_TEXT and not (value is None or (isinstance(value, Mapping | list) and not value)):
            raise RequestError(f"{allowed}, and {key!r} is not supported: the models read text alone")
        if key not in (*PROMPT_KEYS, "cache_salt", *NOT_TEXT):
            near = did_you_mean(key, PROMPT_KEYS) if isinstance(key, str) else ""
            raise RequestError(f"{allowed}, {key!r} is neither{near}")
    if all(prompt.get(key) is None for key in PROMPT_KEYS):
        raise RequestError(f"{allowed}, this one has {list(prompt)}")
