"""A server with the model in the package, for all tests that harm nobody."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from tests.helpers.parrot_chat import make_parrot_chat
from tests.helpers.server import ServerProcess

SERVERS = pytest.mark.xdist_group("servers")
"""Of files whose tests share the servers below: one process starts each once."""
PROMPT = "words: d3,f9,Y0,x9\n#>d+f=k\nk>k-Y=Q\nQ>?Q,k,f\n"


@pytest.fixture(scope="session")
def server() -> Iterator[ServerProcess]:
    """Blocks of 16 tokens, so that prompts share some."""
    process = ServerProcess("--block-size", "16", "--kv-cache-memory-bytes", "256M")
    try:
        yield process
    finally:
        assert process.stop() == 0


@pytest.fixture(scope="session")
def keys_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server with the keys "one" and "two"."""
    template = tmp_path_factory.mktemp("template") / "template.jinja"
    template.write_text("{% for message in messages %}{{ message.content }}{% endfor %}")
    keys = ("--api-key", "one", "two", "--kv-cache-memory-bytes", "16M", "--chat-template", str(template))
    process = ServerProcess(*keys)
    try:
        yield process
    finally:
        assert process.stop() == 0


@pytest.fixture(scope="session")
def parrot_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServerProcess]:
    """A server of the model in `tests.helpers.parrot_chat`, with tools and thoughts."""
    path = tmp_path_factory.mktemp("parrot")
    make_parrot_chat(path)
    flags = ("--enable-auto-tool-choice", "--tool-call-parser", "hermes", "--reasoning-parser", "auto")
    process = ServerProcess(str(path), *flags, "--kv-cache-memory-bytes", "64M", "--served-model-name", "parrot")
    try:
        yield process
    finally:
        assert process.stop() == 0
