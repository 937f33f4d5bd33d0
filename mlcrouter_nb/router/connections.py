"""Pooled keep-alive connections to one engine: asyncio's protocols and httptools."""

from __future__ import annotations

import asyncio
import ssl
from urllib.parse import urlsplit

import httptools

from ..protocol.errors import ArgumentError, EngineError
from .call import Call

IDLE_S = 4.0  # uvicorn closes idle connections after 5 s: one that is older is not used again


class Connection(asyncio.Protocol):
    """One keep-alive connection, one call at a time."""

    def __init__(self, pool: Pool) -> None:
        self._pool = pool
        self._call: Call | None = None
        self._parser = httptools.HttpResponseParser(self)
        self._transport: asyncio.Transport | None = None
        self._content_type = self._retry_after = b""
        self._framed = False  # the answer says where it ends
        self._complete = False
        self._keep_alive = False
        self._parts: list[bytes] = []
        self.idle_since = 0.0

    def send(self, call: Call, data: bytes) -> None:
        """Send a request whose answer goes to `call`."""
        assert self._transport is not None
        self._call = call
        self._content_type = self._retry_after = b""
        self._framed = self._complete = False
        call.begin(self)
        self._transport.write(data)

    def pause(self) -> None:
        """Stop reading: nobody takes what comes."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.pause_reading()

    def resume(self) -> None:
        """Read again."""
        if self._transport is not None and not self._transport.is_closing():
            self._transport.resume_reading()

    def drop(self) -> None:
        """Close at once."""
        self._call = None
        if self._transport is not None:
            self._transport.abort()

    @property
    def usable(self) -> bool:
        """Whether another call may be sent on it."""
        return self._call is None and self._transport is not None and not self._transport.is_closing()

    # asyncio.Protocol

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = transport  # type: ignore[assignment]
        self._pool.open.add(self)

    def data_received(self, data: bytes) -> None:
        if self._call is None:  # nobody asked for these bytes
            self.drop()
            return
        try:
            self._parser.feed_data(data)
        except httptools.HttpParserError as error:
            self._fail(f"answered with bytes that are no HTTP ({error})")
            return
        self._flush()
        call = self._call
        if self._complete and call is not None:
            self._call = None
            if self._keep_alive and not call.paused:
                self._pool.give_back(self)
            elif self._transport is not None:
                self._transport.close()
            call.complete()

    def eof_received(self) -> None:
        call = self._call
        if call is not None and call.status and not self._framed:  # such an answer ends with its connection
            self._call = None
            call.complete()

    def connection_lost(self, error: Exception | None) -> None:
        self._pool.open.discard(self)
        self._pool.forget(self)
        self._fail("closed the connection" if error is None else f"broke the connection ({error})")

    # httptools

    def on_header(self, name: bytes, value: bytes) -> None:
        name = name.lower()
        if name == b"content-type":
            self._content_type = value.lower()
        elif name in (b"content-length", b"transfer-encoding"):
            self._framed = True
        elif name == b"retry-after":
            self._retry_after = value

    def on_headers_complete(self) -> None:
        status = self._parser.get_status_code()
        if status >= 200 and self._call is not None:  # 1xx: the real answer is yet to come
            self._call.head(status, self._content_type, self._retry_after)

    def on_body(self, data: bytes) -> None:
        self._parts.append(data)

    def on_message_complete(self) -> None:
        self._complete = self._call is not None and self._call.status >= 200
        self._keep_alive = self._parser.should_keep_alive()  # the parser forgets it after this callback

    def _flush(self) -> None:
        parts, call = self._parts, self._call
        if parts:
            data = parts[0] if len(parts) == 1 else b"".join(parts)
            parts.clear()
            if call is not None:
                call.feed(data)

    def _fail(self, problem: str) -> None:
        call, self._call = self._call, None
        if call is not None:
            call.fail(EngineError(f"{call.engine} {problem}.", engine=call.engine))
        self.drop()


class Pool:
    """Connections to one engine; the one used last is used first. Nothing goes through a proxy."""

    def __init__(self, engine: str, url: str, connect_s: float) -> None:
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https") or not parts.hostname:
            raise ArgumentError(f"'{url}' is no address of an engine; write http://HOST:PORT.")
        self.engine, self.url, self.connect_s = engine, url, connect_s
        self.host = parts.hostname
        self.port = parts.port or (443 if parts.scheme == "https" else 80)
        self.path = parts.path.rstrip("/").removesuffix("/v1")
        self.tls = ssl.create_default_context() if parts.scheme == "https" else None
        self.netloc = parts.netloc.rpartition("@")[2]
        self.open: set[Connection] = set()
        self._idle: list[Connection] = []
        self._heads: dict[str, bytes] = {}

    async def send(self, call: Call, path: str, body: bytes | None) -> None:
        """Send `body` by POST, or GET where it is None; the answer goes to `call`."""
        connection = self._take() or await self._connect()
        if call.finished:  # left while it was connecting
            self.give_back(connection)
            return
        if body is None:
            data = f"GET {self.path}{path} HTTP/1.1\r\nHost: {self.netloc}\r\nAccept: */*\r\n\r\n".encode()
        else:
            data = self._head(path) % len(body) + body
        connection.send(call, data)

    def give_back(self, connection: Connection) -> None:
        """A connection is free again."""
        connection.idle_since = asyncio.get_running_loop().time()
        self._idle.append(connection)

    def forget(self, connection: Connection) -> None:
        """A connection is gone."""
        if connection in self._idle:
            self._idle.remove(connection)

    def close(self) -> None:
        """Close every connection."""
        for connection in list(self.open):
            connection._fail("is no longer used: the router has closed")

    def _take(self) -> Connection | None:
        now = asyncio.get_running_loop().time()
        while self._idle:
            connection = self._idle.pop()
            if connection.usable and now - connection.idle_since < IDLE_S:
                return connection
            connection.drop()
        return None

    async def _connect(self) -> Connection:
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self.connect_s):
                _, connection = await loop.create_connection(
                    lambda: Connection(self), self.host, self.port, ssl=self.tls
                )
        except TimeoutError as error:
            problem = f"{self.engine} at {self.url} did not take a connection within {self.connect_s:g} s."
            raise EngineError(problem, engine=self.engine) from error
        except OSError as error:
            problem = f"{self.engine} at {self.url} cannot be reached: {error.strerror or error}."
            raise EngineError(problem, engine=self.engine) from error
        return connection

    def _head(self, path: str) -> bytes:
        head = self._heads.get(path)
        if head is None:
            text = (
                f"POST {self.path}{path} HTTP/1.1\r\nHost: {self.netloc}\r\nContent-Type: application/json\r\n"
                "Accept: application/json, text/event-stream\r\nContent-Length: "
            )
            head = self._heads[path] = text.replace("%", "%%").encode() + b"%d\r\n\r\n"
        return head
