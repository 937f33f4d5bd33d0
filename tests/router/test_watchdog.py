"""A policy that never gives way is found by its line."""

import asyncio
import logging
import threading
import time

from mlcrouter_nb.router.policy import compile_policy
from mlcrouter_nb.router.watchdog import Watchdog, blocked
from mlcrouter_nb.telemetry import Telemetry

SPIN = """
go_on = [True]

async def route(request, engines):
    helper()

def helper():
    while go_on[0]: pass
"""


def test_another_thread_sees_the_line_that_blocks():
    policy = compile_policy("spin", SPIN, "cell [7]")
    routed = policy.start(None, None, {})

    def run():
        try:
            routed.send(None)
        except StopIteration:
            pass

    thread = threading.Thread(target=run)
    thread.start()
    try:
        time.sleep(0.05)
        said = blocked(thread.ident)
    finally:
        routed.cr_frame.f_globals["go_on"][0] = False
        thread.join(5)
    assert said is not None and "policy 'spin', line 8, is blocking the router" in said
    assert blocked(threading.get_ident()) is None


async def test_a_blocking_line_is_told_while_it_blocks_and_logged_once(serve, monkeypatch, caplog):
    monkeypatch.setattr("mlcrouter_nb.router.watchdog.PERIOD_S", 0.02)
    monkeypatch.setattr("mlcrouter_nb.router.watchdog.LATE_S", 0.05)
    source = """
import time

async def route(request, engines):
    await asyncio.sleep(0.1)
    time.sleep(0.4)
    return engines.all[0].complete(request)
"""
    async with serve("1") as served:
        telemetry = served.router.telemetry
        served.use(source, "sleepy")
        problems = []
        served.router.telemetry.subscribe(
            lambda event: event.kind == "router_blocked" and problems.append(telemetry.snapshot().problem)
        )
        with caplog.at_level(logging.WARNING):
            await served.texts({"prompt": "a b c", "max_tokens": 3})
            await served.texts({"prompt": "a b c", "max_tokens": 3})
        assert len(problems) == 2
        assert "policy 'sleepy', line 6, has blocked the router for 0 s" in problems[0]
        assert [record.getMessage()[:24] for record in caplog.records] == ["policy 'sleepy', line 6,"]
        await asyncio.sleep(0.1)
        assert telemetry.snapshot().problem == ""
        thread = next(t for t in threading.enumerate() if t.name == "mlcrouter-watchdog")
    thread.join(2)
    assert not thread.is_alive()


class DeafLoop:
    """A loop that hears nothing, and is then closed."""

    closed = False

    def call_soon_threadsafe(self, callback) -> None:
        pass

    def is_closed(self) -> bool:
        return self.closed


def test_the_thread_ends_with_a_loop_that_never_answers(monkeypatch):
    monkeypatch.setattr("mlcrouter_nb.router.watchdog.LATE_S", 0.02)
    watchdog, loop = Watchdog(Telemetry()), DeafLoop()
    thread = threading.Thread(target=watchdog._look, args=(loop, threading.get_ident()), daemon=True)
    thread.start()
    time.sleep(0.1)
    assert thread.is_alive()
    assert watchdog.since is not None
    loop.closed = True
    thread.join(2)
    assert not thread.is_alive()
