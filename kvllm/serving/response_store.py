"""Responses that `/v1/responses` keeps in memory, those of each key apart."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass, field
from weakref import WeakValueDictionary

from kvllm.serving.errors import ApiError

MAX_RESPONSES = 1000
MAX_BYTES = 64 << 20
MAX_SECONDS = 24 * 3600.0
"""Bounds for each key. What was not used for the longest time goes first."""


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response at its end. body: JSON, as the client got it. input_items: JSON of a list of the request's own items.

    item_ids: of input and output. previous_id: of the response that it goes on from.
    """

    id: str
    body: bytes
    input_items: bytes
    item_ids: tuple[str, ...]
    previous_id: str | None = None

    @property
    def size(self) -> int:
        return len(self.body) + len(self.input_items)


@dataclass(slots=True)
class Shelf:
    """The responses of one key, that used last at the end, each with the time until which it is kept."""

    responses: OrderedDict[str, tuple[float, StoredResponse]] = field(default_factory=OrderedDict)
    of_item: dict[str, str] = field(default_factory=dict)  # item id: response id
    size: int = 0

    def remove(self, response_id: str) -> None:
        _, stored = self.responses.pop(response_id)
        self.size -= stored.size
        for item_id in stored.item_ids:
            if self.of_item.get(item_id) == response_id:
                del self.of_item[item_id]


class ResponseStore:
    """Keeps responses within the bounds above. Used on the event loop alone. clock: gives seconds."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._shelves: dict[str, Shelf] = {}
        self._writers: WeakValueDictionary[tuple[str, str], object] = WeakValueDictionary()
        self._clock = clock

    def claim(self, tenant: str, response_id: str, writer: object) -> bool:
        """Whether an id is free. It belongs to its writer then, as long as that lives."""
        if self.has(tenant, response_id):
            return False
        return self._writers.setdefault((tenant, response_id), writer) is writer

    def put(self, tenant: str, stored: StoredResponse) -> None:
        """Keep a response, if it is not larger than all that a key may keep."""
        shelf, now = self._shelf(tenant), self._clock()
        for name in [name for name, (end, _) in shelf.responses.items() if end < now or name == stored.id]:
            shelf.remove(name)
        shelf.responses[stored.id] = (now + MAX_SECONDS, stored)
        shelf.of_item.update(dict.fromkeys(stored.item_ids, stored.id))
        shelf.size += stored.size
        while len(shelf.responses) > MAX_RESPONSES or shelf.size > MAX_BYTES:
            shelf.remove(next(iter(shelf.responses)))

    def get(self, tenant: str, response_id: str, param: str | None = None) -> StoredResponse:
        """Raises ApiError with status 404 if it is not there. param: the field of the request that names it."""
        shelf = self._shelf(tenant)
        if not self.has(tenant, response_id):
            why = "responses are kept in memory for a day at most, none with store=false and none of other keys"
            raise ApiError(404, f"Response with id '{response_id[:200]}' not found: {why}.", param=param)
        shelf.responses.move_to_end(response_id)
        return shelf.responses[response_id][1]

    def chain(self, tenant: str, response_id: str, param: str) -> list[StoredResponse]:
        """A response, and before it those that it goes on from. Raises ApiError."""
        chain: list[StoredResponse] = []
        previous: str | None = response_id
        while previous is not None and len(chain) <= MAX_RESPONSES:
            chain.append(self.get(tenant, previous, param))
            previous = chain[-1].previous_id
        return chain[::-1]

    def with_item(self, tenant: str, item_id: str, param: str) -> StoredResponse:
        """The response that has an item. Raises ApiError."""
        response_id = self._shelf(tenant).of_item.get(item_id)
        if response_id is None:
            message = f"Item with id '{item_id[:200]}' not found: no response that is kept has it."
            raise ApiError(404, message, param=param)
        return self.get(tenant, response_id, param)

    def delete(self, tenant: str, response_id: str) -> None:
        """Raises ApiError with status 404 if it is not there."""
        self.get(tenant, response_id)
        self._shelf(tenant).remove(response_id)

    def has(self, tenant: str, response_id: str) -> bool:
        end, _ = self._shelf(tenant).responses.get(response_id, (float("-inf"), None))
        return end >= self._clock()

    def _shelf(self, tenant: str) -> Shelf:
        return self._shelves.setdefault(tenant, Shelf())
