"""Conversations to text, through the chat template that the checkpoint or the server's operator gives."""

from __future__ import annotations

import asyncio
import ctypes
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, Generic, TypeVar

from kvllm.chat_messages import RESERVED, render_chat
from kvllm.errors import ConfigError, RequestError
from kvllm.serving.errors import ApiError, bad_request
from kvllm.tokenizer import Tokenizer

TEMPLATE_SECONDS = 5.0
"""Time that a template may take. It is a program, and messages are its input."""
NO_TEMPLATE = (
    "the model has no chat template: send the prompt to /v1/completions, "
    "or let the server's operator start it with --chat-template FILE"
)
T = TypeVar("T")


def read_template(file: Path) -> str:
    """The template in a file. Raises ConfigError."""
    try:
        return file.read_text()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--chat-template {file} cannot be read: {error}") from None


def check_template_kwargs(options: dict[str, Any]) -> dict[str, Any]:
    """What every chat passes to the template. Raises ConfigError for names that it may not have."""
    for name in ("chat_template", *RESERVED):
        if name in options:
            raise ConfigError(f"--default-chat-template-kwargs may not have {name!r}")
    return options


class ChatTemplate:
    """Renders conversations in threads of `pool`, each within TEMPLATE_SECONDS of its beginning.

    template: instead of the checkpoint's own.
    """

    def __init__(self, tokenizer: Tokenizer | None, template: str | None, pool: ThreadPoolExecutor) -> None:
        self._tokenizer = tokenizer
        self._template = template
        self._pool = pool

    @property
    def exists(self) -> bool:
        """Whether conversations can be rendered."""
        return self._tokenizer is not None and (
            self._template is not None or self._tokenizer.hf.chat_template is not None
        )

    async def render(
        self, messages: list[dict[str, Any]], tools: list[dict[str, Any]] | None, options: dict[str, Any]
    ) -> str:
        """The prompt's text, which has its special tokens, and marks for `encode_marked`. Raises ApiError."""
        tokenizer = self._tokenizer
        if tokenizer is None or (self._template is None and tokenizer.hf.chat_template is None):
            raise bad_request(NO_TEMPLATE)
        if "chat_template" in options:  # the operator chooses it
            raise bad_request("chat_template_kwargs may not have 'chat_template'", "chat_template_kwargs")
        if self._template is not None:
            options = options | {"chat_template": self._template}
        rendering = InterruptibleCall(lambda: render_chat(tokenizer, messages, tools, options))
        loop, begun = asyncio.get_running_loop(), asyncio.Event()

        def render() -> str:
            loop.call_soon_threadsafe(begun.set)
            return rendering()

        work = loop.run_in_executor(self._pool, render)
        alarm = asyncio.ensure_future(_alarm(begun, rendering.interrupt))
        try:
            return await work
        except RequestError as error:
            if rendering.is_interrupted:
                raise ApiError(400, f"the chat template took longer than {TEMPLATE_SECONDS:.0f} s") from None
            raise bad_request(str(error), error.param or "messages") from None
        except asyncio.CancelledError:  # nobody waits for it
            rendering.interrupt()
            raise
        finally:
            alarm.cancel()


async def _alarm(begun: asyncio.Event, interrupt: Callable[[], None]) -> None:
    """Interrupt what has begun when its time is over. While it waits for a thread, its time does not run."""
    await begun.wait()
    await asyncio.sleep(TEMPLATE_SECONDS)
    interrupt()


class Interrupted(BaseException):
    """The time of a call is over. No `except Exception` on the way takes it for a failure of the template."""


class InterruptibleCall(Generic[T]):
    """A call of Python code that another thread can interrupt."""

    def __init__(self, function: Callable[[], T]) -> None:
        self._function = function
        self._thread: int | None = None  # that runs the function now
        self._lock = threading.Lock()
        self.is_interrupted = False

    def __call__(self) -> T:
        if self.is_interrupted:
            raise RequestError("the call was interrupted before it began")
        with self._lock:
            self._thread = threading.get_ident()
        try:
            return self._function()
        except Interrupted:
            raise RequestError("the call was interrupted") from None
        finally:
            with self._lock:
                if self.is_interrupted and self._thread is not None:  # it may have come too late to be raised
                    _raise_in(self._thread, None)
                self._thread = None

    def interrupt(self) -> None:
        """Raise Interrupted in the call, if it has not ended."""
        with self._lock:
            self.is_interrupted = True
            if self._thread is not None:
                _raise_in(self._thread, Interrupted)


def _raise_in(thread: int, error: type[BaseException] | None) -> None:
    """Let a thread raise an error before its next instruction; None takes back one that was not raised yet."""
    ctypes.pythonapi.PyThreadState_SetAsyncExc(
        ctypes.c_ulong(thread), None if error is None else ctypes.py_object(error)
    )
