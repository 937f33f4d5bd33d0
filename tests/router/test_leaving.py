"""Clients that leave at any moment, and the end of the server."""

import asyncio
import json
import random

import aiohttp
import pytest

BODY = {"prompt": "a b c d", "max_tokens": 6}
START, SEND, COMPLETE = "/microserving/start_generate", "/microserving/remote_send", "/v1/completions"

ITERATING = """
async def route(request, engines):
    decode = engines.decode.least_loaded()
    kv = await decode.prep_recv(request, end=-1)
    await engines.prefill.least_loaded().remote_send(request, kv)
    async for chunk in decode.start_generate(request, begin=kv.end):
        yield chunk
"""


@pytest.mark.parametrize("policy", ["round-robin", "least-loaded", "disagg", ITERATING])
async def test_two_hundred_requests_a_third_of_them_left(serve, policy):
    rng = random.Random(7)
    async with serve("2P2D") as served:
        served.use(policy)
        for engine in served.engines.values():
            engine.default.token_s, engine.default.wait = 0.004, 0.002
        outcomes = {"done": 0, "left": 0}

        async def one(i: int) -> None:
            leave_after = rng.uniform(0, 0.08) if i % 3 == 0 else None
            body = BODY | {"stream": i % 2 == 0}
            path = COMPLETE if i % 5 else "/v1/chat/completions"
            if i % 5 == 0:
                body = {
                    "messages": [{"role": "user", "content": "a b"}],
                    "max_tokens": 6,
                    "stream": i % 2 == 0,
                }
            try:
                async with asyncio.timeout(leave_after):
                    async with served.http.post(path, json=body) as response:
                        assert response.status == 200
                        await response.read()
                outcomes["done"] += 1
            except TimeoutError:
                outcomes["left"] += 1

        await asyncio.gather(*(one(i) for i in range(200)))
        assert outcomes["done"] >= 133
        assert outcomes["left"] >= 20
        await served.nothing_left()
        states = [trace.state for trace in served.router.telemetry.finished]
        assert len(states) == 200 or states.count("cancelled") + outcomes["done"] >= len(states)
        assert states.count("failed") == 0


async def until_open(engine) -> None:
    """Wait until a call has reached the engine."""
    for _ in range(100):
        if engine.open:
            return
        await asyncio.sleep(0.01)
    raise AssertionError("no call came")


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("policy", "engine", "call"),
    [
        ("round-robin", "P0", COMPLETE),
        ("disagg", "P0", SEND),
        ("disagg", "D1", START),
        (ITERATING, "D1", START),
    ],
)
async def test_a_leave_is_seen_behind_a_silent_engine(serve, policy, engine, call, stream):
    async with serve("1P1D") as served:
        served.use(policy)
        served.engines[engine].plan(call, silent=True)
        host, port = served.url.removeprefix("http://").split(":")
        _, writer = await asyncio.open_connection(host, int(port))
        body = json.dumps(BODY | {"stream": stream}).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await until_open(served.engines[engine])
        writer.transport.abort()
        await served.nothing_left(1.0)
        assert served.router.telemetry.finished[-1].state == "cancelled"


async def test_a_client_that_does_not_read_slows_its_engine_down(serve):
    async with serve("1") as served:
        engine = served.engines["E0"]
        big = "x" * 20_000
        host, port = served.url.removeprefix("http://").split(":")
        reader, writer = await asyncio.open_connection(host, int(port), limit=1024)
        writer.transport.pause_reading()
        body = json.dumps(
            {"prompt": "a", "max_tokens": 2000, "stream": True, "model": None, "min_p": big}
        ).encode()
        head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        sent = 0
        real = engine._stream

        async def counted(writer, path, body, plan):
            nonlocal sent
            writer.write(
                b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
            )
            event = (
                b'data: {"choices": [{"index": 0, "text": "%b", "finish_reason": null}]}\n\n' % big.encode()
            )
            for _ in range(2000):
                writer.write(b"%x\r\n%b\r\n" % (len(event), event))
                await writer.drain()
                sent += 1

        engine._stream = counted
        writer.write(head.encode() + body)
        await asyncio.sleep(0.5)
        before = sent
        await asyncio.sleep(0.3)
        assert 0 < before == sent < 1500
        writer.transport.resume_reading()
        await reader.read(1000)
        writer.transport.abort()
        engine._stream = real


async def test_the_server_stops_when_streams_have_ended(serve):
    async with serve("1") as served:
        served.engines["E0"].default.token_s = 0.05
        task = asyncio.create_task(served.texts(BODY))
        async with served.http.post(COMPLETE, json=BODY | {"stream": True}) as response:
            await response.content.readany()
            stopping = asyncio.create_task(served.gateway.stop(10))
            text = (await response.read()).decode()
            assert text.endswith("data: [DONE]\n\n")
            await asyncio.wait_for(stopping, 2)
        assert len(await task) == 7
        with pytest.raises(aiohttp.ClientConnectionError):
            await served.http.get("/health")


async def test_what_does_not_end_in_time_is_ended(serve):
    async with serve("1") as served:
        served.engines["E0"].plan(COMPLETE, silent=True)
        asking = asyncio.create_task(served.http.post(COMPLETE, json=BODY))
        await until_open(served.engines["E0"])
        await asyncio.wait_for(served.gateway.stop(0.1), 2)
        with pytest.raises(aiohttp.ClientConnectionError):
            await asking
        await served.nothing_left()


async def test_an_idle_server_stops_at_once(serve):
    async with serve("1") as served:
        async with served.http.get("/health") as response:
            assert response.status == 200
        await asyncio.wait_for(served.gateway.stop(10), 0.5)


async def test_draining_lets_nothing_in(serve):
    async with serve("1") as served:
        served.engines["E0"].default.token_s = 0.02
        task = asyncio.create_task(served.texts(BODY))
        await asyncio.sleep(0.01)
        draining = asyncio.create_task(served.router.drain())
        await asyncio.sleep(0)
        async with served.http.post(COMPLETE, json=BODY) as response:
            assert response.status == 503
        async with served.http.get("/ready") as response:
            assert response.status == 503
        assert await draining is True
        assert len(await task) == 7


async def test_leaving_a_stream_from_python(serve):
    async with serve("1P1D") as served:
        served.engines["D1"].plan(START, token_s=0.05, tokens=100)
        async with served.router.stream(BODY) as stream:
            async for _ in stream:
                break
        assert stream.trace.state == "cancelled"
        await served.nothing_left()
        stream = served.router.stream(BODY)  # never read, and left
        await stream.aclose()
        await served.nothing_left()
