"""Connections of the dashboard's server: none keeps its place by sending half a request, or by reading nothing.

uvicorn waits for the rest of a request's head, and for a full socket, as long as the client stays, and takes
connections until the process has no files left. Here a client has :data:`HEAD_S` to send
each head and :data:`READ_S` to empty a full socket. While :data:`MOST_CONNECTIONS` are open, a further client gets a
503. ``web/page.py`` limits how long a body may take.
"""

from __future__ import annotations

import asyncio
import resource
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

HEAD_S = 15.0
READ_S = 120.0
#: Connections at a time: at most half of the files that the process may open.
MOST_CONNECTIONS = max(min(500, resource.getrlimit(resource.RLIMIT_NOFILE)[0] // 2), 16)
FULL = b"HTTP/1.1 503 Service Unavailable\r\nconnection: close\r\nretry-after: 60\r\ncontent-length: 0\r\n\r\n"


class TimedProtocol(H11Protocol):
    """One client's connection, which ends if the client is too slow."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        super().__init__(*arguments, **named)
        self._timers: dict[str, asyncio.TimerHandle] = {}

    def _begin(self, what: str, seconds: float) -> None:
        if what not in self._timers:
            self._timers[what] = self.loop.call_later(seconds, self.transport.abort)

    def _end(self, what: str) -> None:
        if what in self._timers:
            self._timers.pop(what).cancel()

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]  # as uvicorn's
        super().connection_made(transport)
        self._begin("head", HEAD_S)
        if len(self.connections) > MOST_CONNECTIONS:
            transport.write(FULL)
            transport.close()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        is_answering = not getattr(self.cycle, "response_complete", True)  # before the first head there is no cycle
        self._end("head") if is_answering else self._begin("head", HEAD_S)

    def pause_writing(self) -> None:
        super().pause_writing()
        self._begin("read", READ_S)

    def resume_writing(self) -> None:
        super().resume_writing()
        self._end("read")

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        for what in list(self._timers):
            self._end(what)
