"""Fault x moment x policy: what the client gets, and nothing left over."""

import json

import pytest

PREP, SEND, START = "/microserving/prep_recv", "/microserving/remote_send", "/microserving/start_generate"
COMPLETE = "/v1/completions"
BODY = {"prompt": "a b c d", "max_tokens": 6, "stream_options": {"include_usage": True}}
WHOLE = "t4 t5 t6 t7 t8 t9 "

ITERATING = """
async def route(request, engines):
    decode = engines.decode.least_loaded()
    kv = await decode.prep_recv(request, end=-1)
    await engines.prefill.least_loaded().remote_send(request, kv)
    async for chunk in decode.start_generate(request, begin=kv.end):
        len(chunk.text)
        yield chunk
"""

# (policy, faulty engine, its call), then the fault: all of these are got over.
MOMENTS = [
    ("round-robin", "P0", COMPLETE),
    ("disagg", "D1", PREP),
    ("disagg", "P0", SEND),
    ("disagg", "D1", START),
    (ITERATING, "D1", START),
]
BEFORE = [{"close": True}, {"status": 500}, {"status": 503}, {"body": b"nonsense"}]
MIDST = [{"die_after": 0}, {"die_after": 1}, {"die_after": 5}, {"end_after": 3}, {"error_after": 2},
         {"preempt_after": 0}, {"preempt_after": 3}]  # fmt: skip
STREAMS = [moment for moment in MOMENTS if moment[2] in (COMPLETE, START)]
CASES = [(*moment, fault) for moment in MOMENTS for fault in BEFORE]
CASES += [(*moment, fault) for moment in STREAMS for fault in MIDST]


async def ask(served, **more) -> tuple[int, str, dict | None, list[dict]]:
    """Status, text, usage and the events of one streamed completion over HTTP."""
    async with served.http.post("/v1/completions", json=BODY | {"stream": True} | more) as response:
        if response.content_type != "text/event-stream":
            return response.status, "", await response.json(), []
        lines = (await response.read()).decode().split("\n\n")
    assert lines[-2:] == ["data: [DONE]", ""]
    events = [json.loads(line.removeprefix("data: ")) for line in lines[:-2]]
    text = "".join(choice["text"] for event in events for choice in event.get("choices", ()))
    return 200, text, next((e["usage"] for e in events if e.get("usage")), None), events


@pytest.mark.parametrize(("policy", "engine", "call", "fault"), CASES)
async def test_another_attempt_gives_the_same_answer(serve, policy, engine, call, fault):
    async with serve("2P2D") as served:
        served.use(policy)
        names = {"P0": ["P0", "P1"], "D1": ["D2", "D3"]}[engine]
        served.engines[names[0]].plan(call, **fault)
        status, text, usage, events = await ask(served)
        assert (status, text) == (200, WHOLE)
        assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 6, 10)
        assert len({event["id"] for event in events}) == 1
        assert [e["choices"][0]["finish_reason"] for e in events if e["choices"]][-1] == "length"
        trace = served.router.telemetry.finished[-1]
        assert (trace.state, trace.resumed, trace.completion_tokens) == ("finished", 1, 6)
        assert (await served.client.completions.create(model="m", prompt="a b", max_tokens=1)).choices[
            0
        ].text == "t2 "


@pytest.mark.parametrize(("policy", "engine", "call"), MOMENTS)
@pytest.mark.parametrize("status", [400, 404, 422, 429])
async def test_what_the_engine_refuses_is_not_tried_again(serve, policy, engine, call, status):
    async with serve("1P1D") as served:
        served.use(policy)
        told = {"error": {"message": f"no, {status}", "type": "x", "param": None, "code": None}}
        served.engines[engine].plan(call, status=status, body=json.dumps(told).encode())
        assert await ask(served) == (status, "", told, [])
        assert len(served.engines[engine].told(call)) == 1


async def test_back_pressure_reaches_the_client(serve):
    async with serve("1") as served:
        served.engines["E0"].plan(COMPLETE, status=429, retry_after="7")
        async with served.http.post("/v1/completions", json=BODY) as response:
            assert (response.status, response.headers["retry-after"]) == (429, "7")


