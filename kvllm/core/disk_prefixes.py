"""Which prefix blocks the disk has."""

from __future__ import annotations

from collections.abc import Iterable


class DiskPrefixes:
    """Digests of the blocks that an engine may load from the disk.

    It outlives failed steps, after which workers tell again what is there: what was forgotten stays so.
    """

    def __init__(self) -> None:
        self._known = set[bytes]()
        self._written = set[bytes]()  # since the others were forgotten
        self._forgets_others = False

    def __contains__(self, digest: bytes) -> bool:
        return digest in self._known

    def reported(self, digests: Iterable[bytes]) -> None:
        """Workers have found these."""
        self._known.update(self._written.intersection(digests) if self._forgets_others else digests)

    def written(self, digests: Iterable[bytes]) -> None:
        """A plan lets workers write these."""
        digests = list(digests)
        self._known.update(digests)
        if self._forgets_others:
            self._written.update(digests)

    def lost(self, digests: Iterable[bytes]) -> None:
        """These are not there any more."""
        self._known.difference_update(digests)

    def restart(self) -> None:
        """Nothing is known until workers report it."""
        self._known.clear()

    def forget(self) -> None:
        """Find nothing that is there now, whoever wrote it."""
        self._known.clear()
        self._written.clear()
        self._forgets_others = True
