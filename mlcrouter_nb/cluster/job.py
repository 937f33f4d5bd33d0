"""A coroutine on the router's loop, as other threads and loops hold it."""

import asyncio
import contextlib
from collections.abc import Coroutine
from concurrent.futures import Future, InvalidStateError
from typing import Any, Generic, TypeVar

T = TypeVar("T")


class Job(Generic[T]):
    """A coroutine under way on the loop thread; `future` has its result once it has ended, clean-up included."""

    def __init__(self, loop: asyncio.AbstractEventLoop, coroutine: Coroutine[Any, Any, T]) -> None:
        self.future: Future[T] = Future()
        self._loop = loop
        self._coroutine = coroutine
        self._task: asyncio.Task[T] | None = None
        self.future.set_running_or_notify_cancel()
        # The caller's context travels along, so that what the coroutine prints lands in the caller's cell.
        loop.call_soon_threadsafe(self._start)

    def cancel(self) -> None:
        """Ask the coroutine to stop, from any thread; `future` resolves when it has."""
        with contextlib.suppress(RuntimeError):  # the loop is closed: the coroutine has ended
            self._loop.call_soon_threadsafe(self._cancel)

    def wait(self, timeout: float) -> bool:
        """Block for `timeout` seconds at most; answers whether the coroutine has ended."""
        try:
            self.future.exception(timeout)
        except TimeoutError:
            return self.future.done()  # a TimeoutError may also be what the coroutine raised
        return True

    async def end(self, patience: float) -> None:
        """Cancel the coroutine and await its clean-up, from any loop; whatever it raises then is nobody's any more."""
        self.cancel()
        waiter = asyncio.wrap_future(self.future)
        await asyncio.wait({waiter}, timeout=patience)
        if waiter.done() and not waiter.cancelled():
            waiter.exception()
        else:
            waiter.cancel()

    def _start(self) -> None:
        self._task = self._loop.create_task(self._coroutine)
        self._task.add_done_callback(self._ended)

    def close(self) -> None:
        """The loop has ended before the coroutine could; whoever waits is told."""
        if not self.future.done():
            with contextlib.suppress(Exception):  # its clean-up may need the loop, which is closed
                self._coroutine.close()
            self.abandon()

    def abandon(self) -> None:
        """Nobody knows when the loop turns again; whoever waits is told."""
        with contextlib.suppress(InvalidStateError):
            self.future.set_exception(asyncio.CancelledError())

    def _cancel(self) -> None:
        if self._task is not None:
            self._task.cancel()

    def _ended(self, task: asyncio.Task[T]) -> None:
        if self.future.done():  # abandoned
            if not task.cancelled():
                task.exception()
        elif task.cancelled():
            self.future.set_exception(asyncio.CancelledError())
        elif error := task.exception():
            self.future.set_exception(error)
        else:
            self.future.set_result(task.result())
