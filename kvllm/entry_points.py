"""What other packages add to this one, found by their entry points."""

from __future__ import annotations

from functools import cache
from importlib.metadata import entry_points

from kvllm.errors import ConfigError


@cache
def load_entry_points(group: str) -> None:
    """Import the modules that entry points of a group name, such as "kvllm.methods". They register what they have.

    Raises:
        ConfigError: one cannot be imported.
    """
    for entry in entry_points(group=group):
        try:
            entry.load()
        except Exception as error:
            what = group.rpartition(".")[2]
            raise ConfigError(f"the {what} of {entry.value!r} cannot be loaded: {error!r}") from error
