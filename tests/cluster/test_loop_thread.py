"""Coroutines on the router's loop, called from other threads and loops, interrupted and left."""

import asyncio
import contextlib
import gc
import sys
import threading
import time
from collections.abc import AsyncGenerator, Iterator

import pytest

from mlcrouter_nb.cluster.bridge import in_thread, iterate
from mlcrouter_nb.cluster.loop_thread import LoopThread
from mlcrouter_nb.protocol.errors import MlcRouterError


@pytest.fixture
def thread() -> Iterator[LoopThread]:
    thread = LoopThread("test")
    yield thread
    thread.stop()
    assert not thread.alive


class Sleeper:
    """A coroutine that says what became of it."""

    def __init__(self) -> None:
        self.started = threading.Event()
        self.cancelled = threading.Event()

    async def __call__(self) -> None:
        self.started.set()
        try:
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            await asyncio.sleep(0.05)  # a clean-up that takes a moment
            self.cancelled.set()
            raise


async def double(x: int) -> int:
    await asyncio.sleep(0)
    return 2 * x


async def fail() -> None:
    raise ValueError("as told")


def test_call_gives_results_and_errors(thread: LoopThread) -> None:
    assert thread.call(double(4)) == 8
    with pytest.raises(ValueError, match="as told"):
        thread.call(fail())


@pytest.mark.parametrize("error", [SystemExit(3), KeyboardInterrupt()])
def test_a_task_that_wants_to_end_the_process_does_not_end_the_loop(
    thread: LoopThread, error: BaseException
) -> None:
    async def end() -> None:
        raise error

    async def spawn() -> None:
        task = asyncio.create_task(end())
        await asyncio.wait({task})
        assert task.exception() is error

    thread.call(spawn())
    assert thread.call(double(4)) == 8


def test_what_cannot_clean_up_without_the_loop_leaves_nobody_waiting() -> None:
    thread = LoopThread("test")

    async def stubborn() -> None:
        while True:
            try:
                await asyncio.sleep(30)
            except BaseException as error:
                if isinstance(error, GeneratorExit):
                    raise ValueError("cannot") from None

    job = thread.submit(stubborn())
    thread.call(double(1))
    thread.stop()
    with pytest.raises(asyncio.CancelledError):
        job.future.result(1.0)


def test_an_interrupt_cancels_the_coroutine_and_waits_for_its_cleanup(thread: LoopThread) -> None:
    sleeper = Sleeper()

    def interrupt() -> None:
        if sleeper.started.is_set():
            raise KeyboardInterrupt

    begin = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        thread.call(sleeper(), on_tick=interrupt)
    assert sleeper.cancelled.is_set()
    assert time.monotonic() - begin < 0.5


def test_without_uvloop(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvloop", None)
    thread = LoopThread("plain")
    assert isinstance(thread.loop, asyncio.BaseEventLoop)
    assert thread.call(double(2)) == 4
    thread.stop()


def test_a_time_out_cancels_too(thread: LoopThread) -> None:
    sleeper = Sleeper()
    with pytest.raises(TimeoutError, match="did not answer"):
        thread.call(sleeper(), timeout=0.2)
    assert sleeper.cancelled.is_set()


def test_a_time_out_of_the_coroutine_is_not_the_callers(thread: LoopThread) -> None:
    async def times_out() -> None:
        raise TimeoutError("inner")

    with pytest.raises(TimeoutError, match="inner"):
        thread.call(times_out(), timeout=30)


def test_blocking_on_the_loop_itself_is_refused(thread: LoopThread) -> None:
    async def outer() -> None:
        thread.call(double(1))

    with pytest.raises(MlcRouterError, match="blocks"):
        thread.call(outer())


async def test_run_from_another_loop(thread: LoopThread) -> None:
    assert await thread.run(double(3)) == 6
    with pytest.raises(ValueError, match="as told"):
        await thread.run(fail())


async def test_a_cancellation_crosses_loops(thread: LoopThread, caplog: pytest.LogCaptureFixture) -> None:
    sleeper = Sleeper()
    waiting = asyncio.create_task(thread.run(sleeper()))
    while not sleeper.started.is_set():  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    waiting.cancel()
    with pytest.raises(asyncio.CancelledError):
        await waiting
    assert sleeper.cancelled.is_set()
    del waiting
    gc.collect()
    assert caplog.records == [], "no exception that nobody looked at"


async def count(n: int, closed: threading.Event) -> AsyncGenerator[int, None]:
    try:
        for i in range(n):
            yield i
            await asyncio.sleep(0)
    finally:
        closed.set()


async def test_iterate_gives_all_in_order(thread: LoopThread) -> None:
    closed = threading.Event()
    assert [i async for i in iterate(thread, count(1000, closed), capacity=16)] == list(range(1000))
    assert closed.is_set()


async def test_iterate_passes_errors_on_after_the_items(thread: LoopThread) -> None:
    async def two_then_fail() -> AsyncGenerator[int, None]:
        yield 1
        yield 2
        raise ValueError("as told")

    seen = []
    with pytest.raises(ValueError, match="as told"):
        async for item in iterate(thread, two_then_fail()):
            seen.append(item)
    assert seen == [1, 2]


async def test_the_source_runs_ahead_by_its_capacity_only_and_ends_when_left(thread: LoopThread) -> None:
    closed = threading.Event()
    produced = []

    async def source() -> AsyncGenerator[int, None]:
        async for i in count(1000, closed):
            produced.append(i)
            yield i

    async with contextlib.aclosing(iterate(thread, source(), capacity=8)) as items:
        async for item in items:
            assert item == 0
            break
        await asyncio.sleep(0.1)
        assert len(produced) <= 8 + 2
    await asyncio.sleep(0.05)
    thread.call(double(1))
    assert closed.is_set()


def test_stop_cancels_what_runs_and_refuses_more() -> None:
    thread = LoopThread("test")
    sleeper = Sleeper()
    job = thread.submit(sleeper())
    assert sleeper.started.wait(2)
    thread.stop()
    assert sleeper.cancelled.is_set()
    assert job.wait(1)
    with pytest.raises(MlcRouterError, match="stopped"):
        thread.call(double(1))


async def test_in_thread_gives_results_and_errors() -> None:
    assert await in_thread(lambda: 5) == 5
    with pytest.raises(ZeroDivisionError):
        await in_thread(lambda: 1 // 0)
