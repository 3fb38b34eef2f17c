"""One HTTP request on its way through the server: its id, its key, and what it asks for."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from starlette.requests import Request

from kvllm.serving.errors import ApiError
from kvllm.serving.generation import Origin
from kvllm.serving.request_id import clean_request_id
from kvllm.serving.state import ServerState

if TYPE_CHECKING:
    from kvllm.serving.generation import Generation


@dataclass(slots=True)
class RequestContext:
    """What is known of a request. tenant: the name of its key, "" without keys. generation: once there is one."""

    state: ServerState
    request_id: str
    tenant: str
    generation: Generation | None = None

    def begin(self, body: Any) -> None:
        """Take the id that a body gives, and check its model. Raises ApiError."""
        if getattr(body, "request_id", None):
            self.request_id = clean_request_id(body.request_id)
        check_model(self.state, body.model)

    def origin(self, body: Any) -> Origin:
        """Prefixes are shared within a key alone; a salt parts them further."""
        salt = f"{self.tenant}\0{body.cache_salt or ''}" if self.tenant or body.cache_salt else None
        return Origin(self.request_id, self.tenant, body.priority or 0, salt)


def context_of(request: Request) -> RequestContext:
    return request.scope["kvllm"]


def check_model(state: ServerState, name: str | None) -> None:
    """Raises ApiError with status 404 for a model that is not served here."""
    if name is not None and name not in state.options.served_model_names:
        known = ", ".join(state.options.served_model_names)
        raise ApiError(404, f"The model `{name[:200]}` does not exist: this server has {known}.", param="model")
