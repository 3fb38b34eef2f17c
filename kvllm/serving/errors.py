"""Errors of the server, all in OpenAI's shape: `{"error": {"message", "type", "param", "code"}}`."""

from __future__ import annotations

import logging
import re
from collections.abc import Mapping

import msgspec
from starlette.responses import Response

from kvllm.errors import ConfigError, EngineDeadError, KvLLMError, RequestError

logger = logging.getLogger(__name__)

TYPES = {
    400: "BadRequestError",
    401: "AuthenticationError",
    403: "PermissionDeniedError",
    404: "NotFoundError",
    405: "MethodNotAllowedError",
    408: "RequestTimeoutError",
    409: "ConflictError",
    413: "RequestTooLargeError",
    415: "UnsupportedMediaTypeError",
    431: "RequestHeaderTooLargeError",
    500: "InternalServerError",
    503: "ServiceUnavailableError",
}
OPTION = re.compile(r"(\w+)=")  # the errors of options begin with the option's name


class ApiError(Exception):
    """An answer that is an error.

    status: of HTTP.
    param: the field of the body that is wrong, if it is one field.
    headers: of the answer, such as Retry-After.
    """

    def __init__(
        self, status: int, message: str, *, param: str | None = None, headers: Mapping[str, str] | None = None
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.param = param
        self.headers = dict(headers or {})

    @property
    def kind(self) -> str:
        """The type that the status stands for."""
        return TYPES.get(self.status, "Error")

    def body(self) -> bytes:
        """The JSON text."""
        return self._body(self.kind, self.status)

    def _body(self, kind: str, code: int | str) -> bytes:
        error = {"message": self.message, "type": kind, "param": self.param, "code": code}
        return msgspec.json.encode({"error": error})

    def response(self) -> Response:
        return Response(self.body(), self.status, self.headers, "application/json")


class ContextTooLong(ApiError):
    """A prompt, or what is asked for after it, does not fit into the model's context.

    Clients shorten a conversation when they see the first words of the text, or the type and code, all OpenAI's.

    tokens: of the prompt, or what it has at least. asked: tokens of output. longest: `max_model_len`.
    """

    def __init__(self, problem: str, tokens: int, longest: int, asked: int | None = None) -> None:
        most = f"This model's maximum context length is {longest} tokens. However, {problem}."
        advice = "Please reduce the length of the input or the number of tokens asked for."
        super().__init__(400, f"{most} {advice}", param="prompt")
        self.tokens = tokens
        self.longest = longest
        self.asked = asked

    @property
    def kind(self) -> str:
        """The type that the status stands for."""
        return TYPES.get(self.status, "Error")

    def body(self) -> bytes:
        """The JSON text."""
        return self._body("invalid_request_error", "context_length_exceeded")


def bad_request(message: str, param: str | None = None) -> ApiError:
    return ApiError(400, message, param=param)


def check_count(field: str, count: int, most: int) -> None:
    """Raises ApiError if a list, or a number of things to make, is too long."""
    if count > most:
        raise bad_request(f"{field} has {count} items: at most {most} are allowed", field)


def unavailable(message: str, retry_after: int = 1) -> ApiError:
    """retry_after: seconds after which a client may try again."""
    return ApiError(503, message, headers={"Retry-After": str(retry_after)})


def as_api_error(error: BaseException) -> ApiError:
    """The answer to an exception. What no client can have caused is logged, and its text is not told."""
    if isinstance(error, ApiError):
        return error
    if isinstance(error, ConfigError):
        option = OPTION.match(str(error))
        return bad_request(str(error), option[1] if option else None)
    if isinstance(error, RequestError):
        return bad_request(str(error), error.param)
    if isinstance(error, EngineDeadError):
        return unavailable("the engine has failed and is being started again: try again later", 5)
    if isinstance(error, KvLLMError):
        logger.error("a request has failed: %s", error)
    else:
        logger.error("a request has failed", exc_info=error)
    return ApiError(500, "the server has failed to answer: its log says why")
