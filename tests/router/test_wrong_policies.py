"""A policy that is wrong fails its own request with the user's line, frees everything, and the next request works."""

import asyncio
import gc
import warnings

import pytest

from mlcrouter_nb.protocol.errors import PolicyError

BODY = {"prompt": "a b c", "max_tokens": 3}
HEAD = "async def route(request, engines):\n    decode = engines.decode.least_loaded()\n"


@pytest.mark.parametrize(
    ("code", "says", "line"),
    [
        ("    raise ValueError('my own')\n", "ValueError: my own", 3),
        ("    return helper(0)\n\n\ndef helper(n):\n    return 1 / n\n", "ZeroDivisionError", 7),
        ("    kv = await decode.prep_recv(request, end=-1)\n    raise KeyError('lost')\n", "KeyError: 'lost'", 4),
        ("    decode.complete(request)\n", "returned nothing; return a stream", None),
        ("    return 7\n", "returned a value of type int", None),
        ("    return [decode.complete(request)]\n", "returned a value of type list", None),
        ("    await asyncio.sleep(3600)\n", "did nothing for 0.3 s", 3),
        ("    await helper()\n\n\nasync def helper():\n    await asyncio.Event().wait()\n", "did nothing for 0.3 s", 7),
        ("    kv = await decode.prep_recv(request)\n    await asyncio.sleep(3600)\n", "did nothing for 0.3 s", 4),
        ("    if False:\n        yield\n", "gave the client nothing", None),
        ("    yield 7\n", "yielded a value of type int", None),
        ("    yield None\n", "yielded nothing", None),
        ("    yield decode.complete(request)\n    raise ValueError('late')\n", "ValueError: late", 4),
        ("    async for chunk in decode.complete(request):\n        yield chunk.txt\n", "AttributeError", 4),
        ("    async for chunk in decode.complete(request):\n        yield chunk\n        await asyncio.sleep(3600)\n",
         "did nothing for 0.3 s", 5),
        ("    await decode.prep_recv(request)\n    await decode.prep_recv(request)\n", "called twice on D1", 4),
        ("    stream = decode.complete(request)\n    yield stream\n    yield stream\n", "already read", None),
        ("    async for chunk in decode.complete(request):\n        chunk.text = 5\n        yield chunk\n", "is a str", 4),
        ("    async for chunk in decode.complete(request):\n        chunk.text = chr(0xD800)\n        yield chunk\n",
         "UnicodeEncodeError", 4),
        ("    async with asyncio.timeout(0.01):\n        await asyncio.sleep(1)\n", "TimeoutError", 3),
        ("    raise asyncio.CancelledError\n", "CancelledError", 3),
        ("    kv = await decode.prep_recv(request, end=4 / 2)\n", "end=2.0 must be a whole number; write // instead", 3),
        ("    kv = await decode.prep_recv(request)\n    await engines.prefill[0].remote_send(request, kv, begin=0 / 1)\n",
         "begin=0.0 must be a whole number; write //", 4),
        ("    kv = await decode.prep_recv(request)\n    return decode.start_generate(request, begin='2')\n",
         "begin='2' must be a whole number.", 4),
        ("    raise SystemExit(3)\n", "SystemExit: 3", 3),
        ("    raise KeyboardInterrupt\n", "KeyboardInterrupt", 3),
    ],
)  # fmt: skip
@pytest.mark.parametrize("stream", [True, False])
async def test_it_fails_its_own_request_only(serve, code, says, line, stream):
    async with serve("1P1D", stall_s=0.3) as served:
        served.use(HEAD + code)
        async with served.http.post("/v1/completions", json=BODY | {"stream": stream}) as response:
            text = await response.text()
            begun = response.content_type == "text/event-stream"
            assert response.status == (200 if begun else 500)
        assert says.replace('"', '\\"') in text
        assert "policy_error" in text
        if begun:
            assert text.endswith("data: [DONE]\n\n")
        if line is not None:
            assert f"cell [7], line {line}:" in text
            assert (HEAD + code).splitlines()[line - 1].strip().split("'")[0] in text
        await served.nothing_left()
        served.use("disagg")
        assert await served.texts(BODY) == ["t3 ", "t4 ", "t5 ", ""]


async def test_a_policy_that_swallows_its_cancellation_holds_nothing(serve):
    source = (
        HEAD
        + """
    kv = await decode.prep_recv(request)
    try:
        await asyncio.sleep(3600)
    except BaseException:
        pass
    return decode.start_generate(request, begin=kv.end)
"""
    )
    async with serve("1P1D") as served:
        served.use(source)
        async with served.router.stream(BODY):
            await asyncio.sleep(0.1)
            assert served.router.endpoints[1].in_flight == 1
        await served.nothing_left()
        assert served.router.telemetry.finished[-1].state == "cancelled"


