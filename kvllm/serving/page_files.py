"""The files of the live page. They hold no data, so they need no key."""

from __future__ import annotations

from functools import cache
from pathlib import Path

from starlette.requests import Request
from starlette.responses import Response

from kvllm.serving.errors import ApiError

FOLDER = Path(__file__).parent / "page"
TYPES = {".html": "text/html", ".css": "text/css", ".js": "text/javascript", ".svg": "image/svg+xml"}
HEADERS = {
    "Content-Security-Policy": (
        "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self'; connect-src 'self'; "
        "base-uri 'none'; form-action 'none'; frame-ancestors 'none'; require-trusted-types-for 'script'"
    ),
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cache-Control": "no-cache",
}
"""No script, style, host or frame but the page's own; text that became markup would run nothing."""


@cache
def _files() -> dict[str, bytes]:
    """The content of each file by its name: no path of a request reaches the file system."""
    return {path.name: path.read_bytes() for path in FOLDER.iterdir() if path.suffix in TYPES}


async def index(request: Request) -> Response:
    """The page itself."""
    return _response("index.html")


async def file(request: Request) -> Response:
    """A script, style or picture of the page. Raises ApiError with status 404."""
    return _response(request.path_params["name"])


def _response(name: str) -> Response:
    content = _files().get(name)
    if content is None:
        raise ApiError(404, "the page has no such file")
    return Response(content, headers=HEADERS, media_type=TYPES[Path(name).suffix])
