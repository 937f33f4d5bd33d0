"""Crossing between threads: an iterator of one loop read on another, a blocking function awaited."""

import asyncio
import contextlib
import threading
from collections import deque
from collections.abc import AsyncGenerator, Callable
from typing import TypeVar

from .loop_thread import TICK, LoopThread

T = TypeVar("T")


async def iterate(
    thread: LoopThread, source: AsyncGenerator[T, None], *, capacity: int = 256
) -> AsyncGenerator[T, None]:
    """Iterate on any loop over what an iterator yields on the thread's.

    The source runs in one task of the thread's loop, ahead of the reader by `capacity` items at most; leaving the
    iteration cancels it."""
    reader_loop = asyncio.get_running_loop()
    if reader_loop is thread.loop:
        async with contextlib.aclosing(source):
            async for item in source:
                yield item
        return
    items: deque[T] = deque()
    arrived = asyncio.Event()  # belongs to the reader's loop
    room = asyncio.Semaphore(capacity)  # belongs to the router's loop

    def wake(_: object = None) -> None:
        with contextlib.suppress(RuntimeError):  # the reader's loop is closed: nobody reads any more
            reader_loop.call_soon_threadsafe(arrived.set)

    async def pump() -> None:
        async with contextlib.aclosing(source):
            async for item in source:
                await room.acquire()
                items.append(item)
                wake()

    job = thread.submit(pump())
    job.future.add_done_callback(wake)
    try:
        while not job.future.done() or items:  # in this order: the last items come before the end
            if items:
                item = items.popleft()
                thread.loop.call_soon_threadsafe(room.release)
                yield item
                continue
            arrived.clear()
            if not items and not job.future.done():
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(arrived.wait(), TICK)
        job.future.result()
    finally:
        if not job.future.done():
            await job.end(2.0)


async def in_thread(function: Callable[[], T]) -> T:
    """Run a blocking function on a daemon thread of its own, so that leaving the interpreter never waits for it."""
    loop = asyncio.get_running_loop()
    future: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if future.done():
            return
        if error is not None:
            future.set_exception(error)
        else:
            future.set_result(result)  # type: ignore[arg-type]

    def work() -> None:
        result, failure = None, None
        try:
            result = function()
        except BaseException as error:
            failure = error
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(settle, result, failure)

    threading.Thread(target=work, name="mlcrouter-worker", daemon=True).start()
    try:
        # Waking now and then lets the kernel cancel this await: it acts only when the loop turns.
        while not future.done():
            await asyncio.wait({future}, timeout=TICK)
    finally:
        future.cancel()  # nobody will look at it
    return future.result()
