"""Noticing that a policy's code holds up the router's loop, and saying where."""

import asyncio
import logging
import sys
import threading
import time

from ..telemetry import Telemetry
from ..telemetry.views import blocked_sentence
from .namespace import Namespace

log = logging.getLogger(__name__)

PERIOD_S = 0.5  # between looks at a loop that answers
LATE_S = 1.0  # after that long without an answer somebody blocks the loop


def blocked(thread_ident: int) -> str | None:
    """Which line of a policy a thread executes at this moment, as a sentence; None where it executes none.

    Looks at the thread's frames only, so any other thread may ask while the router's loop does not answer."""
    place = where(thread_ident)
    if place is None:
        return None
    watchdog = _watching.get(thread_ident)
    since = watchdog.since if watchdog is not None else None
    return blocked_sentence(place, None if since is None else time.time() - since)


def where(thread_ident: int) -> str | None:
    """`policy 'x', line 3`: the innermost line of a policy that a thread executes now."""
    frame = sys._current_frames().get(thread_ident)
    while frame is not None:
        if isinstance(frame.f_globals, Namespace):
            return f"policy '{frame.f_globals.policy}', line {frame.f_lineno}"
        frame = frame.f_back
    return None


class Watchdog:
    """A thread that asks the loop for a sign of life while requests run.

    Where none comes and a policy is why, the telemetry is told (`router_blocked`, then `router_answers`), and the log
    once for each line. `since` is the Unix time from which on the loop has not answered, None while it does."""

    def __init__(self, telemetry: Telemetry) -> None:
        self.since: float | None = None
        self._telemetry = telemetry
        self._thread: threading.Thread | None = None
        self._stopped, self._answered = threading.Event(), threading.Event()
        self._logged: set[str] = set()

    def start(self) -> None:
        """Watch the loop that runs the caller; again does nothing."""
        if self._thread is None and not self._stopped.is_set():
            arguments = asyncio.get_running_loop(), threading.get_ident()
            self._thread = threading.Thread(
                target=self._main, args=arguments, name="mlcrouter-watchdog", daemon=True
            )
            self._thread.start()

    def stop(self) -> None:
        """End the thread, without waiting for it."""
        self._stopped.set()

    def _main(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        _watching[ident] = self
        try:
            while not self._stopped.wait(PERIOD_S):
                if self._telemetry.live:
                    self._look(loop, ident)
        except RuntimeError:
            pass  # the loop is closed
        finally:
            _watching.pop(ident, None)

    def _look(self, loop: asyncio.AbstractEventLoop, ident: int) -> None:
        self._answered.clear()
        asked = time.time()
        loop.call_soon_threadsafe(self._answered.set)
        told = False
        while not (self._answered.wait(LATE_S) or self._stopped.is_set() or loop.is_closed()):
            self.since = asked
            place = where(ident)
            if told:
                self._telemetry.touch()  # the seconds go on
            elif place is not None:
                told = True
                self._tell(place, asked)
        self.since = None
        if told:
            self._telemetry.emit("router_answers", blocked_s=time.time() - asked)

    def _tell(self, place: str, since: float) -> None:
        self._telemetry.emit("router_blocked", place=place, since=since)
        if place not in self._logged:
            self._logged.add(place)
            log.warning(blocked_sentence(place, time.time() - since))


_watching: dict[int, Watchdog] = {}  # by the thread that is watched
