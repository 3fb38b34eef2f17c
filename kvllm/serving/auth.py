"""API keys: who may use the server, and under which name a request is counted."""

from __future__ import annotations

import hashlib
import hmac
import os
import tomllib
from collections.abc import Iterable
from pathlib import Path

import msgspec
from msgspec import Struct

from kvllm.config import TenantConfig
from kvllm.errors import ConfigError
from kvllm.serving.errors import ApiError

VARIABLE = "KVLLM_API_KEY"
OPEN_ROUTES = frozenset({"/", "/health", "/ping", "/version"})
"""Routes that need no key."""
OPEN_FILES = "/page/"
"""Where the files of the live page are. They need none, too: a key is typed into the page."""
KEY_HEADERS = (b"authorization", b"x-api-key")
"""Headers that may bring a key. Clients of Anthropic's API send the second one, some of them both."""
EXAMPLE = '[[keys]]\\nname = "alice"\\nkey = "..."'


class KeyEntry(Struct, forbid_unknown_fields=True):
    """A key as a file has it.

    name: what the log and the scheduler call its owner. The others are those of TenantConfig.
    """

    name: str
    key: str
    weight: float = 1.0
    guaranteed_share: float = 0.0
    max_priority: int | None = None
    cached_share: float = 1.0

    def tenant(self) -> TenantConfig:
        """What the owner may have of the engine. Raises ConfigError."""
        try:
            return TenantConfig(**{name: getattr(self, name) for name in self.__struct_fields__[2:]})
        except ConfigError as error:
            raise ConfigError(f"the API key named {self.name!r}: {error}") from None


class KeyFile(Struct, forbid_unknown_fields=True):
    """A TOML file with a table `[[keys]]` for each key."""

    keys: list[KeyEntry]


class Keys:
    """The keys that are accepted; without any, everybody may use the server.

    tenants: what the owner of each may have of the engine, by the key's name.

    Only digests are kept. A comparison takes the same time for every wrong key.
    """

    def __init__(self, entries: Iterable[KeyEntry] = ()) -> None:
        self._names: dict[bytes, str] = {}
        self.tenants: dict[str, TenantConfig] = {}
        for entry in entries:
            if not entry.name or not entry.key:
                raise ConfigError(f"the API key named {entry.name!r} is not allowed: give it a name and a key")
            if entry.name in self.tenants or _digest(entry.key) in self._names:
                raise ConfigError(f"the API key named {entry.name!r} is there twice: names and keys are unique")
            self.tenants[entry.name] = entry.tenant()
            self._names[_digest(entry.key)] = entry.name

    def __bool__(self) -> bool:
        return bool(self._names)

    def tenant(self, path: str, headers: Iterable[tuple[bytes, bytes]]) -> str:
        """The name of the first right key that a request brings; "" if none is needed.

        headers: those of the request, with names in lower case.

        Raises:
            ApiError: 401, there are keys and the request has none of them.
        """
        if not self._names or path in OPEN_ROUTES or path.startswith(OPEN_FILES):
            return ""
        given = [_key(name, value.decode("latin-1")) for name, value in headers if name in KEY_HEADERS]
        for name in [self._name(key) for key in given]:  # all of them are compared first
            if name is not None:
                return name
        problem = "Incorrect API key provided" if given else "You didn't provide an API key"
        message = f"{problem}: send the header 'Authorization: Bearer KEY'"
        raise ApiError(401, message, headers={"WWW-Authenticate": "Bearer"})

    def _name(self, key: str) -> str | None:
        """The name of a key, None of a wrong one."""
        digest, found = _digest(key), None
        for known, name in self._names.items():
            if hmac.compare_digest(known, digest):
                found = name
        return found


def load_keys(file: Path | None, given: Iterable[str] = ()) -> Keys:
    """The keys of a file, of the command line and of the environment variable (one, or several with commas).

    Raises:
        ConfigError: the file cannot be read, or has something else than keys.
    """
    entries = [] if file is None else _read(file)
    plain = [*given, *filter(None, (key.strip() for key in os.environ.get(VARIABLE, "").split(",")))]
    entries += [KeyEntry(f"key-{number}", key) for number, key in enumerate(dict.fromkeys(plain), start=1)]
    return Keys(entries)


def _read(file: Path) -> list[KeyEntry]:
    try:
        return msgspec.convert(tomllib.loads(file.read_text()), KeyFile).keys
    except OSError as error:
        raise ConfigError(f"--api-key-file {file}: {error.strerror}") from None
    except tomllib.TOMLDecodeError:  # its text may quote a key
        raise ConfigError(f"--api-key-file {file} is not valid TOML: write {EXAMPLE}") from None
    except (msgspec.ValidationError, UnicodeDecodeError) as error:
        raise ConfigError(f"--api-key-file {file}: {error}: write {EXAMPLE}") from None


def _key(header: bytes, value: str) -> str:
    """The key in a header; "", which is none, in one that is not of the scheme Bearer."""
    if header == b"authorization":
        scheme, _, value = value.strip().partition(" ")
        value = value if scheme.lower() == "bearer" else ""
    return value.strip()


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).digest()