async def test_a_policy_whose_clean_up_sleeps_is_left_behind(serve, monkeypatch):
    monkeypatch.setattr("mlcrouter_nb.router.dispatch.CLOSE_S", 0.1)
    source = (
        HEAD
        + "    try:\n        yield decode.complete(request)\n    finally:\n        await asyncio.sleep(3600)\n"
    )
    async with serve("1P1D", stall_s=0.3) as served:
        served.use(source)
        served.engines["D1"].plan("/v1/completions", token_s=0.05)
        async with served.router.stream(BODY) as stream:
            async for _ in stream:
                break
        await served.nothing_left()


async def test_a_policy_may_stop_early_edit_and_mix(serve):
    source = """
async def route(request, engines):
    count = 0
    async for chunk in engines.decode.least_loaded().complete(request):
        chunk.text = chunk.text.upper()
        yield chunk
        count += 1
        if count == 2:
            break
    yield engines.prefill[0].complete(request)
"""
    async with serve("1P1D") as served:
        served.use(source)
        answer = await served.client.completions.create(model="m", prompt="a b c", max_tokens=3)
        assert answer.choices[0].text == "T3 T4 t3 t4 t5 "
        served.use(source[: source.index("    yield engines.prefill")], "early")
        stream = await served.client.completions.create(model="m", prompt="a b c", max_tokens=3, stream=True)
        chunks = [chunk async for chunk in stream]
        assert "".join(chunk.choices[0].text for chunk in chunks) == "T3 T4 "
        assert [chunk.choices[0].finish_reason for chunk in chunks] == [None, None, "stop"]
        assert len({chunk.id for chunk in chunks}) == 1


async def test_a_policy_may_catch_an_engines_failure(serve):
    source = """
async def route(request, engines):
    try:
        async for chunk in engines.prefill[0].complete(request):
            yield chunk
    except Exception as error:
        yield engines.decode[0].complete(request)
"""
    async with serve("1P1D") as served:
        served.use(source)
        served.engines["P0"].plan("/v1/completions", status=500)
        assert await served.texts(BODY) == ["t3 ", "t4 ", "t5 ", ""]
        assert served.router.telemetry.finished[-1].resumed == 0


async def test_requests_in_flight_finish_under_the_old_policy_and_values(serve):
    source = """
n = slider(0, 9, value=1)
async def route(request, engines):
    async for chunk in engines.all[0].complete(request):
        chunk.text = f"{n}"
        yield chunk
"""
    async with serve("1") as served:
        served.use(source)
        served.engines["E0"].plan("/v1/completions", token_s=0.03)
        async with served.router.stream(BODY) as stream:
            chunks = aiter(stream)
            seen = [(await anext(chunks)).text]
            served.router.set(n=2)
            assert served.router.telemetry.snapshot().policy.parameters[0].value == 2
            assert served.router.telemetry.snapshot().policy.parameters[0].last_used == 1
            served.router.use("round-robin")
            seen += [chunk.text async for chunk in chunks]
            assert set(seen) == {"1"}
        served.router.use("mine")
        assert set(await served.texts(BODY)) == {"2"}


async def test_a_policy_for_one_request(serve):
    async with serve("1P1D") as served:
        assert served.router.policy.name == "disagg"
        async with served.router.stream(BODY, policy="round-robin") as stream:
            assert [chunk.text async for chunk in stream] == ["t3 ", "t4 ", "t5 ", ""]
            assert stream.trace.policy == "round-robin"
        assert served.router.policy.name == "disagg"


async def test_errors_reach_python_as_they_are(serve):
    async with serve("1P1D") as served:
        served.use(HEAD + "    raise ValueError('my own')\n")
        with pytest.raises(PolicyError) as caught:
            await served.texts(BODY)
        assert (caught.value.policy, caught.value.line) == ("mine", 3)
        assert caught.value.source_line == "raise ValueError('my own')"
        assert isinstance(caught.value.__cause__, ValueError)


async def test_a_verb_that_is_never_awaited_ends_with_its_request(serve):
    source = """
async def route(request, engines):
    kvs = [decode.prep_recv(request) for decode in engines.decode]
    return kvs[0].end
"""
    async with serve("1P1D") as served:
        served.use(source)
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            with pytest.raises(PolicyError, match="no attribute 'end'"):
                await served.texts(BODY)
            gc.collect()
        assert [str(warning.message) for warning in warned] == []


async def test_verbs_may_run_as_tasks(serve):
    source = """
async def route(request, engines):
    task = asyncio.create_task(engines.decode[0].prep_recv(request))
    kv = await task
    await asyncio.gather(engines.prefill[0].remote_send(request, kv))
    return engines.decode[0].start_generate(request, begin=kv.end)
"""
    async with serve("1P1D") as served:
        served.use(source)
        assert await served.texts(BODY) == ["t3 ", "t4 ", "t5 ", ""]
