"""POST /tokenize and /detokenize."""

from __future__ import annotations

import asyncio
from functools import partial

import msgspec
from starlette.requests import Request
from starlette.responses import Response

from kvllm.serving.context import check_model, context_of
from kvllm.serving.errors import ContextTooLong, bad_request
from kvllm.serving.limits import read_json
from kvllm.serving.prompts import chat_prompt, encode
from kvllm.serving.protocol import DetokenizeRequest, TokenizeRequest
from kvllm.serving.responses import DetokenizeResponse, TokenizeResponse
from kvllm.serving.sampling import check_fields

tokenize_decoder = msgspec.json.Decoder(TokenizeRequest)
detokenize_decoder = msgspec.json.Decoder(DetokenizeRequest)
MAX_TOKEN = 1 << 31


async def tokenize(request: Request) -> Response:
    """Token ids of a prompt, or of messages after the chat template."""
    state = context_of(request).state
    body = await read_json(request, tokenize_decoder, state.pool)
    check_model(state, body.model)
    check_fields(body)
    if (body.prompt is None) == (body.messages is None):
        raise bad_request("give one of prompt and messages", "prompt")
    if body.messages is not None:
        prompt = await chat_prompt(state, body, body.messages)
    else:
        prompt = await encode(state, body.prompt or "", body.add_special_tokens is not False)
    ids = prompt.token_ids
    names = [str(name) for name in state.tokenizer.hf.convert_ids_to_tokens(ids)] if body.return_token_strs else None
    return _answer(TokenizeResponse(len(ids), state.max_model_len, ids, names))


async def detokenize(request: Request) -> Response:
    """The text of token ids."""
    state = context_of(request).state
    body = await read_json(request, detokenize_decoder, state.pool)
    check_model(state, body.model)
    if len(body.tokens) > state.max_model_len:
        raise ContextTooLong(f"you gave {len(body.tokens)} tokens", len(body.tokens), state.max_model_len)
    if outside := [token for token in body.tokens if not 0 <= token < MAX_TOKEN]:
        raise bad_request(f"token id {outside[0]} is not in the vocabulary", "tokens")
    decode = partial(state.tokenizer.decode, body.tokens)
    return _answer(DetokenizeResponse(await asyncio.get_running_loop().run_in_executor(state.pool, decode)))


def _answer(body: msgspec.Struct) -> Response:
    return Response(msgspec.json.encode(body), media_type="application/json")
