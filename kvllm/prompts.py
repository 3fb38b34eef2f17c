"""What a prompt is: text, token ids, or a dict with one of them."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from collections.abc import Sequence as Sequences
from numbers import Integral
from types import UnionType
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


def batch_of(prompts: Any) -> tuple[list[Any], bool]:
    """The prompts as a list, and whether it was a single prompt. An iterator is read once, to its end."""
    if isinstance(prompts, str | bytes | bytearray | Mapping):
        return [prompts], True
    if isinstance(prompts, Array):
        prompts = prompts.tolist()
    if not isinstance(prompts, Iterable):
        raise RequestError(f"prompts={prompts!r} is not allowed: give a prompt (text or token ids) or a list of them")
    batch = list(prompts)
    if batch and all(isinstance(item, Integral) and not isinstance(item, bool) for item in batch):
        return [batch], True
    return batch, False


def one_for_each(name: str, given: Any, kind: type | UnionType, num_prompts: int) -> list[Any]:
    """One value for all prompts, or an iterable with one for each, as a list."""
    if isinstance(given, kind | str | Mapping) or not isinstance(given, Iterable):
        return [given] * num_prompts
    values = list(given)
    if len(values) != num_prompts:
        raise RequestError(f"{len(values)} {name} for {num_prompts} prompts: give one for all or one for each")
    return values
