"""A slow network: a proxy for TCP on a port of its own."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from socketserver import BaseRequestHandler, ThreadingTCPServer
from urllib.parse import urlsplit

PIECE = 16 << 10


class SlowLink(ThreadingTCPServer):
    """Passes on what comes to `url`, each piece late. target: the address of a server, which may change; connections
    to one that does not answer are closed.

    delay: seconds. bytes_per_second: of each connection.
    """

    daemon_threads = True
    allow_reuse_address = True

    def __init__(self, target: str, delay: float, bytes_per_second: float) -> None:
        super().__init__(("127.0.0.1", 0), _Connection)
        self.target, self.delay, self.bytes_per_second = target, delay, bytes_per_second
        self.url = f"http://127.0.0.1:{self.server_address[1]}"


class _Connection(BaseRequestHandler):
    server: SlowLink

    def handle(self) -> None:
        address = urlsplit(self.server.target)
        with suppress(OSError), socket.create_connection((address.hostname, address.port)) as other:
            back = threading.Thread(target=self._pass_on, args=(other, self.request), daemon=True)
            back.start()
            self._pass_on(self.request, other)
            back.join()

    def _pass_on(self, source: socket.socket, sink: socket.socket) -> None:
        with suppress(OSError):
            while piece := source.recv(PIECE):
                time.sleep(self.server.delay + len(piece) / self.server.bytes_per_second)
                sink.sendall(piece)
        for each in (source, sink):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)


@contextmanager
def slow_link(target: str, delay: float, bytes_per_second: float) -> Iterator[SlowLink]:
    link = SlowLink(target, delay, bytes_per_second)
    thread = threading.Thread(target=link.serve_forever, daemon=True)
    thread.start()
    try:
        yield link
    finally:
        link.shutdown()
        link.server_close()
        thread.join()
