"""A cluster of stand-in engines: boot, ask, steer, look, stop, from here and from the router's thread."""

import asyncio
import socket
import threading
import time
from collections.abc import Callable

import aiohttp
import psutil
import pytest

import mlcrouter_nb
from mlcrouter_nb import MlcRouterError
from mlcrouter_nb.cluster import Cluster, current
from mlcrouter_nb.cluster.functions import find_same, up
from mlcrouter_nb.protocol.errors import ArgumentError, BootError, RequestError

StandIns = Callable[..., Cluster]


async def test_boot_ask_and_stop(stand_ins: StandIns) -> None:
    async with stand_ins(roles="1P2D") as cluster:
        assert mlcrouter_nb.cluster() is cluster
        status = cluster.status()
        assert (status.state, status.url) == ("ready", cluster.url)
        assert [engine.name for engine in status.engines] == ["P0", "D1", "D2"]
        assert status.policy.name == "disagg"
        answer = await cluster.ask("Who?", max_tokens=3)
        assert answer == "Humpty Dumpty sat "
        assert answer.finish_reason == "length"
        assert answer.usage["completion_tokens"] == 3
        assert answer.trace.route.startswith("P0 → D")
        pids = [engine.pid for engine in cluster.engines]
    assert cluster.status().state == "stopped"
    assert not any(psutil.pid_exists(pid) for pid in pids)
    with pytest.raises(MlcRouterError, match="not running"):
        await cluster.ask("Who?")
    with pytest.raises(MlcRouterError, match="No cluster"):
        mlcrouter_nb.cluster()


async def test_the_openai_endpoint_answers_and_closes(stand_ins: StandIns) -> None:
    async with stand_ins(roles="1P1D") as cluster, aiohttp.ClientSession() as session:
        body = {"model": "stand-in", "prompt": "Who?", "max_tokens": 2}
        async with session.post(f"{cluster.url}/completions", json=body) as answer:
            assert (await answer.json())["choices"][0]["text"] == "Humpty Dumpty "
        url = cluster.url
        await cluster.down()
        with pytest.raises(aiohttp.ClientConnectionError):
            await session.get(f"{url}/models")


async def test_stream_and_leave(stand_ins: StandIns) -> None:
    async with stand_ins(roles="1P1D") as cluster:
        texts = [chunk.text async for chunk in cluster.stream("Who?", max_tokens=3)]
        assert "".join(texts) == "Humpty Dumpty sat "
        stream = cluster.stream("Who?", max_tokens=10)
        assert (await anext(stream)).text == "Humpty "
        await stream.aclose()
        assert cluster.status().in_flight == 0


def test_everything_from_a_thread_without_a_loop(stand_ins: StandIns) -> None:
    seen = []
    cluster = stand_ins(roles="1P1D").start_blocking(seen.append)
    assert any(engine.state == "starting" for snapshot in seen for engine in snapshot.engines)
    pieces: list[str] = []
    threads: set[int] = set()

    def on_text(text: str) -> None:
        pieces.append(text)
        threads.add(threading.get_ident())

    submission = cluster.submit("Who?", max_tokens=3, on_text=on_text)
    assert submission.wait(5)
    assert submission.result() == "Humpty Dumpty sat " == "".join(pieces)
    assert submission.trace.completion_tokens == 3
    assert threading.get_ident() not in threads
    cluster.down_blocking()
    cluster.down_blocking()


def test_a_cancelled_submission_frees_everything(stand_ins: StandIns) -> None:
    cluster = stand_ins(roles="1P1D").start_blocking()
    submission = cluster.submit("Who?", max_tokens=11)
    while not cluster.telemetry.live or not submission.trace.times:
        time.sleep(0.01)
    submission.cancel()
    assert submission.wait(1)
    with pytest.raises(asyncio.CancelledError):
        submission.result()
    assert [engine.in_flight for engine in cluster.status().engines] == [0, 0]
    assert submission.trace.state == "cancelled"


async def test_a_cancelled_ask_frees_everything(stand_ins: StandIns) -> None:
    async with stand_ins(roles="1P1D") as cluster:
        asking = asyncio.create_task(cluster.ask("Who?", max_tokens=11))
        while not cluster.telemetry.live:  # noqa: ASYNC110
            await asyncio.sleep(0.01)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        assert [engine.in_flight for engine in cluster.status().engines] == [0, 0]


