"""/v1/responses/{id}: responses that are kept, and conversations that go on from them."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any, TypeVar

import msgspec
from msgspec import Struct
from starlette.requests import Request
from starlette.responses import Response

from kvllm.serving.bodies import SMALL_BODY_BYTES, json_response
from kvllm.serving.context import RequestContext, context_of
from kvllm.serving.errors import bad_request
from kvllm.serving.response_store import StoredResponse
from kvllm.serving.responses_protocol import InputItem, ResponsesRequest, is_reference

MOST_ITEMS = 100
T = TypeVar("T")


class DeletedResponse(Struct, kw_only=True):
    """Answer of DELETE /v1/responses/{id}."""

    id: str
    deleted: bool = True
    object: str = "response"


class ItemList(Struct, kw_only=True):
    """Answer of /v1/responses/{id}/input_items."""

    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool
    object: str = "list"


class Output(Struct):
    """The items of a response's body."""

    output: list[InputItem]


items_decoder = msgspec.json.Decoder(list[InputItem])
output_decoder = msgspec.json.Decoder(Output)


async def retrieve(request: Request) -> Response:
    """A response as it was at its end."""
    if request.query_params.get("stream", "false") != "false":
        raise bad_request("stream is not supported: a response that is kept has ended", "stream")
    return json_response(_named(request).body)


async def delete(request: Request) -> Response:
    """Keep a response no longer."""
    context, name = context_of(request), request.path_params["id"]
    context.state.responses.delete(context.tenant, name)
    return json_response(DeletedResponse(id=name))


async def cancel(request: Request) -> Response:
    """Refused, with OpenAI's words: no response runs in the background."""
    _named(request)
    raise bad_request("Cannot cancel a synchronous response: close the connection of its request instead")


async def input_items(request: Request) -> Response:
    """The items of a response's own request."""
    stored = _named(request)
    items = await _decoded(context_of(request), stored.size, lambda: msgspec.json.decode(stored.input_items))
    asked = request.query_params
    limit, order = asked.get("limit", "20"), asked.get("order", "desc")
    if not (limit.isdecimal() and 1 <= int(limit[:9]) <= MOST_ITEMS):
        raise bad_request(f"limit={limit[:100]!r} is not allowed: from 1 to {MOST_ITEMS}", "limit")
    if order not in ("asc", "desc"):
        raise bad_request(f"order={order[:100]!r} is not allowed: asc or desc", "order")
    if order == "desc":
        items.reverse()
    if after := asked.get("after"):
        ids = [item["id"] for item in items]
        if after not in ids:
            raise bad_request(f"after={after[:100]!r} is none of the items", "after")
        items = items[ids.index(after) + 1 :]
    page = items[: int(limit)]
    ends = (page[0]["id"], page[-1]["id"]) if page else (None, None)
    return json_response(ItemList(data=page, first_id=ends[0], last_id=ends[1], has_more=len(items) > len(page)))


async def earlier_items(context: RequestContext, body: ResponsesRequest) -> list[InputItem]:
    """What the conversation has before the input of a request. Raises ApiError."""
    if body.previous_response_id is None:
        return []
    chain = context.state.responses.chain(context.tenant, body.previous_response_id, "previous_response_id")
    size = sum(stored.size for stored in chain)
    return await _decoded(context, size, lambda: [item for stored in chain for item in _items(stored)])


async def without_references(context: RequestContext, body: ResponsesRequest) -> list[InputItem]:
    """The items of a request, those that it names by their ids among them. Raises ApiError."""
    if isinstance(body.input, str):
        return [InputItem(type="message", role="user", content=body.input)]
    named: dict[str, StoredResponse] = {}  # by the item
    for index, item in enumerate(body.input):
        if is_reference(item):
            name, where = item.id or "", f"input[{index}]"
            if name in named:  # a short body would make a prompt of any length
                raise bad_request(f"Duplicate item found with id {name[:200]!r}: name each item once", where)
            named[name] = context.state.responses.with_item(context.tenant, name, where)
    found = await _named_items(context, named)
    return [found[item.id or ""] if is_reference(item) else item for item in body.input]


def listed_items(items: list[InputItem], name: str) -> list[dict[str, Any]]:
    """The items of a request as they are listed: each with a type and an id. name: what makes the ids differ."""
    found = []
    for index, item in enumerate(items):
        fields = msgspec.to_builtins(item) | {"type": item.type or "message", "id": item.id or f"in_{name}_{index}"}
        if isinstance(item.content, str):
            kind = "output_text" if item.role == "assistant" else "input_text"
            fields["content"] = [{"type": kind, "text": item.content}]
        found.append(fields)
    return found


async def _named_items(context: RequestContext, named: dict[str, StoredResponse]) -> dict[str, InputItem]:
    """The items with these ids, each out of its response. A response is decoded once."""
    responses = {stored.id: stored for stored in named.values()}

    def find() -> dict[str, InputItem]:
        items = {name: {item.id: item for item in _items(stored)} for name, stored in responses.items()}
        return {name: items[stored.id][name] for name, stored in named.items()}

    return await _decoded(context, sum(stored.size for stored in responses.values()), find)


async def _decoded(context: RequestContext, size: int, decode: Callable[[], T]) -> T:
    """What `decode` makes of so many bytes, in a thread if they are many."""
    if size <= SMALL_BODY_BYTES:
        return decode()
    return await asyncio.get_running_loop().run_in_executor(context.state.pool, decode)


def _items(stored: StoredResponse) -> list[InputItem]:
    """Of input and output."""
    return items_decoder.decode(stored.input_items) + output_decoder.decode(stored.body).output


def _named(request: Request) -> StoredResponse:
    context = context_of(request)
    return context.state.responses.get(context.tenant, request.path_params["id"])
