"""One call to an engine, from its request to the last byte of the answer."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import AsyncIterator, Callable
from typing import TYPE_CHECKING

from ..protocol.errors import EngineError
from ..protocol.sse import DONE, Splitter
from .chunks import Chunk
from .refusals import refusal
from .template import Template

if TYPE_CHECKING:
    from .connections import Connection

HIGH = 64  # chunks that wait in a call before reading pauses
MAX_BODY = 64 << 20  # bytes of an answer that is no stream


class Call:
    """One request to an engine: await `body()`, or iterate or `pump` its chunks. `close()` leaves it at any moment.

    `on_first` is called when the first chunk comes, `on_end` once when the call is over, with its error or None;
    both run where the bytes arrive, so they wait for no task."""

    def __init__(
        self, engine: str, verb: str, idle_s: float,
        on_first: Callable[[], None], on_end: Callable[[Call], None],
    ) -> None:  # fmt: skip
        self.engine, self.verb = engine, verb
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
        self._template = Template()
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
        return refusal(self.engine, self.verb, self.status, body, self.retry_after)

    # What the connection uses

    def begin(self, connection: Connection) -> None:
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
        template = self._template
        for event in events:
            if event == DONE:
                self.done = True
                continue
            if not event:
                continue
            plain = template.text(event)
            self._last = chunk = Chunk(event, self, plain)
            if plain is None:
                template.learn(chunk)
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
        self.ended_at = time.monotonic()
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
