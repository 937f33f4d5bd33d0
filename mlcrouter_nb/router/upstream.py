"""Calls to one engine over pooled keep-alive connections: asyncio's protocols and httptools."""

import asyncio
import ssl
from collections import deque
from collections.abc import AsyncIterator, Callable
from urllib.parse import urlsplit

import httptools

from ..protocol.errors import ArgumentError, EngineError
from ..protocol.sse import DONE, Splitter
from .chunks import Chunk

HIGH = 64  # chunks that wait in a call before reading pauses
IDLE_S = 4.0  # uvicorn closes idle connections after 5 s: one that is older is not used again
MAX_BODY = 64 << 20  # bytes of an answer that is no stream


class Call:
    """One request to an engine: await `body()`, or iterate or `pump` its chunks. `close()` leaves it at any moment.

    `on_first` is called when the first chunk comes, `on_end` once when the call is over, with its error or None;
    both run where the bytes arrive, so they wait for no task."""

    def __init__(
        self, engine: str, idle_s: float, on_first: Callable[[], None], on_end: Callable[["Call"], None]
    ) -> None:
        self.engine = engine
        self.status = 0
        self.retry_after = ""
        self.error: EngineError | None = None
        self.finished = False
        self.ended_at = 0.0
        self.done = False  # the stream's [DONE] has come
        self._idle_s = idle_s
        self._on_first, self._on_end = on_first, on_end
        self._loop = asyncio.get_running_loop()
        self._heard = self._loop.time()
        self._timer = self._loop.call_later(idle_s, self._check_idle)
        self._connection: Connection | None = None
        self._splitter: Splitter | None = None
        self._chunks: deque[Chunk] = deque()
        self._last: Chunk | None = None
        self._body: list[bytes] = []
        self._size = 0
        self._waiter: asyncio.Future[None] | None = None
        self._sink: Callable[[Chunk], bool] | None = None
        self._sink_error: BaseException | None = None
        self.paused = False

    # What callers use

    async def body(self) -> bytes:
        """The whole answer; raises `EngineError` when the connection breaks first."""
        while not self.finished:
            await self._wait()
        if self.error is not None:
            raise self.error
        return b"".join(self._body)

    async def opened(self) -> None:
        """Wait for the answer to begin; raises `EngineError` unless it is a stream with status 200."""
        while not self.status and not self.finished:
            await self._wait()
        if self.error is None and self.status == 200 and self._splitter is not None:
            return
        body = await self.body()
        if self.status == 200:
            raise EngineError(
                f"{self.engine} answered without a stream.", engine=self.engine, status=502, body=body
            )
        raise self.refusal(body)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        while True:
            while self._chunks:
                yield self._chunks.popleft()
            self._resume()
            if self.finished:
                break
            await self._wait()
        self._check_end()

    async def pump(self, sink: Callable[[Chunk], bool]) -> bool:
        """Hand each chunk to `sink` where the bytes arrive, without waking this task.

        Returns False when `sink` does (it is full: wait, then pump again), True when the stream has ended; raises
        what `sink` raises, or `EngineError`."""
        while self._chunks:
            if not sink(self._chunks.popleft()):
                return False
        if not self.finished:
            self._sink = sink
            self._resume()
            try:
                while self._sink is not None and not self.finished:
                    await self._wait()
            finally:
                self._sink = None
        error, self._sink_error = self._sink_error, None
        if error is not None:
            raise error
        if not self.finished or self._chunks:
            return False
        self._check_end()
        return True

    def close(self) -> None:
        """Leave the call, whatever its state; the engine sees the connection break."""
        if not self.finished:
            self.fail(EngineError(f"The call to {self.engine} was left.", engine=self.engine, status=499))

    def refusal(self, body: bytes) -> EngineError:
        """What an answer with another status than 200 says."""
        text = body[:2000].decode(errors="replace").strip() or "no reason given"
        return EngineError(
            f"{self.engine} answered {self.status}: {text}", engine=self.engine, status=self.status, body=body
        )

    # What the connection uses

    def begin(self, connection: "Connection") -> None:
        """The request is on its way."""
        self._connection = connection

    def head(self, status: int, content_type: bytes, retry_after: bytes) -> None:
        """Status and headers have come."""
        self.status = status
        self.retry_after = retry_after.decode("latin-1")
        if status == 200 and content_type.startswith(b"text/event-stream"):
            self._splitter = Splitter()
        self._wake()

    def feed(self, data: bytes) -> None:
        """Part of the answer's body has come."""
        self._heard = self._loop.time()
        if self._splitter is None:
            self._size += len(data)
            if self._size > MAX_BODY:
                self.fail(EngineError(f"{self.engine}'s answer is too long.", engine=self.engine, status=502))
                return
            self._body.append(data)
            return
        events = self._splitter.feed(data)
        if not events:
            return
        if self._last is None:
            self._on_first()
        for event in events:
            if event == DONE:
                self.done = True
                continue
            if not event:
                continue
            self._last = chunk = Chunk(event, self)
            if self._sink is None:
                self._chunks.append(chunk)
            else:
                self._to_sink(chunk)
        if self._chunks:
            if len(self._chunks) > HIGH:
                self._pause()
            self._wake()

    def complete(self) -> None:
        """The answer has come to its end."""
        self._end(None)

    def fail(self, error: EngineError) -> None:
        """The call cannot be completed; its connection is of no use any more."""
        connection = self._connection
        self._end(error)
        if connection is not None:
            connection.drop()

    def _to_sink(self, chunk: Chunk) -> None:
        assert self._sink is not None
        try:
            if self._sink(chunk):
                return
        except BaseException as error:  # it belongs to the task that pumps, not to the connection
            self._sink_error = error
        self._sink = None
        self._pause()
        self._wake()

    def _check_end(self) -> None:
        """A stream that stops without saying so is broken."""
        if self.error is not None:
            raise self.error
        last = self._last
        if not self.done and (last is None or (last.finish_reason is None and not last.usage)):
            raise EngineError(f"{self.engine}'s stream ended too early.", engine=self.engine)

    def _end(self, error: EngineError | None) -> None:
        if self.finished:
            return
        self.finished, self.error, self._connection = True, error, None
        self.ended_at = self._loop.time()
        self._timer.cancel()
        self._wake()
        self._on_end(self)

    def _pause(self) -> None:
        if not self.paused and self._connection is not None:
            self.paused = True
            self._connection.pause()

    def _resume(self) -> None:
        if self.paused:
            self.paused = False
            self._heard = self._loop.time()
            if self._connection is not None:
                self._connection.resume()

    def _check_idle(self) -> None:
        now = self._loop.time()
        if self.paused:
            self._heard = now
        left = self._heard + self._idle_s - now
        if left > 0:
            self._timer = self._loop.call_later(left, self._check_idle)
        else:
            problem = f"{self.engine} sent nothing for {self._idle_s:g} s."
            self.fail(EngineError(problem, engine=self.engine, status=504))

    async def _wait(self) -> None:
        self._waiter = waiter = self._loop.create_future()
        await waiter

    def _wake(self) -> None:
        waiter, self._waiter = self._waiter, None
        if waiter is not None and not waiter.done():
            waiter.set_result(None)


class Connection(asyncio.Protocol):
    """One keep-alive connection, one call at a time."""

    def __init__(self, pool: "Pool") -> None:
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
