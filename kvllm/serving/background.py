"""A server within another program's process, for as long as that needs it."""

from __future__ import annotations

import asyncio
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager

import uvloop

from kvllm.async_llm import AsyncLLM
from kvllm.engine_args import EngineArgs
from kvllm.errors import WorkerError
from kvllm.serving.parser_choice import with_parsers
from kvllm.serving.run import Address, Server, bind, server_config, url_of
from kvllm.serving.state import ServerOptions, ServerState

LOOK_SECONDS = 0.02


@contextmanager
def background_server(args: EngineArgs, options: ServerOptions) -> Iterator[str]:
    """Serve in a thread, at a free port of this machine alone, while the block runs. Gives the URL.

    Raises:
        ConfigError, CheckpointError: the engine cannot be had.
        WorkerError: the server has not started: the log says why.
    """
    address = Address("127.0.0.1", 0, None, {})
    bound = bind(address)
    llm = AsyncLLM.from_engine_args(args)
    state = ServerState(args, with_parsers(options, args), llm)
    server = Server(server_config(state, address), lambda: None)
    thread = threading.Thread(target=_run, args=(server, [bound]), name="kvllm-server")
    thread.start()
    try:
        while not server.started:
            if not thread.is_alive():
                raise WorkerError("the server has ended before it took requests: see the log")
            time.sleep(LOOK_SECONDS)
        yield url_of(address, bound)
    finally:
        server.should_exit = True
        thread.join()
        llm.shutdown()


def _run(server: Server, sockets: list) -> None:
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(server.serve(sockets))
