"""One attempt: run the policy, and take what it gives."""

import asyncio
import inspect
import time
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

from ..protocol.errors import EngineError, MlcRouterError, PolicyError, RequestError
from .chunks import Chunk
from .delivery import Delivery, Preempted
from .failures import line_where_suspended
from .groups import Engines
from .request import Request
from .stream import Stream

CLOSE_S = 1.0  # what a policy may take to clean up after itself

# What may pass through a policy's code without being its fault.
NOT_ITS_FAULT = (RequestError, Preempted, PolicyError)


async def attempt(request: Request, engines: Engines, delivery: Delivery, stall_s: float) -> None:
    """Run the request's policy once, to the end of what it gives.

    Raises `PolicyError` with the user's line where the policy is at fault (it raises, gives nothing or nonsense, or
    does nothing for `stall_s` seconds), and what engines and requests raise as it is."""
    policy = request.policy
    try:
        routed = policy.start(request, engines, request.values)
        if inspect.isasyncgen(routed):
            await _take_all(routed, request, delivery, stall_s)
        else:
            with _watch(request, routed, stall_s) as watch:
                async with watch.scope:
                    routed = await routed
            watch.check()
            await _take_result(routed, request, delivery, stall_s)
        delivery.end()
    except EngineError as error:
        placed = policy.placed(error)
        if placed is None:
            raise
        raise placed from error
    except NOT_ITS_FAULT:
        raise
    except (Exception, SystemExit, KeyboardInterrupt) as error:
        raise policy.failure(error) from error
    except asyncio.CancelledError as error:
        task = asyncio.current_task()
        if request.left or (task is not None and task.cancelling()):
            raise
        raise policy.failure(error) from error  # nobody cancelled us: the policy raised it


async def _take_result(result: Any, request: Request, delivery: Delivery, stall_s: float) -> None:
    if isinstance(result, Stream):
        await result.pass_on(delivery.deliver, delivery.sink.ready)
    elif isinstance(result, AsyncIterator):
        await _take_all(result, request, delivery, stall_s)
    elif result is None:
        raise MlcRouterError(
            "route returned nothing; return a stream, such as `return decode.complete(request)`."
        )
    else:
        raise MlcRouterError(f"route returned {_name(result)}; return a stream, or yield chunks.")


async def _take_all(chunks: AsyncIterator[Any], request: Request, delivery: Delivery, stall_s: float) -> None:
    """Chunks and whole streams from an async generator."""
    watch = None
    try:
        with _watch(request, chunks, stall_s) as watch:
            async with watch.scope:
                async for item in chunks:
                    if isinstance(item, Chunk):
                        if not delivery.deliver(item):
                            await delivery.sink.ready()
                    elif isinstance(item, Stream):
                        await item.pass_on(delivery.deliver, delivery.sink.ready)
                    else:
                        raise MlcRouterError(f"route yielded {_name(item)}; yield chunks or streams.")
                    request.progress = time.monotonic()
        watch.check()
    finally:
        close = getattr(chunks, "aclose", None)
        if close is not None:
            await _close(close, watch)


async def _close(close: Any, watch: "_Watch | None") -> None:
    """End the policy's generator; one that will not end is left behind, with nothing in its hands."""
    try:
        async with asyncio.timeout(CLOSE_S):
            await close()
    except TimeoutError:
        pass
    except RuntimeError:
        if watch is None or not watch.stalled:  # "asynchronous generator ignored GeneratorExit"
            raise


class _Watch:
    """Ends a policy that gives no sign of life, and remembers in which line it slept."""

    def __init__(self, request: Request, routed: Any, stall_s: float) -> None:
        self.scope = asyncio.timeout(None)
        self.line: int | None = None
        self._stalled = False
        self._request, self._routed, self._stall_s = request, routed, stall_s
        self._loop = asyncio.get_running_loop()
        request.progress = time.monotonic()
        self._timer = self._loop.call_later(stall_s, self._look)

    def _look(self) -> None:
        left = self._request.progress + self._stall_s - time.monotonic()
        if any(not call.paused for call in self._request.guard.calls):
            left = self._stall_s  # it waits for an engine, and calls have deadlines of their own
        if left > 0:
            self._timer = self._loop.call_later(left, self._look)
        else:
            self._stalled = True
            self.line = line_where_suspended(self._routed, self._request.policy.filename)
            self.scope.reschedule(self._loop.time())

    def stop(self) -> None:
        self._timer.cancel()

    def check(self) -> None:
        """Raise if the policy was stalled, even where it swallowed its cancellation."""
        if self._stalled:
            raise self.error()

    @property
    def stalled(self) -> bool:
        return self._stalled

    def error(self) -> PolicyError:
        problem = f"it did nothing for {self._stall_s:g} s and was ended."
        return self._request.policy.error(problem, self.line)


@contextmanager
def _watch(request: Request, routed: Any, stall_s: float) -> Iterator[_Watch]:
    watch = _Watch(request, routed, stall_s)
    try:
        yield watch
    except TimeoutError as error:
        if watch.stalled:
            raise watch.error() from error
        raise
    finally:
        watch.stop()


def _name(value: Any) -> str:
    return "nothing" if value is None else f"a value of type {type(value).__name__}"
