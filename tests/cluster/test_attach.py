"""Engines that already run: asked for nothing but an answer, judged by it, and never stopped."""

import asyncio
from collections.abc import AsyncIterator, Callable

import pytest

from mlcrouter_nb.cluster import Cluster, current, watcher
from mlcrouter_nb.cluster.boot import boot, stop_all
from mlcrouter_nb.cluster.launchers import attach
from mlcrouter_nb.cluster.launchers.base import Engine, EngineSpec
from mlcrouter_nb.cluster.launchers.cpu import CpuLauncher
from mlcrouter_nb.protocol.errors import ArgumentError
from mlcrouter_nb.telemetry import Telemetry


@pytest.fixture
async def running(launcher: Callable[..., CpuLauncher]) -> AsyncIterator[list[Engine]]:
    """Two engines that somebody else started."""
    engines: list[Engine] = []
    specs = [EngineSpec("A", None, 0), EngineSpec("B", None, 1)]
    await boot(launcher(), specs, Telemetry(), engines)
    yield engines
    await stop_all(launcher(), engines, Telemetry(), grace=1)


async def test_one_engine_policies_and_disagg(running: list[Engine]) -> None:
    urls = [engine.url for engine in running]
    async with Cluster("my-model", engine="attach", endpoint_urls=urls, roles="2") as cluster:
        assert cluster.status().kind == "attach"
        assert cluster.status().policy.name == "round-robin"
        routes = {(await cluster.ask("Who?", max_tokens=1)).trace.route for _ in range(2)}
        assert routes == {"E0", "E1"}
    async with Cluster("my-model", engine="attach", endpoint_urls=urls) as cluster:
        assert [engine.name for engine in cluster.status().engines] == ["P0", "D1"]
        answer = await cluster.ask([1, 2, 3], max_tokens=2)
        assert answer == "Humpty Dumpty "
        assert answer.trace.route == "P0 → D1"
    assert all(not engine.exited.done() for engine in running), "not ours to stop"


async def test_an_engine_that_goes_is_seen(running: list[Engine], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watcher, "IDLE_PERIOD", 0.1)
    urls = [engine.url for engine in running]
    async with Cluster("my-model", endpoint_urls=urls, roles="2") as cluster:
        await running[1].stop(1)
        for _ in range(100):
            states = [engine.state for engine in cluster.status().engines]
            if states == ["ready", "failed"]:
                break
            await asyncio.sleep(0.05)
        assert states == ["ready", "failed"]
        assert "does not answer" in cluster.status().engines[1].detail
        with pytest.raises(ArgumentError, match="elsewhere"):
            cluster.logs("E1")


async def test_foreign_servers_are_asked_for_a_sign_of_life_only(
    running: list[Engine], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Engines whose metrics are ours show their figures; others are left alone but for a rare probe."""
    probes: list[str] = []
    poll = watcher._Watched.poll

    async def counted(self: watcher._Watched, session: object) -> bool:
        probes.append(self.engine.url)
        return await poll(self, session)

    monkeypatch.setattr(watcher._Watched, "poll", counted)
    monkeypatch.setattr(watcher, "PREFIX", "something_else_")
    async with Cluster("my-model", endpoint_urls=[running[0].url]) as cluster:
        await cluster.ask("Who?", max_tokens=11)
        await asyncio.sleep(0.7)
        assert len(probes) == 1
        assert cluster.status().engines[0].kv_pages_total is None
    probes.clear()
    monkeypatch.setattr(watcher, "PREFIX", "mlcrouter_engine_")
    async with Cluster("my-model", endpoint_urls=[running[0].url]) as cluster:
        await cluster.ask("Who?", max_tokens=11)
        await asyncio.sleep(0.7)
        assert len(probes) > 1
        assert cluster.status().engines[0].kv_pages_total == 100


@pytest.mark.parametrize("kind", ["nobody", "silent", "not HTTP"])
async def test_an_address_where_no_engine_answers_is_named(
    running: list[Engine], kind: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(attach, "PROBE_S", 0.5)

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        if kind == "silent":
            await reader.read()
        writer.write(b"SSH-2.0-OpenSSH_9.2\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        port = 9 if kind == "nobody" else server.sockets[0].getsockname()[1]
        cluster = Cluster("my-model", endpoint_urls=[running[0].url, f"http://127.0.0.1:{port}"], roles="2")
        with pytest.raises(ArgumentError, match=f"http://127.0.0.1:{port}.*start it there first"):
            await cluster.start()
        assert current.find() is None


async def test_any_answer_is_a_sign_of_life() -> None:
    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 401 Unauthorized\r\nContent-Length: 0\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with Cluster("my-model", endpoint_urls=[url]) as cluster:
            assert cluster.url


async def test_a_missing_tokenizer_file_is_named() -> None:
    cluster = Cluster("my-model", endpoint_urls=["http://127.0.0.1:9"], tokenizer="/nowhere/tokenizer.json")
    with pytest.raises(ArgumentError, match=r"/nowhere/tokenizer\.json"):
        await cluster.start()
