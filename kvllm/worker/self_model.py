"""Drafts of the model itself, which attends a few of a long text's KV pairs."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from kvllm.attention.base import AttentionBackend
from kvllm.config import EngineConfig
from kvllm.config.speculation import VIEW_FIRST, VIEW_LAST
from kvllm.core.tables import TableStart
from kvllm.models.base import Decoder
from kvllm.worker.draft_model import CachedText, DraftModel, DraftStep
from kvllm.worker.drafter import Text
from kvllm.worker.features.adapters import AdapterFeature
from kvllm.worker.loaded_adapters import LoadedAdapters
from kvllm.worker.state import BlockTables, SequenceState
from kvllm.worker.transfer import to_device


class SelfModel(DraftModel):
    """Attends the first KV pairs of a text and its last ones (Xiao et al. 2024, arXiv 2309.17453), where they lie.

    All that it stores goes to the blocks at the end of the cache that no sequence owns, after a copy of the block that
    is not full. So it leaves no trace, and keeps nothing of a text.
    """

    first, last = VIEW_FIRST, VIEW_LAST

    def __init__(
        self, model: Decoder, backend: AttentionBackend, config: EngineConfig, adapters: LoadedAdapters | None
    ) -> None:
        features = [AdapterFeature(adapters)] if adapters else []
        super().__init__(model, backend, config, 0, config.most_drafts, features)

    def reset(self) -> None:
        self._spare: list[int] = []
        self._copies: list[tuple[int, int]] = []
        self.forward_pass.clear()

    def drop(self, seq_ids: Iterable[int]) -> None:
        """Nothing is kept of any."""

    def _draft(self, texts: Sequence[Text]) -> None:
        num_blocks, at_once = self.cache.num_blocks, self.config.num_self_drafts
        for begin in range(0, len(texts), at_once):
            self._spare = list(range(num_blocks - self.config.num_draft_blocks, num_blocks))
            self._copies = []
            super()._draft(texts[begin : begin + at_once])

    def _cached_text(self, text: Text) -> CachedText:
        """A view of a text's KV pairs, with blocks for its draft."""
        tables, slot, length = text.state.tables, text.state.table_slot, len(text) - 1
        # After a window, tables have room for the tokens of a step, of which new ones may have come; and none after the
        # longest text.
        room = self.config.max_num_batched_tokens - (len(text.new) - 1)
        text.count = min(text.count, room, self.config.max_model_len - length)
        firsts = [self.first if part < tables.full_parts else 0 for part in range(len(tables.parts))]
        pairs = zip(tables.parts, firsts, strict=True)
        self.tables.start(slot, length, [self._view(part, slot, length, text.count, first) for part, first in pairs])
        return CachedText(SequenceState([], slot, self.tables, text.row))

    def _view(self, tables: BlockTables, table_slot: int, length: int, count: int, first: int) -> TableStart:
        """Of a part: the `first` of `length` tokens and the last ones, in whole blocks, and room for `count` more."""
        size, blocks = self.config.block_size, tables.table[table_slot]
        num_full, rest = divmod(length - int(tables.dropped[table_slot]), size)
        begin, end = -(-first // size), max(0, num_full - -(-self.last // size))
        view = [*blocks[: min(begin, end)].tolist(), *blocks[end:num_full].tolist()]
        if rest:
            self._copies.append((int(blocks[num_full]), self._spare[-1]))
        room = [self._spare.pop() for _ in range(-(-(rest + count) // size))]
        return TableStart(length - len(view) * size - rest, view + room)

    def _read(self, found: list[tuple[Text, CachedText]]) -> DraftStep | None:
        if self._copies:
            sources, destinations = zip(*self._copies, strict=True)
            self.operations.copy_blocks(to_device(sources, self.device), to_device(destinations, self.device))
        return super()._read(found)
