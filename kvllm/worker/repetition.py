"""The pass over a text that is repeated after its own cache, which stores nothing: what KVzip scores with.

Long texts are repeated in pieces. Each of them follows the text, and begins with a few tokens of the piece before, so
that it is clear what goes on. What the pieces before have repeated is not there.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from kvllm.compression.mass import PLAIN_SOFTMAX, Softmax, queries_per_tile
from kvllm.compression.precision import no_tf32
from kvllm.kvcache.ops.base import KVOperations
from kvllm.lora.product import AdapterRows
from kvllm.models.base import Decoder
from kvllm.worker.loaded_adapters import LoadedAdapters
from kvllm.worker.state import SequenceState
from kvllm.worker.transfer import to_device

PIECE, LEAD = 2048, 8
"""Tokens that are repeated at once, and tokens in front of them that are repeated with them (KVzip, section 3.3)."""
LEAST_PIECE = 256
"""Tokens of a piece, if there are fewer positions after the text. It then takes the last positions that there are."""


@dataclass(frozen=True)
class CachedPart:
    """What a sequence has cached in the layers of a part of a KV group.

    table: int32 `[1, blocks]`. length: KV pairs there. region: those that are scored, None for none.
    """

    table: torch.Tensor
    length: int
    region: slice | None


class RepeatedText:
    """Attention of repeated tokens, in place of an `AttentionContext`: over what is cached of one sequence, and over
    the repeated tokens so far.

    part_of: from a layer to the index of its part. softmax_of: of each layer.
    received: of each layer whose part has a region, the highest attention that each KV pair there has received, float32
        `[kv_heads, size]`.
    """

    recurrent = None
    adapters: AdapterRows | None = None

    def __init__(
        self,
        operations: KVOperations,
        parts: Sequence[CachedPart],
        part_of: Mapping[int, int],
        softmax_of: Callable[[int], Softmax],
    ) -> None:
        self.operations = operations
        self.parts = parts
        self.part_of = part_of
        self.softmax_of = softmax_of
        self.received: dict[int, torch.Tensor] = {}
        self._keys = self._values = torch.empty(0)

    def store(self, layer: int, keys: torch.Tensor, values: torch.Tensor) -> None:
        """Hold what the tokens would write to the cache, until the layer's attention has run."""
        self._keys, self._values = keys.transpose(0, 1), values.transpose(0, 1)

    def run(self, layer: int, queries: torch.Tensor, sinks: torch.Tensor | None = None) -> torch.Tensor:
        """As AttentionContext.run."""
        part, of_heads, softmax = self.parts[self.part_of[layer]], queries.transpose(0, 1), self.softmax_of(layer)
        keys = self.operations.gather_keys([layer], part.table, part.length)[0]
        values = self.operations.gather_values([layer], part.table, part.length)[0]
        if part.region:
            received = attention_received(of_heads, keys[:, part.region], self._keys, softmax)
            self.received[layer] = torch.maximum(self.received.get(layer, received), received)
        found = attention(of_heads, (keys, values), (self._keys, self._values), softmax)
        return found.transpose(0, 1).to(queries.dtype).contiguous()


def repeat(
    model: Decoder,
    state: SequenceState,
    text: tuple[int, int],
    attention: RepeatedText,
    adapters: LoadedAdapters | None = None,
) -> None:
    """Give the tokens of a sequence from position `text[0]` to the one in front of `text[1]` to the model once more.
    adapters: among which is that of the sequence, if it has one."""
    cos_sin = model.attentions[0].cos_sin
    length, num_positions = state.logical_length, len(cos_sin)
    for begin, end in pieces(*text, num_positions - length):
        first = min(length, num_positions - (end - begin))
        positions = np.arange(first, first + end - begin)
        attention.adapters = adapters.rows([state.table_slot], [end - begin]) if adapters else None
        model.forward(
            to_device(state.token_ids[begin:end], cos_sin.device), to_device(positions, cos_sin.device), attention
        )


def pieces(begin: int, end: int, room: int) -> Iterator[tuple[int, int]]:
    """Where the pieces of a text begin and end. room: positions after it."""
    size = min(PIECE, max(room - LEAD, LEAST_PIECE))
    for first in range(begin, end, size):
        yield max(begin, first - LEAD), min(end, first + size)


def attention_received(queries: Tensor, keys: Tensor, repeated: Tensor, softmax: Softmax = PLAIN_SOFTMAX) -> Tensor:
    """The highest probability that any repeated token, in any query head of a KV head, gives each cached key.

    Args:
        queries: `[Hq, T, d]`, rotated, of the repeated tokens; query head h reads KV head `h // (Hq // Hkv)`.
        keys: `[Hkv, C, d]`, rotated: those that are cached.
        repeated: `[Hkv, T, d]`, rotated: those of the repeated tokens, of which each sees all up to its own.
        softmax: of the layer. Both kinds of keys take part in it.

    Returns:
        float32 `[Hkv, C]`.
    """
    received = torch.zeros(keys.shape[:2], device=keys.device)
    for _, tile in probabilities(queries, keys, repeated, softmax):
        torch.maximum(received, tile[:, :, :, : keys.shape[1]].amax(dim=(1, 2)), out=received)
    return received


@torch.no_grad()
def attention(
    queries: Tensor, cached: tuple[Tensor, Tensor], repeated: tuple[Tensor, Tensor], softmax: Softmax = PLAIN_SOFTMAX
) -> Tensor:
    """The result of attention for repeated tokens: float32 `[Hq, T, d]`.

    cached: keys and values `[Hkv, C, d]`. repeated: those of the repeated tokens, `[Hkv, T, d]`.
    """
    values = torch.cat((cached[1], repeated[1]), dim=1).float()
    found = queries.new_empty(queries.shape, dtype=torch.float32).unflatten(0, (len(values), -1))
    for begin, tile in probabilities(queries, cached[0], repeated[0], softmax):
        with no_tf32():
            rows = torch.bmm(tile.flatten(1, 2), values).unflatten(1, tile.shape[1:3])
        found[:, :, begin : begin + tile.shape[2]] = rows
    return found.flatten(0, 1)


@torch.no_grad()
def probabilities(
    queries: Tensor, keys: Tensor, repeated: Tensor, softmax: Softmax = PLAIN_SOFTMAX
) -> Iterator[tuple[int, Tensor]]:
    """Attention probabilities, some repeated tokens after others: the first token of each tile, and float32 `[Hkv,
    Hq / Hkv, tokens, C + T]`. Arguments as for `attention_received`."""
    num_cached, num_tokens = keys.shape[1], queries.shape[1]
    of_heads = queries.float().unflatten(0, (len(keys), -1))
    scaled = torch.cat((keys, repeated), dim=1).float() * softmax.scale_of(keys.shape[2])
    index = torch.arange(num_cached + num_tokens, device=keys.device)
    size = max(1, queries_per_tile(scaled) // of_heads.shape[1])
    for begin in range(0, num_tokens, size):
        rows = of_heads[:, :, begin : begin + size]
        with no_tf32():
            logits = torch.bmm(rows.flatten(1, 2), scaled.mT).unflatten(1, rows.shape[1:3])
        logits = softmax.bounded(logits)
        own = num_cached + begin + torch.arange(rows.shape[2], device=keys.device)
        logits.masked_fill_(index > own[:, None], -torch.inf)
        if softmax.sinks is not None:
            sinks = softmax.sinks.view(len(keys), -1, 1, 1).expand(*logits.shape[:3], 1)
            logits = torch.cat((logits, sinks), dim=-1)
        yield begin, logits.softmax(dim=-1)[..., : num_cached + num_tokens]
