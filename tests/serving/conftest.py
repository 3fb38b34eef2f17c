"""A server with the model in the package, for all tests that harm nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.server import ServerProcess

PROMPT = "words: d3,f9,Y0,x9\n#>d+f=k\nk>k-Y=Q\nQ>?Q,k,f\n"


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Blocks of 16 tokens, so that prompts share some."""
    process = ServerProcess("--block-size", "16", "--kv-cache-memory-bytes", "256M")
    try:
        yield process
    finally:
        assert process.stop() == 0
