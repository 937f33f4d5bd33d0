"""Figures of engines: read from their metrics, shown when they change."""

import asyncio
from typing import Any

import pytest
from aiohttp import web

from mlcrouter_nb.cluster import watcher
from mlcrouter_nb.cluster.launchers.attach import AttachedEngine
from mlcrouter_nb.cluster.launchers.base import EngineSpec
from mlcrouter_nb.cluster.watcher import Watcher, parse_samples
from mlcrouter_nb.telemetry import RequestTrace, Telemetry


def test_samples() -> None:
    page = '# HELP a b\n# TYPE a counter\na 1\nb{peer="1"} 2.5 1700000000\nc{x="}"} 3\nnonsense\nd NaN\n\n'
    samples = parse_samples(page)
    assert samples["a"] == 1
    assert samples['b{peer="1"}'] == 2.5
    assert samples['c{x="}"}'] == 3
    assert "nonsense" not in samples


class Metrics:
    """A server whose figures a test sets."""

    def __init__(self) -> None:
        self.figures = {"kv_pages_total": 100, "kv_pages_free": 100, "prefill_tokens_total": 0}
        self.asked = 0
        self.url = ""

    async def __aenter__(self) -> "Metrics":
        app = web.Application()
        app.router.add_get("/metrics", self._answer)
        self._runner = web.AppRunner(app)
        await self._runner.setup()
        await web.TCPSite(self._runner, "127.0.0.1", 0).start()
        self.url = f"http://127.0.0.1:{self._runner.addresses[0][1]}"
        return self

    async def __aexit__(self, *_: object) -> None:
        await self._runner.cleanup()

    async def _answer(self, request: web.Request) -> web.Response:
        self.asked += 1
        return web.Response(text="".join(f"mlcrouter_engine_{k} {v}\n" for k, v in self.figures.items()))


async def test_it_sleeps_when_nothing_happens_and_wakes_with_a_request(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "BUSY_PERIOD", 0.02)
    telemetry = Telemetry()
    async with Metrics() as metrics:
        engine = AttachedEngine(EngineSpec("E0", None, url=metrics.url), url=metrics.url)
        watching = asyncio.create_task(Watcher(telemetry, [engine]).run())
        await asyncio.sleep(0.4)
        asked, version = metrics.asked, telemetry.version
        await asyncio.sleep(0.3)
        assert (metrics.asked, telemetry.version) == (asked, version), "asleep"
        trace = RequestTrace("r")
        telemetry.begin(trace)
        await asyncio.sleep(0.1)
        metrics.figures |= {"kv_pages_free": 90, "kv_pages_cached": 4, "prefill_tokens_total": 160}
        await asyncio.sleep(0.2)
        view = telemetry.snapshot().engines[0]
        assert (view.kv_pages_used, view.kv_pages_cached, view.kv_pages_total) == (10, 4, 100)
        assert view.prefill_tokens_per_s > 100
        telemetry.finish(trace, "finished")
        metrics.figures |= {"kv_pages_free": 96}
        await asyncio.sleep(0.2)
        assert telemetry.snapshot().engines[0].kv_pages_used == 4, "the last state is seen"
        watching.cancel()
        await asyncio.wait({watching})
        assert watching.cancelled()


async def test_an_attached_engine_fails_after_two_silences_and_comes_back(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(watcher, "DOUBT_PERIOD", 0.02)
    monkeypatch.setattr(watcher, "BUSY_PERIOD", 0.02)
    telemetry = Telemetry()
    events: list[Any] = []
    telemetry.subscribe(lambda event: events.append(event.data.get("state")))
    async with Metrics() as metrics:
        engine = AttachedEngine(EngineSpec("E0", None), url="http://127.0.0.1:9")
        watching = asyncio.create_task(Watcher(telemetry, [engine]).run())
        await asyncio.sleep(0.2)
        assert events == ["failed"]
        engine.url = metrics.url
        await asyncio.sleep(0.2)
        assert events[:2] == ["failed", "ready"]
        watching.cancel()
        await asyncio.wait({watching})
