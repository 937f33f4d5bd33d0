"""The engine thread: it alone touches the runner and the scheduler; the server talks to it through a queue."""

import asyncio
import logging
import queue
import threading
import time
from collections.abc import Callable
from typing import Generic, Protocol, TypeVar

from ..protocol.errors import MlcRouterError
from .jobs import Event, Job
from .kv_pool import Runner
from .scheduler import Scheduler
from .stats import Stats

STUCK_AFTER_S = 30.0  # one step takes about a second at most
_log = logging.getLogger(__name__)
T = TypeVar("T")


class ClosableRunner(Runner, Protocol):
    """A `ModelRunner`: it frees its memory when told to."""

    def close(self) -> None: ...


AnyRunner = TypeVar("AnyRunner", bound=ClosableRunner)


class EngineWorker(Generic[AnyRunner]):
    """Runs the scheduler in a thread of its own.

    `make_runner` is called in that thread. Listeners of jobs are called on the event loop that called `start`."""

    def __init__(
        self,
        make_runner: Callable[[], AnyRunner],
        *,
        max_num_sequence: int = 16,
        prefix_cache: bool = False,
    ) -> None:
        self._make_runner = make_runner
        self._options = {"max_num_sequence": max_num_sequence, "prefix_cache": prefix_cache}
        self._commands: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)
        self._stopping = False
        self._step_began: float | None = None
        self.runner: AnyRunner
        self.scheduler: Scheduler

    async def start(self) -> None:
        """Make the runner; raises what that raises."""
        self._loop = asyncio.get_running_loop()
        self._ready: asyncio.Future[None] = self._loop.create_future()
        self._thread.start()
        await self._ready

    async def stop(self, deadline_s: float = 5.0) -> bool:
        """End the thread and close the runner; False where it did not end in time."""
        self._stopping = True
        self._commands.put(lambda: None)
        await asyncio.to_thread(self._thread.join, deadline_s)
        return not self._thread.is_alive()

    @property
    def stats(self) -> Stats:
        """Counters and gauges, as of the last step."""
        return self.scheduler.stats

    @property
    def trouble(self) -> str | None:
        """What is wrong with the thread; None while it works."""
        if not self._thread.is_alive():
            return "The engine thread has ended; see the log."
        began = self._step_began
        if began is not None and (stuck := time.monotonic() - began) > STUCK_AFTER_S:
            return f"The engine thread has been in one step for {stuck:.0f} s."
        return None

    def submit(self, job: Job) -> None:
        """Queue a job; its listener hears of it."""
        self._commands.put(lambda: self.scheduler.add(job))

    def abort(self, job: Job) -> None:
        """Forget a job and free its pages, soon."""
        self._commands.put(lambda: self.scheduler.abort(job))

    async def call(self, function: Callable[[], T], deadline_s: float = 60.0) -> T:
        """Run `function` in the engine thread, between two steps; its result or exception."""
        result: asyncio.Future[T] = self._loop.create_future()

        def settle(value: T | None, error: Exception | None) -> None:
            if result.done():  # given up meanwhile
                return
            if error is not None:
                result.set_exception(error)
            else:
                result.set_result(value)  # type: ignore[arg-type]

        def command() -> None:
            try:
                value = function()
            except Exception as error:
                self._post(settle, None, error)
            else:
                self._post(settle, value, None)

        self._commands.put(command)
        async with asyncio.timeout(deadline_s):
            return await result

    # In the engine thread

    def _run(self) -> None:
        try:
            self.runner = self._make_runner()
            self.scheduler = Scheduler(self.runner, **self._options)  # type: ignore[arg-type]
        except BaseException as error:
            self._post(self._settle_ready, error)
            return
        self._post(self._settle_ready, None)
        try:
            while not self._stopping:
                self._turn()
            self.scheduler.abort_all()
        except Exception:
            _log.exception("The engine thread ends")
        finally:
            self.runner.close()

    def _turn(self) -> None:
        """Commands that have come, then a step."""
        busy, deadline = self.scheduler.has_work, self.scheduler.seconds_to_deadline()
        self._obey(0.0 if busy else 1.0 if deadline is None else min(1.0, deadline))
        if self._stopping:
            return
        self._step_began = time.monotonic()
        try:
            events = self.scheduler.step()
        except Exception as error:
            _log.exception("A step failed")
            events = self.scheduler.fail_all(MlcRouterError(f"The engine failed: {error}"))
        self._step_began = None
        if events:
            self._post(_tell, events)

    def _obey(self, patience_s: float) -> None:
        try:
            command = self._commands.get(timeout=patience_s) if patience_s else self._commands.get_nowait()
            while True:
                try:
                    command()
                except Exception:
                    _log.exception("A command failed")
                command = self._commands.get_nowait()
        except queue.Empty:
            return

    def _settle_ready(self, error: BaseException | None) -> None:
        if self._ready.done():
            return
        if error is None:
            self._ready.set_result(None)
        else:
            self._ready.set_exception(error)

    def _post(self, function: Callable[..., None], *arguments: object) -> None:
        try:
            self._loop.call_soon_threadsafe(function, *arguments)
        except RuntimeError:  # the loop has ended, nobody listens
            pass


def _tell(events: list[tuple[Job, Event]]) -> None:
    for job, event in events:
        try:
            job.listener(event)
        except Exception:
            _log.exception("A listener failed")
