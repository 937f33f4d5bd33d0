"""A client's request, and the answer to it: whole, or a stream of events."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from typing import TYPE_CHECKING, Any

from ..protocol.sse import encode_event

if TYPE_CHECKING:
    from .http_connection import HttpConnection


@dataclass(frozen=True)
class HttpRequest:
    """What a client asked; header names are in lower case, `path` is decoded and without its query."""

    method: str
    path: str
    headers: dict[str, str]
    body: bytes
    http_1_0: bool
    keep_alive: bool


class Reply:
    """The answer to one request: `send` it whole, or stream events between the first `event` and `end`.

    `headers` are added to whatever is sent; `on_leave` is called when the client goes away first."""

    def __init__(self, connection: HttpConnection, request: HttpRequest) -> None:
        self.headers: list[tuple[str, str]] = []
        self.on_leave: Callable[[], None] | None = None
        self.streaming = False
        self.sent = False
        self._connection = connection
        self._request = request
        self._chunked = not request.http_1_0

    def send(self, status: int, body: bytes, content_type: str = "application/json") -> None:
        """Send a whole answer."""
        self.sent = True
        headers = (
            [("Content-Type", content_type), ("Content-Length", str(len(body)))] if status != 204 else []
        )
        content = b"" if self._request.method == "HEAD" else body
        self._connection.write(self._head(status, headers) + content)

    def send_json(self, status: int, value: Any) -> None:
        """Send a JSON answer."""
        self.send(status, json.dumps(value, ensure_ascii=False).encode())

    def event(self, data: bytes) -> bool:
        """Send one server-sent event; False: the client is slow, `await ready()`."""
        if self._chunked and b"\n" not in data:  # the usual one, in one step
            wire = b"%x\r\ndata: %b\n\n\r\n" % (len(data) + 8, data)
        else:
            wire = encode_event(data)
            if self._chunked:
                wire = b"%x\r\n%b\r\n" % (len(wire), wire)
        if not self.streaming:
            self.streaming = True
            headers = [("Content-Type", "text/event-stream; charset=utf-8"), ("Cache-Control", "no-cache")]
            if self._chunked:
                headers.append(("Transfer-Encoding", "chunked"))
            wire = self._head(200, headers) + wire
        self._connection.write(wire)
        return self._connection.writable

    def end(self) -> None:
        """End the stream."""
        self.sent = True
        if self._chunked:
            self._connection.write(b"0\r\n\r\n")

    async def ready(self) -> None:
        """Wait until the client has taken what was sent; one that never does is left."""
        await self._connection.drained()

    @property
    def closes(self) -> bool:
        """Whether the connection ends with this answer."""
        return not self._request.keep_alive or self._request.http_1_0 or self._connection.server.stopping

    def _head(self, status: int, headers: list[tuple[str, str]]) -> bytes:
        lines = [f"HTTP/1.1 {status} {HTTPStatus(status).phrase}"]
        lines += [f"{name}: {value}" for name, value in (*headers, *self.headers)]
        if self.closes:
            lines.append("Connection: close")
        return ("\r\n".join(lines) + "\r\n\r\n").encode("latin-1")
