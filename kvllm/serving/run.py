"""The server's process: sockets, signals, and a shutdown that lets requests end."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import ipaddress
import logging
import resource
import signal
import socket
import threading
import webbrowser
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

import uvicorn
import uvloop

from kvllm.async_llm import AsyncLLM
from kvllm.engine_args import EngineArgs
from kvllm.errors import ConfigError, WorkerError
from kvllm.pooling.async_engine import AsyncPooling
from kvllm.serving import live
from kvllm.serving.adapters import open_modules
from kvllm.serving.app import make_app
from kvllm.serving.http import HttpProtocol
from kvllm.serving.parser_choice import with_parsers
from kvllm.serving.state import ServerOptions, ServerState, start_engine
from kvllm.serving.supervisor import EngineSupervisor

logger = logging.getLogger(__name__)

BACKLOG = 2048
ABORT_SECONDS = 5.0
"""Time for the ends of streams, once their requests were aborted."""
SIGNALS = (signal.SIGTERM, signal.SIGINT)


@dataclass(frozen=True)
class Address:
    """Where the server listens: at a path of a Unix socket, or at a host and a port; port 0 is any free one.

    ssl: uvicorn's options of TLS. opens: whether the page is opened in a browser.
    """

    host: str
    port: int
    uds: str | None
    ssl: dict[str, Any]
    opens: bool = False


def serve(args: EngineArgs, options: ServerOptions, address: Address) -> None:
    """Serve until a signal ends it.

    Raises:
        ConfigError, CheckpointError: the engine or the address cannot be had.
        WorkerError: the engine has failed for good.
    """
    _allow_many_files()
    bound = None if address.uds else bind(address)  # before the engine is built, which may take minutes
    _warn_if_open(address, options)
    options = with_parsers(options, args)
    adapters = open_modules(args, options.lora_modules, options.served_model_names)
    engine = start_engine(args)
    gc.collect()
    gc.freeze()  # models and libraries stay: to look through them again and again would hold up steps and streams
    try:
        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            engine = runner.run(_serve(ServerState(args, options, engine, adapters), address, bound))
    finally:
        engine.shutdown()


async def _serve(state: ServerState, address: Address, bound: socket.socket | None) -> AsyncLLM | AsyncPooling:
    """Serve until the end. Returns the engine, which may be another one by then."""
    config = server_config(state, address)
    _check_tls(config)

    def tell() -> None:
        logger.info("serving %s at %s", ", ".join(state.model_names), url_of(address, bound))
        if bound is not None:
            _show_page(address, f"{_page_url(address, bound)}{state.options.root_path}/")

    server = Server(config, tell)
    shutdown = Shutdown(state, server)
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        loop.add_signal_handler(number, shutdown.begin)
    supervisor = asyncio.create_task(_look_after(state))
    supervisor.add_done_callback(lambda _: shutdown.at_once())
    await server.serve(None if bound is None else [bound])
    if supervisor.done() and not state.admission.is_draining:
        raise WorkerError("the engine has failed, and could not be started again: see the log")
    supervisor.cancel()
    return state.engine


async def _look_after(state: ServerState) -> None:
    """Return when the engine is of no use any more. A pass of a pooling model that fails takes no other with it."""
    if state.pools:
        await asyncio.Event().wait()
    live.start(state)
    await EngineSupervisor(state).watch()


def server_config(state: ServerState, address: Address) -> uvicorn.Config:
    """uvicorn's settings for the application of a server."""
    return uvicorn.Config(
        make_app(state),
        uds=address.uds,
        http=HttpProtocol,
        ws="none",
        lifespan="off",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        backlog=BACKLOG,
        timeout_graceful_shutdown=int(ABORT_SECONDS),
        **address.ssl,
    )


class Server(uvicorn.Server):
    """uvicorn, with signals left to Shutdown: it would refuse connections at once, /health among them.

    tell: is called once connections are taken.
    """

    def __init__(self, config: uvicorn.Config, tell: Callable[[], None]) -> None:
        super().__init__(config)
        self._tell = tell

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self._tell()

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        yield


class Shutdown:
    """The end of a server: requests in flight finish first, new ones get 503. A second signal ends it at once."""

    def __init__(self, state: ServerState, server: Server) -> None:
        self._state = state
        self._server = server
        self._draining: asyncio.Task[None] | None = None

    def begin(self) -> None:
        """A signal has come."""
        if self._draining is not None:
            logger.warning("a second signal: the server ends at once")
            self.at_once()
            return
        self._state.admission.is_draining = True
        self._draining = asyncio.ensure_future(self._drain())

    def at_once(self) -> None:
        """End without waiting for anything."""
        self._server.should_exit = self._server.force_exit = True

    async def _drain(self) -> None:
        admission, timeout = self._state.admission, self._state.options.shutdown_timeout
        logger.info("shutting down: %d completions get %g s to end", admission.in_flight, timeout)
        try:
            await asyncio.wait_for(admission.wait_until_idle(), timeout)
        except TimeoutError:
            logger.warning("%d completions have not ended within %g s: aborted", admission.in_flight, timeout)
            for request_id in list(self._state.running):
                await self._state.llm.abort(request_id)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(admission.wait_until_idle(), ABORT_SECONDS)
        self._server.should_exit = True


def _allow_many_files() -> None:
    """Raise the limit on open files as far as a user may: each connection is one, and the usual limit is 1024."""
    _, most = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (most, most))


def _show_page(address: Address, url: str) -> None:
    """Tell where the page is, and open it if that was asked for: in a thread, as some browsers run in the terminal."""
    logger.info("chat and monitor in a browser: %s", url)
    if address.opens:
        threading.Thread(target=webbrowser.open, args=(url,), daemon=True).start()


def bind(address: Address) -> socket.socket:
    """A socket at the address. Raises ConfigError."""
    family = socket.AF_INET6 if ":" in address.host else socket.AF_INET
    bound = socket.socket(family, socket.SOCK_STREAM)
    bound.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        bound.bind((address.host, address.port))
    except (OSError, OverflowError) as error:
        bound.close()
        raise ConfigError(
            f"--host {address.host} --port {address.port}: {error}: choose another address or port"
        ) from None
    bound.setblocking(False)
    return bound


def url_of(address: Address, bound: socket.socket | None) -> str:
    """Where the server listens, as the log tells it."""
    if bound is None:
        return f"unix:{address.uds}"
    scheme = "https" if address.ssl.get("ssl_certfile") else "http"
    host = f"[{address.host}]" if ":" in address.host else address.host
    return f"{scheme}://{host}:{bound.getsockname()[1]}"


def _page_url(address: Address, bound: socket.socket) -> str:
    """Where a browser on this machine finds the server: "every address" is none that it can open."""
    local = {"0.0.0.0": "127.0.0.1", "::": "::1"}
    return url_of(replace(address, host=local.get(address.host, address.host)), bound)


def _warn_if_open(address: Address, options: ServerOptions) -> None:
    """Everybody who reaches an address that is not loopback may use a server without keys."""
    if options.keys or address.uds or _is_loopback(address.host):
        return
    logger.warning(
        "no API key is set, and %s can be reached from other machines: everybody there may use this server. "
        "Set KVLLM_API_KEY or --api-key-file, or keep --host 127.0.0.1",
        address.host,
    )


def _is_loopback(host: str) -> bool:
    if host == "localhost":
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


def _check_tls(config: uvicorn.Config) -> None:
    """Read certificates. Raises ConfigError."""
    try:
        config.load()
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(f"--ssl-certfile {config.ssl_certfile}: {error}") from None