async def test_policies_and_parameters(stand_ins: StandIns) -> None:
    async with stand_ins(roles="1P1D") as cluster:
        cluster.use("disagg", pd_balance_factor=0.3)
        assert cluster.params.pd_balance_factor == 0.3
        cluster.params.pd_balance_factor = 0.5
        assert cluster.params["pd_balance_factor"] == 0.5
        assert list(cluster.params) == ["pd_balance_factor"]
        with pytest.raises(ArgumentError, match=r"1\.2"):
            cluster.set(pd_balance_factor=1.2)
        with pytest.raises(AttributeError, match="pd_balance_factor"):
            _ = cluster.params.nothing
        with pytest.raises(ArgumentError, match="nobody"):
            cluster.use("nobody")
        assert cluster.status().policy.parameters[0].value == 0.5
        answer = await cluster.ask("Who?", policy="round-robin", max_tokens=2)
        assert answer.trace.policy == "round-robin"
        assert cluster.status().policy.name == "disagg"


async def test_bad_requests_are_refused(stand_ins: StandIns) -> None:
    async with stand_ins(roles="1") as cluster:
        for fields in ({"max_tokens": 0}, {"temperature": 9}, {"top_p": 7}):
            with pytest.raises(RequestError, match=next(iter(fields))):
                await cluster.ask("Who?", **fields)
        for arguments in (
            {},
            {"prompt": "a", "messages": [{"role": "user", "content": "b"}]},
            {"prompt": "a", "n": 2},
        ):
            with pytest.raises(ArgumentError):
                await cluster.ask(**arguments)
        assert await cluster.ask([72, 105], max_tokens=1) == "Humpty "


async def test_up_again(stand_ins: StandIns) -> None:
    cluster = stand_ins(roles="1P1D")
    await cluster.start()
    same = Cluster("stand-in", engine="cpu", roles="1P1D")
    assert find_same(same) is cluster
    assert await up("stand-in", engine="cpu", roles="1P1D") is cluster
    with pytest.raises(ArgumentError, match="%route down"):
        await up("stand-in", engine="cpu", roles="1P2D")
    with pytest.raises(ArgumentError, match="%route use"):
        await up("stand-in", engine="cpu", roles="1P1D", policy="round-robin")
    cluster.asked_policy = "disagg"
    cluster.use("least-loaded")
    assert await up("stand-in", engine="cpu", roles="1P1D", policy="disagg") is cluster, "its cell again"
    await cluster.down()
    assert current.find() is None
    with pytest.raises(MlcRouterError, match="started before"):
        await cluster.start()


async def test_up_after_all_engines_have_ended(stand_ins: StandIns) -> None:
    ended = await stand_ins("dies", roles="2").start()
    while not ended.dead:  # noqa: ASYNC110
        await asyncio.sleep(0.05)
    stand_ins("ok")
    async with up("stand-in", engine="cpu", roles="2") as cluster:
        assert cluster is not ended
        assert await cluster.ask("Who?", max_tokens=2) == "Humpty Dumpty "
    assert ended.status().state == "stopped"


async def test_async_with_up(stand_ins: StandIns) -> None:
    stand_ins()  # puts the stand-ins in place
    arguments = {"engine": "cpu", "roles": "1P1D"}
    async with up("stand-in", **arguments) as cluster:
        assert cluster.status().state == "ready"
    assert cluster.status().state == "stopped"
    async with await up("stand-in", **arguments) as cluster:
        assert cluster.status().state == "ready"
        assert await asyncio.create_task(up("stand-in", **arguments)) is cluster
    assert current.find() is None
    with pytest.raises(MlcRouterError, match="started before"):
        async with cluster:
            pass


async def test_errors_show_the_users_line_only(stand_ins: StandIns) -> None:
    async with stand_ins(roles="1") as cluster:
        fails = "async def route(request, engines):\n    return 1 / 0\n"
        cluster.use(cluster.book.compile("fails", fails, "cell [3]", "fails.py"))
        for call in (
            lambda: cluster.use("nosuch"),
            lambda: cluster.set(nosuch=1),
            lambda: cluster.submit(),
            lambda: cluster.stream(),
            lambda: cluster.submit("Who?").result(5),
        ):
            with pytest.raises(MlcRouterError) as caught:
                call()
            assert [entry.name for entry in caught.traceback][2:] == []
        with pytest.raises(MlcRouterError, match="line 2") as caught:
            await cluster.ask("Who?")
        assert [entry.name for entry in caught.traceback][1:] == []
        assert isinstance(caught.value.__cause__, ZeroDivisionError)
        with pytest.raises(ArgumentError) as caught:
            await up("stand-in", engine="cpu", roles="1P2D")
        assert [entry.name for entry in caught.traceback][1:] == []


