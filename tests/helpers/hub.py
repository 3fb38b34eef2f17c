"""A hub on loopback: the part of the Hugging Face Hub's HTTP interface by which models are found and downloaded."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any
from urllib.parse import unquote, urlsplit

import pytest
from huggingface_hub import constants

LARGE = (".safetensors", ".gguf", ".bin")


@dataclass
class File:
    """content: bytes that are served. size: what is said of it."""

    content: bytes
    is_large: bool
    size: int
    sha256: str
    git_hash: str

    @classmethod
    def of(cls, name: str, content: bytes) -> File:
        git_hash = hashlib.sha1(b"blob %d\0" % len(content) + content).hexdigest()
        return cls(content, name.endswith(LARGE), len(content), hashlib.sha256(content).hexdigest(), git_hash)

    def listing(self, path: str) -> dict[str, Any]:
        found = {"type": "file", "path": path, "size": self.size, "oid": self.git_hash}
        large = {"oid": self.sha256, "size": self.size, "pointerSize": 134}
        return found | ({"lfs": large} if self.is_large else {})


@dataclass
class Hub:
    """repos: files by name, by ORG/NAME; each has one commit, on the branch main and at the tag v1.

    refuse: the status and headers with which a request is refused, by its method and path; None: it is answered.
    cut: names of files whose next transfer ends in the middle. requests: method, path and range of all so far.
    """

    url: str = ""
    repos: dict[str, dict[str, File]] = field(default_factory=dict)
    refuse: Callable[[str, str], tuple[int, dict[str, str]] | None] = lambda method, path: None
    cut: set[str] = field(default_factory=set)
    requests: list[tuple[str, str, str | None]] = field(default_factory=list)
    tokens: set[str | None] = field(default_factory=set)

    def add(self, repo: str, files: dict[str, bytes]) -> None:
        self.repos[repo] = {name: File.of(name, content) for name, content in files.items()}

    def add_folder(self, repo: str, folder: Path, **others: bytes) -> None:
        files = {file.relative_to(folder).as_posix(): file.read_bytes() for file in folder.rglob("*") if file.is_file()}
        self.add(repo, files | others)

    def commit(self, repo: str) -> str:
        return hashlib.sha1(json.dumps([repo, sorted(self.repos[repo])]).encode()).hexdigest()

    def got(self) -> set[str]:
        """Names of the files whose content was asked for."""
        return {path.split("/", 5)[5] for method, path, _ in self.requests if method == "GET" and "/resolve/" in path}


@contextmanager
def running_hub() -> Iterator[Hub]:
    hub = Hub()
    server = _Server(("127.0.0.1", 0), type("Handler", (_Handler,), {"hub": hub}))
    hub.url = f"http://127.0.0.1:{server.server_port}"
    thread = Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield hub
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


@contextmanager
def reachable_hub(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    """One that huggingface_hub is pointed at, with an empty cache."""
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setenv("NO_PROXY", "127.0.0.1")
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with running_hub() as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        yield hub


class _Server(ThreadingHTTPServer):
    def handle_error(self, request: Any, client_address: Any) -> None:
        """Clients may go away when they know enough."""


class _Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    hub: Hub

    def log_message(self, format: str, *args: Any) -> None:
        pass

    def do_HEAD(self) -> None:
        self._answer()

    def do_GET(self) -> None:
        self._answer()

    def _answer(self) -> None:
        path = unquote(urlsplit(self.path).path)
        if not path.startswith("/api/models/") and "/resolve/" not in path:
            self._send(404, b"", {})  # huggingface_hub asks for more than models
            return
        self.hub.requests.append((self.command, path, self.headers.get("Range")))
        self.hub.tokens.add(self.headers.get("Authorization"))
        refused = self.hub.refuse(self.command, path)
        if refused is not None:
            self._send(refused[0], b"", refused[1])
        elif path.startswith("/api/models/"):
            self._describe(*path.removeprefix("/api/models/").split("/", 3))
        else:
            self._serve_file(*path[1:].split("/", 4))

    def _describe(self, org: str, name: str, what: str = "", revision: str = "main") -> None:
        repo = f"{org}/{name}"
        if repo not in self.hub.repos:
            self._send(404, b"", {"X-Error-Code": "RepoNotFound"})
            return
        commit = self.hub.commit(repo)
        if revision not in ("main", "v1", commit):
            self._send(404, b"", {"X-Error-Code": "RevisionNotFound"})
            return
        files = self.hub.repos[repo]
        if what == "tree":
            body: Any = [file.listing(path) for path, file in files.items()]
        else:
            body = {"id": repo, "sha": commit, "siblings": [{"rfilename": path} for path in files]}
        self._send(200, json.dumps(body).encode(), {"Content-Type": "application/json"})

    def _serve_file(self, org: str, name: str, resolve: str, revision: str, path: str) -> None:
        repo = f"{org}/{name}"
        file = self.hub.repos[repo][path]
        headers = {"X-Repo-Commit": self.hub.commit(repo), "Accept-Ranges": "bytes"}
        if file.is_large:
            headers |= {"X-Linked-Etag": f'"{file.sha256}"', "X-Linked-Size": str(file.size), "ETag": '"of-the-store"'}
        else:
            headers["ETag"] = f'"{file.git_hash}"'
        first, size = 0, len(file.content)
        last = size - 1
        if wanted := self.headers.get("Range"):
            begin, _, end = wanted.removeprefix("bytes=").partition("-")
            first, last = int(begin), min(int(end or last), last)
            headers["Content-Range"] = f"bytes {first}-{last}/{size}"
        cut = self.command == "GET" and path in self.hub.cut
        self.hub.cut -= {path} if cut else set()
        self._send(206 if wanted else 200, file.content[first : last + 1], headers, cut)

    def _send(self, status: int, body: bytes, headers: dict[str, str], cut: bool = False) -> None:
        self.send_response(status)
        for name, value in headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        if self.command == "HEAD":
            return
        self.wfile.write(body[: len(body) // 2] if cut else body)
        self.close_connection = self.close_connection or cut
