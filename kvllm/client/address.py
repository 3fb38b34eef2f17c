"""The address and the key of a server, as all client commands take them. Needs no HTTP library."""

from __future__ import annotations

import argparse
import os
from urllib.parse import urlsplit

from kvllm.errors import ConfigError

DEFAULT_URL = "http://127.0.0.1:8000"
KEY_VARIABLE = "KVLLM_API_KEY"


def add_arguments(parser: argparse.ArgumentParser, option: str = "--url") -> None:
    """Add the option of the URL under its name, and `--api-key`."""
    help = f"the server, with or without /v1 (default: {DEFAULT_URL})"
    parser.add_argument(option, dest="url", default=DEFAULT_URL, metavar="URL", help=help)
    parser.add_argument("--api-key", metavar="KEY", help=f"key of the server (default: the variable {KEY_VARIABLE})")


def root_of(url: str) -> str:
    """The URL under which /v1 and /metrics lie. Raises ConfigError for what is no HTTP URL."""
    root = url.rstrip("/").removesuffix("/v1")
    if not root.startswith(("http://", "https://")) or not _has_host(root):
        raise ConfigError(f"{url!r} is no URL of a server: write it like {DEFAULT_URL}")
    return root


def _has_host(url: str) -> bool:
    """And a port that can be one, if any."""
    try:
        parts = urlsplit(url)
        return bool(parts.hostname) and parts.port != 0
    except ValueError:
        return False


def headers(api_key: str | None) -> dict[str, str]:
    """The headers of every request. The key comes from the environment where none is given. Raises ConfigError for one
    that no header can hold; the message does not tell it."""
    key = api_key or os.environ.get(KEY_VARIABLE)
    if key and not (key.isascii() and key.isprintable()):
        where = "--api-key" if api_key else KEY_VARIABLE
        raise ConfigError(f"{where} has a line end or another character that no HTTP header can hold: remove it")
    return {"Authorization": f"Bearer {key}"} if key else {}