async def test_a_failed_boot_names_the_engine_and_leaves_nothing(stand_ins: StandIns) -> None:
    cluster = stand_ins("exits", roles="1P1D")
    with pytest.raises(BootError, match=r"(?s)Engine (P0|D1).*exit code 3.*vpdpbusd"):
        await cluster.start()
    assert cluster.status().state == "stopped"
    assert current.find() is None


def test_an_interrupted_boot_stops_everything(stand_ins: StandIns) -> None:
    cluster = stand_ins("silent", roles="1P1D")

    def interrupt(snapshot: object) -> None:
        if len(cluster.engines) == 2:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        cluster.start_blocking(interrupt)
    assert cluster.status().state == "stopped"
    assert not any(psutil.pid_exists(engine.pid) for engine in cluster.engines)


async def test_a_cancelled_boot_stops_everything(stand_ins: StandIns) -> None:
    cluster = stand_ins("silent", roles="1P1D")
    with pytest.raises(TimeoutError):
        await asyncio.wait_for(cluster.start(), 1.0)
    assert cluster.status().state == "stopped"
    assert not any(psutil.pid_exists(engine.pid) for engine in cluster.engines)


async def test_a_boot_that_somebody_else_stops(stand_ins: StandIns) -> None:
    cluster = stand_ins("silent", roles="1P1D")
    booting = asyncio.create_task(cluster.start())
    while len(cluster.engines) < 2:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    await cluster.down()
    with pytest.raises(MlcRouterError, match="stopped while it booted"):
        await booting
    assert not any(psutil.pid_exists(engine.pid) for engine in cluster.engines)
    with pytest.raises(MlcRouterError):
        await cluster.ready()


async def test_two_at_once_boot_one_cluster(stand_ins: StandIns) -> None:
    stand_ins()  # puts the stand-ins in place
    arguments = {"engine": "cpu", "roles": "1P1D"}
    first, second = await asyncio.gather(up("stand-in", **arguments), up("stand-in", **arguments))
    assert first is second
    await first.down()


async def test_a_taken_port_is_found_before_the_boot(stand_ins: StandIns) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        cluster = stand_ins(roles="1P1D", port=port)
        with pytest.raises(ArgumentError, match=str(port)):
            await cluster.start()
        assert not cluster.engines


async def test_a_dead_engine_is_failed_and_not_chosen(stand_ins: StandIns) -> None:
    async with stand_ins("dies", roles="2") as cluster:
        for _ in range(100):
            if all(engine.state == "failed" for engine in cluster.status().engines):
                break
            await asyncio.sleep(0.05)
        view = cluster.status().engines[0]
        assert view.state == "failed"
        assert "exit code 7" in view.detail
        assert "out of cheese" in view.detail
        assert "out of cheese" in cluster.logs("E0")
        assert not any(endpoint.available for endpoint in cluster.router.endpoints)
        with pytest.raises(MlcRouterError):
            await cluster.ask("Who?", max_tokens=1)


async def test_kv_figures_come_and_idle_is_silent(stand_ins: StandIns) -> None:
    async with stand_ins(roles="1P1D") as cluster:
        await cluster.ask("Who?", max_tokens=11)
        await asyncio.sleep(1.5)  # the rates fall to 0
        views = cluster.status().engines
        assert [(view.kv_pages_total, view.kv_pages_used) for view in views] == [(100, 0), (100, 0)]
        version = cluster.telemetry.version
        await asyncio.sleep(1.0)
        assert cluster.telemetry.version == version


def test_wrong_arguments_before_anything_starts(stand_ins: StandIns) -> None:
    with pytest.raises(ArgumentError, match=r"1\.2"):
        stand_ins(policy="disagg", parameters={"pd_balance_factor": 1.2})
    with pytest.raises(ArgumentError, match="no parameter 'f'"):
        stand_ins(parameters={"f": 1})
    with pytest.raises(ArgumentError, match="nobody"):
        stand_ins(policy="nobody")
    with pytest.raises(ArgumentError, match="1P1D"):
        stand_ins(roles="1", policy="disagg")


async def test_what_comes_later_is_said(stand_ins: StandIns) -> None:
    cluster = stand_ins(roles="1")
    for call in (cluster.add, lambda: cluster.drain("E0"), lambda: cluster.remove("E0")):
        with pytest.raises(MlcRouterError, match="cannot"):
            call()
    with pytest.raises(ArgumentError, match="E0"):
        cluster.logs("D1")


def test_an_unknown_model_is_named() -> None:
    cluster = Cluster("nobody/knows-this", roles="1")
    with pytest.raises(ArgumentError, match="nobody/knows-this"):
        cluster.start_blocking()
    assert current.find() is None
