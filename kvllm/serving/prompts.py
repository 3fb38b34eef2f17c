"""Prompts of requests as token ids, with a bound on their length before the work of encoding them."""

from __future__ import annotations

import asyncio
from functools import partial
from typing import Any, NamedTuple, TypeVar

from kvllm.control_tokens import encode_marked, unmark
from kvllm.serving.errors import ContextTooLong, bad_request, check_count
from kvllm.serving.generation import EncodedPrompt
from kvllm.serving.protocol import ChatCompletionRequest, CompletionRequest, GenerationFields, TokenizeRequest
from kvllm.serving.state import ServerState

MAX_PROMPTS = 1024
EFFORTS = ("none", "minimal", "low", "medium", "high", "xhigh", "max")
T = TypeVar("T", str, list[int])
LONG_TEXT = 4096
"""Characters. A longer text is encoded in a thread: it would hold up the event loop."""


class Truncation(NamedTuple):
    """What a prompt is cut to. side: where tokens are dropped; "right" keeps the first ones."""

    tokens: int
    side: str

    def cut(self, given: T, unit: int = 1) -> T:
        """unit: items of `given`, such as characters, for each token."""
        most = self.tokens * unit
        return given[:most] if self.side == "right" else given[-most:]


async def completion_prompts(state: ServerState, request: CompletionRequest) -> list[EncodedPrompt]:
    """The prompts of a completion request. Raises ApiError and RequestError."""
    given = request.prompt
    if given is None or given == []:
        raise bad_request("a prompt is needed: text, token ids, or a list of one of them", "prompt")
    if isinstance(given, str) or all(isinstance(each, int) for each in given):
        prompts: list[Any] = [given]
    elif all(isinstance(each, str) for each in given) or all(isinstance(each, list) for each in given):
        prompts = list(given)
    else:
        raise bad_request("prompt mixes texts and token ids: give a list of texts, or of lists of ids", "prompt")
    check_count("prompt", len(prompts), MAX_PROMPTS)
    special, kept = request.add_special_tokens is not False, truncation(state, request)
    return [await encode(state, prompt, special, kept) for prompt in prompts]


async def chat_prompt(
    state: ServerState,
    request: ChatCompletionRequest | TokenizeRequest,
    messages: list[dict[str, Any]],
    kept: Truncation | None = None,
) -> EncodedPrompt:
    """The prompt of a conversation. Raises ApiError and RequestError."""
    if not messages:
        raise bad_request("messages are empty: at least one is needed", "messages")
    continues = bool(request.continue_final_message)
    if continues and request.add_generation_prompt:
        both = "Cannot set both `continue_final_message` and `add_generation_prompt` to True."
        raise bad_request(both, "continue_final_message")
    options = dict(state.options.chat_template_kwargs)
    if isinstance(request, ChatCompletionRequest):
        options |= effort_options(request.reasoning_effort)
    options |= request.chat_template_kwargs or {}
    if isinstance(request, ChatCompletionRequest) and request.documents:
        options["documents"] = request.documents
    options["add_generation_prompt"] = not continues and request.add_generation_prompt is not False
    if continues:
        options["continue_final_message"] = True
    text = await state.chat_template.render(messages, request.tools, options)
    # The template has written the special tokens already.
    return await encode(state, text, bool(request.add_special_tokens), kept, is_marked=True)


def effort_options(effort: str | None) -> dict[str, Any]:
    """What `reasoning_effort` tells a chat template, which has one switch, the other, or none. Raises ApiError."""
    if effort is None:
        return {}
    if effort not in EFFORTS:
        allowed = ", ".join(EFFORTS)
        raise bad_request(f"reasoning_effort={effort[:100]!r} is not allowed: {allowed}", "reasoning_effort")
    return {"reasoning_effort": effort} | ({"enable_thinking": False} if effort == "none" else {})


