"""KV groups: layers whose KV pairs live equally long, and the blocks that a sequence needs of each.

All groups take blocks of equal size from one pool. A block holds `block_size` tokens of the layers of one *part*; a
group with more layers than fit has several parts, each with a block of its own for the same tokens.

This module imports no torch.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Sequence
from typing import TypeVar

from msgspec import Struct

K = TypeVar("K", bound=Hashable)

MOST_PADDING = 1 / 16
"""Places of blocks that no layer has, for each that one has. Smaller parts need none, and more tables."""


class KVGroup(Struct, frozen=True):
    """Layers that attend the same tokens.

    window: how many of the last tokens they attend, the query token's own included. Blocks after it are released at
        every step. None: all tokens, as far as no compression drops them.
    parts: indices of the layers, in parts of equal size; the last one may have fewer. `((),)`: all layers of the model.
    retain_blocks: blocks that a compression leaves them of a window. None: as many as the engine's configuration says.
    """

    window: int | None = None
    parts: tuple[tuple[int, ...], ...] = ((),)
    retain_blocks: int | None = None

    @property
    def num_layers(self) -> int:
        """Layers that it names; 0 for all of the model."""
        return sum(map(len, self.parts))

    def first_block(self, length: int, block_size: int) -> int:
        """The first block that the query token at position `length`, or any after it, attends."""
        if self.window is None:
            return 0
        return max(0, length + 1 - self.window) // block_size

    def most_blocks(self, num_tokens: int, block_size: int, chunk: int) -> int:
        """Most blocks that a sequence holds at once until it has `num_tokens` tokens, up to `chunk` of them a step."""
        blocks = -(-num_tokens // block_size)
        if self.window is not None:
            # The window and the chunk may begin and end inside of blocks.
            blocks = min(blocks, -(-(self.window - 1 + min(chunk, num_tokens)) // block_size) + 1)
        return blocks * len(self.parts)


UNIFORM = (KVGroup(),)
"""The groups of a model all of whose layers attend all tokens."""


def make_groups(windows: Sequence[int | None], retained: Sequence[int | None] | None = None) -> tuple[KVGroup, ...]:
    """The groups of a model, from the window of each of its layers.

    The first group has all layers that attend all tokens, or, where there are none, those of the window that fewest
    layers have. Its layers fit into a block; so what fills up the last part of another group takes no more than a
    window.

    retained: blocks that compressions leave each layer of a window, where layers without a window differ in that. They
    then make up several groups, and the first one has a single part of those that keep least.
    """
    if len(set(retained or []) - {None}) > 1:
        return _retaining_groups(windows, retained or [])
    layers_of = _by_key(windows)
    if len(layers_of) == 1:
        return tuple(KVGroup(window) for window in layers_of)
    order = sorted(layers_of, key=lambda window: (window is not None, len(layers_of[window])))
    size = len(layers_of[order[0]])
    return tuple(KVGroup(window, _parts(layers_of[window], size)) for window in order)


def _retaining_groups(windows: Sequence[int | None], retained: Sequence[int | None]) -> tuple[KVGroup, ...]:
    """Groups of layers that keep equally many blocks of what is compressed, least first; then those with a window."""
    layers_of = _by_key((window, None if window else blocks) for window, blocks in zip(windows, retained, strict=True))
    order = sorted(layers_of, key=lambda key: (key[0] is not None, key[1] or 0, len(layers_of[key])))
    size = _part_size([len(layers) for layers in layers_of.values()])
    groups = [KVGroup(window, _parts(layers_of[window, blocks], size), blocks) for window, blocks in order]
    least, *others = groups
    rest = [KVGroup(None, least.parts[1:], least.retain_blocks)] if least.parts[1:] else []
    return (KVGroup(None, least.parts[:1], least.retain_blocks), *rest, *others)


def _by_key(keys: Iterable[K]) -> dict[K, list[int]]:
    """The indices at which each key stands."""
    found: dict[K, list[int]] = {}
    for index, key in enumerate(keys):
        found.setdefault(key, []).append(index)
    return found


def _part_size(numbers: Sequence[int]) -> int:
    """The most layers of a part with which at most MOST_PADDING of the places in full parts of all groups are empty."""
    total = sum(numbers)
    for size in range(min(numbers), 1, -1):
        if sum(-(-number // size) * size for number in numbers) <= total * (1 + MOST_PADDING):
            return size
    return 1


def sliding_blocks(groups: Sequence[KVGroup], num_tokens: int, block_size: int, chunk: int) -> int:
    """Most blocks that all sliding groups hold at once of a sequence; arguments as for `KVGroup.most_blocks`."""
    return sum(group.most_blocks(num_tokens, block_size, chunk) for group in groups if group.window is not None)


def full_groups(groups: Sequence[KVGroup]) -> list[KVGroup]:
    """The groups of layers that attend all tokens. They are the first ones."""
    return [group for group in groups if group.window is None]


def layer_parts(groups: Sequence[KVGroup]) -> list[tuple[int, ...]]:
    """The parts of all groups, each with the indices of its layers. `[()]`: all layers of the model are in one."""
    return [part for group in groups for part in group.parts]


def block_layers(groups: Sequence[KVGroup], num_layers: int) -> int:
    """Layers of the model's `num_layers` that a block has places for: those of the first group."""
    return len(groups[0].parts[0]) or num_layers


def has_full(groups: Sequence[KVGroup]) -> bool:
    """Whether some layers attend all tokens."""
    return groups[0].window is None


def _parts(layers: list[int], size: int) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(layers[i : i + size]) for i in range(0, len(layers), size))
