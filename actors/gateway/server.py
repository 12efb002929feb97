"""The thread that runs the HTTP server, and its socket."""

from __future__ import annotations

import socket
import threading

import uvicorn
from starlette.types import ASGIApp

from actors.runtime.config import ConfigError

CONNECTIONS_WAITING_MAX = 1024
KEEP_ALIVE_S = 60
STOP_WAIT_S = 5
"""How long answers that are on their way may take when the server stops."""


class HttpServer:
    """Listens from its construction on, serves from ``start`` to ``stop``.

    Raises ``ConfigError`` when it cannot listen on ``host:port``; port 0 lets the system choose one.
    """

    def __init__(self, host: str, port: int) -> None:
        try:
            family = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0][0]
            self._socket = socket.socket(family, socket.SOCK_STREAM)
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind((host, port))
            self._socket.listen(CONNECTIONS_WAITING_MAX)
        except OSError as error:
            raise ConfigError(f"--host {host} --port {port}: cannot listen there: {error}; choose another") from error
        shown = f"[{host}]" if family == socket.AF_INET6 else host
        self.url = f"http://{shown}:{self._socket.getsockname()[1]}"
        self._server: uvicorn.Server | None = None
        self._thread: threading.Thread | None = None

    def start(self, app: ASGIApp) -> None:
        """Serve ``app`` on a thread of its own."""
        config = uvicorn.Config(
            app,
            loop="auto",
            ws="none",
            lifespan="off",
            log_level="warning",
            access_log=False,
            backlog=CONNECTIONS_WAITING_MAX,
            timeout_keep_alive=KEEP_ALIVE_S,
            timeout_graceful_shutdown=STOP_WAIT_S,
        )
        self._server = server = uvicorn.Server(config)
        self._thread = threading.Thread(
            target=lambda: server.run(sockets=[self._socket]), name="gateway-http", daemon=True
        )
        self._thread.start()

    def stop(self) -> None:
        """Take no new connections, let answers end for ``STOP_WAIT_S``, then leave. Idempotent."""
        if self._server is not None and self._thread is not None:
            self._server.should_exit = True
            self._thread.join(STOP_WAIT_S + 1)
            self._server.force_exit = True
            self._thread.join(1)
            self._server = self._thread = None
        self._socket.close()
