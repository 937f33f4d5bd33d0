"""One asyncio loop in a daemon thread: a cell blocks the kernel's main thread, and the router must go on."""

import asyncio
import contextlib
import ctypes
import threading
import time
from collections.abc import Callable, Coroutine
from typing import Any, TypeVar

from ..protocol.errors import MlcRouterError
from ..router.watchdog import blocked
from .job import Job

T = TypeVar("T")

# How often a waiter wakes: an interrupt of a cell acts at the waiter's next wake-up.
TICK = 0.1


class NoAnswer(MlcRouterError, TimeoutError):
    """The router's loop has not done in time what it was asked for; says which line of a policy blocks it, if any."""


class ClusterStopped(SystemExit):
    """Raised in a policy that keeps the loop from stopping; a SystemExit, so that `except Exception` lets it through."""


class LoopThread:
    """Runs coroutines for callers on other threads and other loops."""

    def __init__(self, name: str = "mlcrouter") -> None:
        self.loop = new_event_loop()
        self._jobs: set[Job[Any]] = set()  # a loop keeps no strong reference to its tasks
        self._abandoned = False
        self._thread = threading.Thread(target=self._main, name=name, daemon=True)
        self._thread.start()

    @property
    def inside(self) -> bool:
        """Whether the caller runs on this thread."""
        return threading.get_ident() == self._thread.ident

    @property
    def alive(self) -> bool:
        """Whether coroutines can still be submitted."""
        return self._thread.is_alive() and not self.loop.is_closed() and not self._abandoned

    @property
    def blocked(self) -> str | None:
        """The sentence on the line of a policy that the thread executes at this moment; None while it is in none."""
        return blocked(self._thread.ident or 0)

    def turns(self, timeout: float) -> bool:
        """Whether the loop turns within `timeout` seconds; blocks the caller."""
        turned = threading.Event()
        try:
            self.loop.call_soon_threadsafe(turned.set)
        except RuntimeError:  # it is closed
            return False
        return turned.wait(timeout)

    def submit(self, coroutine: Coroutine[Any, Any, T]) -> Job[T]:
        """Start a coroutine, from any thread; does not wait."""
        try:
            if self._abandoned:
                raise RuntimeError("abandoned")
            job = Job(self.loop, coroutine)
            self._jobs.add(job)
            job.future.add_done_callback(lambda _: self._jobs.discard(job))
            return job
        except RuntimeError as error:
            coroutine.close()
            raise MlcRouterError(
                "The cluster is stopped; start one with %route up or mlcrouter_nb.up()."
            ) from error

    def call(
        self,
        coroutine: Coroutine[Any, Any, T],
        *,
        timeout: float | None = None,
        patience: float = 2.0,
        on_tick: Callable[[], None] | None = None,
    ) -> T:
        """Run a coroutine and block until it has ended.

        A KeyboardInterrupt cancels the coroutine, waits `patience` seconds for its clean-up, and goes on up; so does
        `NoAnswer` after `timeout` seconds. `on_tick` is called in the waiting thread, ten times a second."""
        if self.inside:
            coroutine.close()
            raise MlcRouterError(
                "This call blocks the router's own loop; use the awaitable form of it there."
            )
        job = self.submit(coroutine)
        deadline = None if timeout is None else time.monotonic() + timeout
        try:
            while not job.wait(TICK):
                if on_tick is not None:
                    on_tick()
                if deadline is not None and time.monotonic() > deadline:
                    raise NoAnswer(
                        f"{self.blocked or f'The router did not answer within {timeout:g} s.'} "
                        "%route down, or cluster.down(), stops the cluster all the same."
                    )
        except BaseException:
            job.cancel()
            if self.blocked is None:
                job.wait(patience)
            raise
        return job.future.result()

    async def run(self, coroutine: Coroutine[Any, Any, T], *, patience: float = 2.0) -> T:
        """Await a coroutine from any loop; a cancellation reaches it, and its clean-up gets `patience` seconds."""
        if asyncio.get_running_loop() is self.loop:
            return await coroutine
        return await self.join(self.submit(coroutine), patience=patience)

    async def join(self, job: Job[T], *, patience: float = 2.0) -> T:
        """Await a job from any loop, as `run` does its coroutine."""
        waiter = asyncio.wrap_future(job.future)
        try:
            # Waking now and then lets the kernel cancel this await: it acts only when the loop turns.
            while not waiter.done():
                await asyncio.wait({waiter}, timeout=TICK)
        except asyncio.CancelledError:
            waiter.cancel()  # nobody will look at it
            await job.end(patience)
            raise
        return waiter.result()

    def end_with(self, last: Job[Any], timeout: float) -> None:
        """End a loop that does not turn: break out of the policy that blocks it, and stop once `last` has ended.

        Breaking out works in Python code; a thread that stays in C code for longer than `timeout` is left to itself:
        whoever waits for other jobs is told, and it stops by itself if it ever comes back."""
        deadline = time.monotonic() + timeout
        while not last.wait(TICK) and time.monotonic() < deadline:
            if self.blocked is not None:
                ctypes.pythonapi.PyThreadState_SetAsyncExc(
                    ctypes.c_ulong(self._thread.ident or 0), ctypes.py_object(ClusterStopped)
                )
        if not last.future.done():
            self._abandoned = True
            last.future.add_done_callback(lambda _: self.loop.call_soon_threadsafe(self.loop.stop))
            for job in self._jobs - {last}:
                job.abandon()

    def stop(self, timeout: float = 5.0) -> None:
        """Cancel what still runs, close the loop and join the thread (unless called on it, or abandoned)."""
        if self._abandoned:
            return
        with contextlib.suppress(RuntimeError):
            self.loop.call_soon_threadsafe(self.loop.stop)
        if not self.inside:
            self._thread.join(timeout)

    def _main(self) -> None:
        try:
            while not self._run():
                pass
            pending = asyncio.all_tasks(self.loop)
            for task in pending:
                task.cancel()
            if pending:
                self.loop.run_until_complete(asyncio.wait(pending, timeout=3.0))
            self.loop.run_until_complete(self.loop.shutdown_asyncgens())
        finally:
            self.loop.close()
            for job in list(self._jobs):
                job.close()

    def _run(self) -> bool:
        """Run the loop until it is stopped; False where a task has tried to end the process (a policy's, say)."""
        try:
            self.loop.run_forever()
        except (
            SystemExit,
            KeyboardInterrupt,
        ):  # asyncio lets these two through; here they are one task's own affair
            return False
        return True


def new_event_loop() -> asyncio.AbstractEventLoop:
    """uvloop's loop where it can be had, asyncio's elsewhere; the process's policy stays as it is."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()
