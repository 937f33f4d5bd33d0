"""One client's connection: HTTP/1.1 read by httptools, one task per request."""

from __future__ import annotations

import asyncio
import json
from collections import deque
from http import HTTPStatus
from typing import TYPE_CHECKING
from urllib.parse import unquote

import httptools

from ..protocol.errors import error_body
from .reply import HttpRequest, Reply

if TYPE_CHECKING:
    from .http_server import HttpServer

MAX_HEAD = 64 << 10  # bytes of a request's line and headers
MAX_BODY = 64 << 20
MAX_AHEAD = 16  # requests that a client may send before its first is answered
QUIET_S = 75.0  # a connection without a request is closed after this
SLOW_CLIENT_S = 120.0  # a client that takes nothing for this long is left
LINGER_S = 5.0  # what a refused client still sends is read so long: closed at once, it would not see why


class HttpConnection(asyncio.Protocol):
    """One client. Its bytes are always read, so that its leaving is seen at any moment."""

    def __init__(self, server: HttpServer) -> None:
        self.server = server
        self.task: asyncio.Task[None] | None = None
        self._transport: asyncio.Transport | None = None
        self._parser = httptools.HttpRequestParser(self)
        self._waiting: deque[HttpRequest] = deque()
        self._reply: Reply | None = None
        self._drained: asyncio.Future[None] | None = None
        self._timer: asyncio.TimerHandle | None = None
        self._url = b""
        self._in_head = True
        self._completed = False  # a request ended within the bytes last read
        self._refused = False
        self._head_size = self._body_size = 0
        self._headers: dict[str, str] = {}
        self._body: list[bytes] = []

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self.server.connections.add(self)
        self._quiet()

    def data_received(self, data: bytes) -> None:
        if self._transport is None or self._transport.is_closing() or self._refused:
            return
        self._completed = False
        try:
            self._parser.feed_data(data)
            # The parser keeps a header to itself until it is whole. Bytes that also ended a request are not counted.
            if self._in_head and not self._completed:
                self._head_size += len(data)
                if self._head_size > MAX_HEAD:
                    self._refuse(431, "The headers are too long.")
        except httptools.HttpParserUpgrade as upgrade:
            self._without_upgrade(data[upgrade.args[0] :])
        except httptools.HttpParserError:
            self._refuse(400, "This is no HTTP request.")

    def connection_lost(self, error: Exception | None) -> None:
        self._transport = None
        self.server.connections.discard(self)
        if self._timer is not None:
            self._timer.cancel()
        self._waiting.clear()
        if self.task is not None:
            if self._reply is not None and self._reply.on_leave is not None:
                self._reply.on_leave()
            self.task.cancel()
        self.resume_writing()

    def pause_writing(self) -> None:
        if self._drained is None:
            self._drained = self.server.loop.create_future()

    def resume_writing(self) -> None:
        drained, self._drained = self._drained, None
        if drained is not None and not drained.done():
            drained.set_result(None)

    # httptools

    def on_message_begin(self) -> None:
        self._url, self._headers, self._body, self._body_size = b"", {}, [], 0

    def on_url(self, url: bytes) -> None:
        self._url += url

    def on_header(self, name: bytes, value: bytes) -> None:
        self._headers[name.decode("latin-1").lower()] = value.decode("latin-1")

    def on_headers_complete(self) -> None:
        self._in_head, self._head_size = False, 0
        if int(self._headers.get("content-length") or 0) > MAX_BODY:
            self._refuse_body()
        elif self._headers.get("expect", "").lower() == "100-continue":
            self.write(b"HTTP/1.1 100 Continue\r\n\r\n")

    def on_body(self, data: bytes) -> None:
        self._body_size += len(data)
        if self._body_size > MAX_BODY:
            self._refuse_body()
        else:
            self._body.append(data)

    def on_message_complete(self) -> None:
        if self._transport is None or self._transport.is_closing() or self._refused:
            return
        if self._parser.should_upgrade():
            return  # the parser stops before the body
        request = HttpRequest(
            method=self._parser.get_method().decode("latin-1"),
            path=unquote(self._url.partition(b"?")[0].decode("latin-1")),
            headers=self._headers,
            body=b"".join(self._body),
            http_1_0=self._parser.get_http_version() == "1.0",
            keep_alive=self._parser.should_keep_alive(),
        )
        self._body, self._in_head, self._completed = [], True, True
        self._waiting.append(request)
        if self.task is None:
            self._next()
        elif len(self._waiting) > MAX_AHEAD:
            self.abort()

    def _without_upgrade(self, rest: bytes) -> None:
        """An upgrade is an offer, which a server may ignore (RFC 9110, 7.8): read the request as if there were none."""
        method = self._parser.get_method()
        if method == b"CONNECT":
            self._refuse(405, "This server is no proxy.")
            return
        version = self._parser.get_http_version().encode()
        headers = [f"{name}: {value}\r\n" for name, value in self._headers.items() if name != "upgrade"]
        self._parser, self._in_head, self._head_size = httptools.HttpRequestParser(self), True, 0
        head = b"%b %b HTTP/%b\r\n%b\r\n" % (method, self._url, version, "".join(headers).encode("latin-1"))
        self.data_received(head + rest)

    # What replies use

    def write(self, data: bytes) -> None:
        """Send bytes, unless the client is gone."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.write(data)

    @property
    def writable(self) -> bool:
        """Whether the client takes what it is sent."""
        return self._drained is None

    async def drained(self) -> None:
        """Wait until the client has taken enough of what it was sent."""
        if self._drained is None:
            return
        try:
            async with asyncio.timeout(SLOW_CLIENT_S):
                await asyncio.shield(self._drained)
        except TimeoutError:
            self.abort()

    def abort(self) -> None:
        """Close at once."""
        if self._transport is not None:
            self._transport.abort()

    def close_if_quiet(self) -> None:
        """Close unless a request is being answered."""
        if self.task is None and self._transport is not None:
            self._transport.close()

    def _next(self) -> None:
        if self._timer is not None:
            self._timer.cancel()
        request = self._waiting.popleft()
        self._reply = Reply(self, request)
        self.task = self.server.loop.create_task(self._answer(request, self._reply))

    async def _answer(self, request: HttpRequest, reply: Reply) -> None:
        try:
            await self.server.handler(request, reply)
        finally:
            self.task = self._reply = None
            transport = self._transport
            if transport is not None:
                if reply.closes or not reply.sent:
                    transport.close()
                elif self._waiting:
                    self._next()
                else:
                    self._quiet()

    def _quiet(self) -> None:
        self._timer = self.server.loop.call_later(QUIET_S, self.close_if_quiet)

    def _refuse_body(self) -> None:
        self._body.clear()
        self._refuse(413, f"The body is longer than {MAX_BODY >> 20} MiB.")

    def _refuse(self, status: int, problem: str) -> None:
        """Answer what cannot be read as a request, and close."""
        if self._transport is None or self._transport.is_closing() or self._refused:
            return
        self._refused = True
        if self.task is None:
            body = json.dumps(error_body(problem)).encode()
            head = (
                f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
                f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
            )
            self._transport.write(head.encode() + body)
            if self._timer is not None:
                self._timer.cancel()
            self._timer = self.server.loop.call_later(LINGER_S, self.close_if_quiet)
            self._transport.write_eof()
        else:
            self._transport.close()