@pytest.mark.parametrize(("policy", "engine", "call"), MOMENTS)
async def test_attempts_are_bounded(serve, policy, engine, call):
    async with serve("1P1D", resume_limit=2) as served:
        served.use(policy)
        for name in served.engines:
            for _ in range(3):
                served.engines[name].plan(call, close=True)
        status, _, body, _ = await ask(served)
        assert status == 502
        assert "closed the connection" in body["error"]["message"]
        served.engines["P0"].plans.clear()
        served.engines["D1"].plans.clear()
        assert (await ask(served))[1] == WHOLE


@pytest.mark.parametrize(("policy", "engine", "call"), STREAMS)
async def test_a_failure_in_mid_stream_ends_with_an_error_event(serve, policy, engine, call):
    async with serve("1P1D", resume_limit=0) as served:
        served.use(policy)
        served.engines[engine].plan(call, die_after=3)
        status, text, _, events = await ask(served)
        assert (status, text) == (200, "t4 t5 t6 ")
        assert f"{engine} closed the connection" in events[-1]["error"]["message"]


@pytest.mark.parametrize(("policy", "engine", "call"), MOMENTS)
async def test_silence_has_a_deadline_and_goes_on_elsewhere(serve, policy, engine, call):
    async with serve("3P3D", endpoint={"transfer_s": 0.2, "idle_s": 0.2}) as served:
        served.use(policy)
        served.engines[engine.replace("D1", "D3")].plan(call, silent=True)
        assert (await ask(served))[1] == WHOLE
        if call in (START, COMPLETE):
            for name in ("P0", "P1", "P2", "D3", "D4"):
                served.engines[name].plan(call, silent_after=1)
            assert (await ask(served))[1] == WHOLE


@pytest.mark.parametrize("cut", [1, 2, 3, 7])
@pytest.mark.parametrize("newline", ["\n", "\r\n", "\r"])
@pytest.mark.parametrize("policy", ["round-robin", ITERATING])
async def test_bytes_cut_anywhere_in_any_dialect(serve, policy, cut, newline):
    async with serve("1P1D") as served:
        served.use(policy)
        for engine in served.engines.values():
            engine.default.cut, engine.default.newline, engine.default.comments = cut, newline, True
        assert (await ask(served))[1] == WHOLE


async def test_bytes_that_are_no_http(serve):
    async with serve("2") as served:
        engine = served.engines["E0"]

        async def nonsense(writer, path, body, plan):
            writer.write(b"SSH-2.0-OpenSSH\r\n\r\n")

        engine._work = nonsense
        assert (await ask(served))[1] == WHOLE
        assert (
            served.router.telemetry.finished[-1]
            .calls[0]
            .error.startswith("E0 answered with bytes that are no HTTP")
        )


@pytest.mark.parametrize("kind", ["cpu", "attach"])
async def test_reserved_kv_is_told_to_be_freed_where_the_engine_knows_how(serve, kind):
    async with serve("1P1D", kind=kind, resume_limit=0) as served:
        served.engines["P0"].plan(SEND, status=500)
        assert (await ask(served))[0] == 502
        if kind == "cpu":
            await served.nothing_left()
            [told] = served.engines["D1"].told("/microserving/abort")
            assert told["user"] == served.engines["D1"].told(PREP)[0]["user"]
            # The sender may still be writing: it is told first.
            assert served.engines["P0"].told("/microserving/abort") == [told]
        else:
            assert served.engines["D1"].told("/microserving/abort") == []
            served.engines["D1"].reserved.clear()


async def test_an_engine_that_is_not_available_is_not_chosen(serve):
    async with serve("1P2D") as served:
        served.router.endpoints[1].available = False
        for _ in range(4):
            await ask(served)
        assert served.engines["D1"].calls == []
        served.router.endpoints[2].available = False
        status, _, body, _ = await ask(served)
        assert status == 503
        assert body["error"]["message"] == "No decode engine is ready."