async def encode(
    state: ServerState,
    prompt: str | list[int],
    special: bool,
    kept: Truncation | None = None,
    *,
    is_marked: bool = False,
) -> EncodedPrompt:
    """The token ids of a prompt, in a thread if its text is long.

    kept: what a longer prompt is cut to; None refuses what is longer than the model allows.
    is_marked: it is the text of a conversation, with marks.
    """
    longest = state.max_model_len
    if isinstance(prompt, str):
        if len(prompt) > (longest if kept is None else kept.tokens) * state.longest_token:
            if kept is None:
                tokens = -(-len(prompt) // state.longest_token)
                problem = f"your prompt has {len(prompt)} characters, which are at least {tokens} tokens"
                raise ContextTooLong(problem, tokens, longest)
            prompt = kept.cut(prompt, state.longest_token)
        encoder = partial(encode_marked, state.tokenizer) if is_marked else state.tokenizer.encode
        encoding = partial(encoder, prompt, add_special_tokens=special)
        is_long = len(prompt) > LONG_TEXT
        token_ids = await asyncio.get_running_loop().run_in_executor(state.pool, encoding) if is_long else encoding()
    else:
        token_ids = prompt
    if kept is None and len(token_ids) > longest:
        raise ContextTooLong(f"your prompt has {len(token_ids)} tokens", len(token_ids), longest)
    text = prompt if isinstance(prompt, str) else None
    if text is not None and is_marked:
        text = unmark(text)
    return EncodedPrompt(token_ids if kept is None else kept.cut(token_ids), text)


def truncation(state: ServerState, request: GenerationFields) -> Truncation | None:
    """What `truncate_prompt_tokens` leaves of a prompt; None for all. Raises ApiError."""
    most = request.truncate_prompt_tokens
    if most is None:
        return None
    room = state.max_model_len - max(1, request.max_tokens or 1)
    if not (most == -1 or 1 <= most <= state.max_model_len):
        allowed = f"from 1 to {state.max_model_len}, or -1 for as many as fit"
        raise bad_request(f"truncate_prompt_tokens={most} is not allowed: {allowed}", "truncate_prompt_tokens")
    return Truncation(max(1, room) if most == -1 else most, request.truncation_side or "left")


def max_tokens(state: ServerState, prompt: EncodedPrompt, asked: int | None, default: int | None) -> int | None:
    """Tokens that a completion may have; None for as many as fit.

    asked: refused if it does not fit after the prompt.
    default: if nothing is asked for, what fits of it; None for all that fits.

    Raises:
        ApiError: the model's context is too short.
    """
    length = len(prompt.token_ids)
    room = state.max_model_len - length
    if length == 0:
        raise bad_request("the prompt is empty: it needs at least one token", "prompt")
    if asked is not None and asked < 0:
        raise bad_request(f"max_tokens={asked} is not allowed: at least 0", "max_tokens")
    if room < (1 if asked is None else asked) or (asked == 0 and room < 1):
        wanted = "" if asked is None else f" and you asked for {asked} more"
        raise ContextTooLong(f"your prompt has {length} tokens{wanted}", length, state.max_model_len, asked)
    return asked if asked is not None or default is None else min(default, room)


async def drop_earliest(state: ServerState, chat: ChatCompletionRequest) -> None:
    """Leave out the earliest messages of a chat, as few as make the rest fit into the model's context.

    System messages at the start stay. What is left begins with a message of the user, or else after the last one of
    them, and never with the result of a tool, whose call would be missing. Raises ApiError and RequestError.
    """
    roles = [message.get("role") for message in chat.messages]
    first = next((index for index, role in enumerate(roles) if role not in ("system", "developer")), len(roles))
    last_user = max((index for index, role in enumerate(roles) if role == "user"), default=first)
    starts = [first]
    starts += [i for i in range(first + 1, len(roles)) if roles[i] == "user" or (i > last_user and roles[i] != "tool")]

    async def fits(start: int) -> bool:
        try:
            prompt = await chat_prompt(state, chat, chat.messages[:first] + chat.messages[start:])
            max_tokens(state, prompt, chat.max_completion_tokens, None)
        except ContextTooLong:
            return False
        return True

    low, high = 0, len(starts) - 1
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if await fits(starts[middle]) else (middle + 1, high)
    del chat.messages[first : starts[low]]
