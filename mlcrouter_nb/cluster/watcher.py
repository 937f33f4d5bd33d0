"""Reads each engine's `/metrics` into telemetry: often while requests run, rarely and silently otherwise."""

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Sequence
from typing import Any

import aiohttp

from ..telemetry import Event, Telemetry
from .launchers.base import Engine

BUSY_PERIOD = 0.3
IDLE_PERIOD = 10.0
DOUBT_PERIOD = 2.0  # after an attached engine has not answered
QUIET_POLLS = 3
RATE_WINDOW = 1.0  # seconds that a rate looks back
PREFIX = "mlcrouter_engine_"


class Watcher:
    """Polls engines until it is cancelled."""

    def __init__(self, telemetry: Telemetry, engines: Sequence[Engine]) -> None:
        self._telemetry = telemetry
        self._engines = [_Watched(engine, telemetry) for engine in engines]
        self._work = asyncio.Event()
        self._requests = 0  # that have begun or ended, by now

    async def run(self) -> None:
        """One task polls each engine, so that one that hangs does not hide the others."""
        unsubscribe = self._telemetry.subscribe(self._on_event)
        timeout = aiohttp.ClientTimeout(total=2.0)
        try:
            async with aiohttp.ClientSession(timeout=timeout) as session, asyncio.TaskGroup() as tasks:
                for engine in self._engines:
                    tasks.create_task(self._watch(engine, session))
        finally:
            unsubscribe()

    def _on_event(self, event: Event) -> None:
        if event.kind in ("request_started", "request_finished"):
            self._requests += 1
            self._work.set()

    async def _watch(self, engine: "_Watched", session: aiohttp.ClientSession) -> None:
        quiet = 0  # polls in a row without a request and without news
        while not engine.gone:
            requests = self._requests
            changed = await engine.poll(session)
            if not engine.has_figures:  # somebody else's server: now and then a sign of life is enough
                await asyncio.sleep(DOUBT_PERIOD if engine.silent else IDLE_PERIOD)
                continue
            quiet = 0 if changed or self._telemetry.live or requests != self._requests else quiet + 1
            if quiet < QUIET_POLLS:
                await asyncio.sleep(BUSY_PERIOD)
                continue
            self._work.clear()
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._work.wait(), IDLE_PERIOD)


class _Watched:
    """One engine and what it said last."""

    def __init__(self, engine: Engine, telemetry: Telemetry) -> None:
        self.engine = engine
        self._telemetry = telemetry
        self._shown: dict[str, Any] = {}
        self._samples: deque[tuple[float, float, float]] = deque()
        self.silent = 0  # polls in a row without an answer
        self.has_figures = engine.exited is not None  # of an attached one the first answer tells

    @property
    def gone(self) -> bool:
        exited = self.engine.exited
        return exited is not None and exited.done()

    async def poll(self, session: aiohttp.ClientSession) -> bool:
        """Ask once; answers whether anything visible changed."""
        try:
            async with session.get(f"{self.engine.url}/metrics") as answer:
                text = await answer.text() if answer.status == 200 else ""
        except (aiohttp.ClientError, TimeoutError, UnicodeDecodeError) as error:
            return self._no_answer(error)
        return self._answer(text)

    def _no_answer(self, error: BaseException) -> bool:
        """Only an attached engine is judged by its silence; of our own we know whether the process lives."""
        self.silent += 1
        if self.engine.exited is not None or self.silent != 2:
            return False
        reason = str(error) or type(error).__name__
        self._telemetry.emit(
            "engine_state",
            engine=self.engine.spec.name,
            state="failed",
            detail=f"{self.engine.url} does not answer: {reason}",
        )
        return False

    def _answer(self, text: str) -> bool:
        if self.silent >= 2 and self.engine.exited is None:
            self._telemetry.emit("engine_state", engine=self.engine.spec.name, state="ready", detail="")
        self.silent = 0
        figures = self._figures(parse_samples(text))
        changed = {key: value for key, value in figures.items() if self._shown.get(key) != value}
        if changed:
            self._shown.update(changed)
            self._telemetry.emit("engine_metrics", engine=self.engine.spec.name, **changed)
        return bool(changed)

    def _figures(self, samples: dict[str, float]) -> dict[str, Any]:
        """The fields of `EngineView` that these samples tell; none where the engine is not one of ours."""
        total = samples.get(PREFIX + "kv_pages_total")
        self.has_figures = total is not None or self.engine.exited is not None
        if total is None:
            return {}
        now = time.monotonic()
        prefilled = samples.get(PREFIX + "prefill_tokens_total", 0.0)
        decoded = samples.get(PREFIX + "decode_tokens_total", 0.0)
        if self._samples and now - self._samples[-1][0] > 2 * RATE_WINDOW:
            self._samples.clear()  # from before a pause: a rate over all of it would say little
        self._samples.append((now, prefilled, decoded))
        while len(self._samples) > 2 and now - self._samples[1][0] >= RATE_WINDOW:
            self._samples.popleft()
        begin, prefilled_before, decoded_before = self._samples[0]
        seconds = max(now - begin, 1e-3)
        return {
            "kv_pages_total": int(total),
            "kv_pages_used": int(total - samples.get(PREFIX + "kv_pages_free", total)),
            "kv_pages_cached": int(samples.get(PREFIX + "kv_pages_cached", 0)),
            "prefill_tokens_per_s": round((prefilled - prefilled_before) / seconds, 1),
            "decode_tokens_per_s": round((decoded - decoded_before) / seconds, 1),
        }


def parse_samples(text: str) -> dict[str, float]:
    """The samples of a Prometheus page, `name` or `name{labels}` to value; lines that are none are skipped.

    Source: https://prometheus.io/docs/instrumenting/exposition_formats/"""
    samples = {}
    for line in text.splitlines():
        if not line or line.startswith("#"):
            continue
        name, separator, rest = line.rpartition("} ") if "}" in line else line.partition(" ")
        with contextlib.suppress(ValueError, IndexError):
            samples[name + separator.strip()] = float(rest.split()[0])
    return samples
