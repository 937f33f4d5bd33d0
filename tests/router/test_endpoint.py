import asyncio
import json
import time

import pytest
from scripted_engine import WordTokenizer

from mlcrouter_nb.engine.scheduler import RECEIVE_DEADLINE_S
from mlcrouter_nb.protocol.errors import ArgumentError, EngineError, PolicyError, RequestError
from mlcrouter_nb.router.aborting import ABORT_S
from mlcrouter_nb.router.endpoint import LONGEST_QUEUE_S, Endpoint
from mlcrouter_nb.router.prompts import LONG_TEXT

PREP, SEND, START = "/microserving/prep_recv", "/microserving/remote_send", "/microserving/start_generate"
BODY = {"prompt": "a b c d e f g h i j", "max_tokens": 3}
TEXTS = ["t10 ", "t11 ", "t12 ", ""]


@pytest.mark.parametrize(("factor", "end"), [(0.0, -1), (0.1, 9), (0.5, 5), (0.9, 0), (1.0, 0)])
async def test_the_three_calls_as_mlc_wants_them(serve, factor, end):
    if factor == 0.9:
        end = int((1 - 0.9) * 10)  # as the definition rounds
    async with serve("1P1D") as served:
        served.use("disagg", pd_balance_factor=factor)
        assert await served.texts(BODY | {"user": "somebody", "temperature": 0.5, "seed": 3}) == TEXTS
        prefill, decode = served.engines["P0"], served.engines["D1"]
        [prep] = decode.told(PREP)
        [start] = decode.told(START)
        stop = end if end >= 0 else 9
        assert prep["end"] == end
        assert start["begin"] == stop
        sends = prefill.told(SEND)
        assert len(sends) == (1 if stop else 0)
        for send in sends:
            assert (send["begin"], send["end"], send["recv_rank"], send["n"]) == (0, stop, 1, 1)
            assert send["kv_addr_info"]
        for call in (prep, start, *sends):
            assert call["prompt"] == list(range(10))
            assert call["user"] == prep["user"] != "somebody"
            assert call["debug_config"] is not None
            assert (call["temperature"], call["seed"], call["max_tokens"]) == (0.5, 3, 3)


async def test_ids_are_unique_for_ever(serve):
    async with serve("1P1D") as served:
        for _ in range(5):
            await served.texts(BODY)
        users = [call["user"] for call in served.engines["D1"].told(PREP)]
        assert len(set(users)) == 5


@pytest.mark.parametrize(("matched", "window"), [(4, (4, 5)), (5, None), (8, None)])
async def test_what_the_decode_engine_holds_is_not_sent(serve, matched, window):
    async with serve("1P1D") as served:
        served.engines["D1"].matched = matched
        served.use("disagg", pd_balance_factor=0.5)
        assert await served.texts(BODY) == TEXTS
        sends = served.engines["P0"].told(SEND)
        assert [(send["begin"], send["end"]) for send in sends] == ([window] if window else [])
        assert served.engines["D1"].told(START)[0]["begin"] == max(5, matched)
        assert served.router.telemetry.finished[0].cached_tokens == matched


async def test_a_prompt_of_one_token(serve):
    async with serve("1P1D") as served:
        assert await served.texts({"prompt": "a", "max_tokens": 1}) == ["t1 ", ""]
        assert served.engines["P0"].told(SEND) == []
        assert served.engines["D1"].told(START)[0]["begin"] == 0


POLICY = """
async def route(request, engines):
    prefill, decode = engines.prefill[0], engines.decode[0]
    {}
"""


@pytest.mark.parametrize(
    ("body", "says"),
    [
        ("kv = await decode.prep_recv(request, end=10)", "end=10 is outside the prompt"),
        ("kv = await decode.prep_recv(request, end=-11)", "end=-11 is outside the prompt"),
        ("return decode.start_generate(request, begin=3)", "needs an earlier prep_recv on D1"),
        ("await decode.prep_recv(request); await decode.prep_recv(request)", "prep_recv was called twice on D1"),
        ("kv = await decode.prep_recv(request); await prefill.remote_send(request, kv, end=4)", r"the window \[0, 4\)"),
        ("kv = await decode.prep_recv(request); await decode.remote_send(request, kv)", "cannot send KV to itself"),
        ("kv = await decode.prep_recv(request, end=3); return decode.start_generate(request, begin=5)", "leaves a gap"),
        ("kv = await decode.prep_recv(request, end=0); s = decode.start_generate(request, begin=0); "
         "return decode.start_generate(request, begin=0)", "start_generate was called twice on D1"),
        ("s = decode.complete(request); s2 = [c async for c in s]; return s", "was already read"),
        ("return engines.decode.least_loaded(by='tokens').complete(request)", "it knows 'in_flight'"),
        ("return engines['D7'].complete(request)", "no engine 'D7' that is ready; there are: P0, D1"),
    ],
)  # fmt: skip
async def test_calls_that_would_harm_an_engine_are_refused_with_the_users_line(serve, body, says):
    async with serve("1P1D") as served:
        served.use(POLICY.format(body))
        with pytest.raises(PolicyError, match=says) as caught:
            await served.texts(BODY)
        if "already read" not in says:  # that one shows when the router reads the stream
            assert caught.value.line == 4
        served.use("disagg")
        assert await served.texts(BODY) == TEXTS


@pytest.mark.parametrize(
    "answer",
    [b"no json", b"[]", b"{}", b'{"kv_append_metadata": "x", "prefix_matched_length": -1}',
     b'{"kv_append_metadata": "x", "prefix_matched_length": 10}',
     b'{"kv_append_metadata": "BwAAAAAAAABbMSwwLDdd", "prefix_matched_length": 0}'],
)  # fmt: skip
async def test_a_wrong_reservation_is_not_passed_on(serve, answer):
    async with serve("1P1D", resume_limit=0) as served:
        served.engines["D1"].plan(PREP, body=answer)
        with pytest.raises(EngineError, match="D1 answered prep_recv with something"):
            await served.texts(BODY)
        assert served.engines["P0"].told(SEND) == []


async def test_load_is_counted_where_it_is_spent(serve):
    async with serve("1P1D") as served:
        prefill, decode = served.router.endpoints
        served.use("disagg", pd_balance_factor=0.2)
        served.engines["P0"].plan(SEND, wait=0.2)
        served.engines["D1"].plan(START, token_s=0.1)

        def load():
            return (prefill.in_flight, prefill.waiting_tokens, decode.in_flight, decode.waiting_tokens)

        async with served.router.stream(BODY) as stream:
            await asyncio.sleep(0.1)
            assert load() == (1, 8, 1, 2)  # the prefill runs; what is left for the decode engine waits there
            chunks = aiter(stream)
            await anext(chunks)
            assert load() == (0, 0, 1, 0)
            view = {engine.name: engine for engine in served.router.telemetry.snapshot().engines}
            assert (view["P0"].in_flight, view["D1"].in_flight, view["D1"].waiting_tokens) == (0, 1, 0)
            async for _ in chunks:
                pass
        assert load() == (0, 0, 0, 0)


async def test_connections_are_pooled(serve):
    async with serve("1") as served:
        for _ in range(10):
            await served.texts(BODY)
        assert served.engines["E0"].connections == 1


async def test_a_connection_that_the_engine_has_closed_is_not_used_again(serve):
    async with serve("1", resume_limit=0) as served:
        engine = served.engines["E0"]
        for _ in range(3):
            engine.plan("/v1/completions", end_after=3, tokens=4)
            with pytest.raises(EngineError, match="ended too early"):
                await served.texts(BODY)
            await served.texts(BODY)


async def test_deadlines_name_the_engine(serve):
    async with serve("1P1D", endpoint={"transfer_s": 0.25, "idle_s": 0.3}) as served:
        served.engines["P0"].plan(SEND, silent=True)
        with pytest.raises(EngineError, match=r"P0 did not answer remote_send within 0\.25 s"):
            await served.texts(BODY)
        served.engines["D1"].plan(START, silent=True)
        with pytest.raises(EngineError, match=r"D1 sent nothing for 0\.3 s"):
            await served.texts(BODY)
        assert await served.texts(BODY) == TEXTS


async def test_a_queue_is_no_silence(serve):
    options = {"transfer_s": 0.2, "idle_s": 0.2}
    async with serve("1P1D", endpoint=options, stall_s=0.3) as served:
        body = BODY | {"prompt": " ".join(map(str, range(60)))}  # 1.2 s at 50 tokens a second
        for engine, path in (("D1", PREP), ("P0", SEND), ("D1", START)):
            served.engines[engine].plan(path, wait=0.6)
            assert len(await served.texts(body)) == len(TEXTS)


def test_engines_keep_reserved_kv_for_longer_than_anybody_sends():
    assert RECEIVE_DEADLINE_S > LONGEST_QUEUE_S + ABORT_S
    assert Endpoint("P0", "http://127.0.0.1:1").transfer_s + ABORT_S < RECEIVE_DEADLINE_S


def test_a_wrong_address_is_refused():
    with pytest.raises(ArgumentError, match="'localhost:80' is no address"):
        Endpoint("E0", "localhost:80")


async def test_an_engine_that_cannot_be_reached(serve):
    async with serve("1", resume_limit=0) as served:
        served.router.endpoints[0]._pool.port = 9
        with pytest.raises(EngineError, match=r"E0 at http.* cannot be reached"):
            await served.texts(BODY)


async def test_attached_engines_need_no_tokenizer_until_a_policy_looks(serve):
    async with serve("2", kind="attach", tokenizer=None, chat=None, model=None) as served:
        body = {"prompt": "a b", "max_tokens": 2, "model": "their-model", "min_p": 0.1}
        assert await served.texts(body) == ["t2 ", "t3 ", ""]
        told = served.engines["E0"].told("/v1/completions")[0]
        assert {key: told[key] for key in body} == body
        served.use("async def route(request, engines):\n    return request.prompt\n")
        with pytest.raises(RequestError, match="--tokenizer PATH"):
            await served.texts(body)


async def test_plain_engines_cannot_disaggregate(serve):
    async with serve("1P1D", kind="attach") as served:
        served.engines["D1"].plan(PREP, status=404)
        with pytest.raises(EngineError, match=r"does not know prep_recv.*one-engine policy"):
            await served.texts(BODY)
        served.engines["D1"].reserved.clear()


class SlowTokenizer(WordTokenizer):
    """Takes its time, in any thread, and knows a bound without it."""

    def encode(self, text, *, special=True):
        if len(text) >= LONG_TEXT:
            time.sleep(0.5)
        return super().encode(text, special=special)

    def fewest_tokens(self, text):
        return len(text) // 100


async def test_a_long_prompt_does_not_hold_up_the_loop(serve):
    async with serve("1P1D", tokenizer=SlowTokenizer, context_length=1_000) as served:
        long = BODY | {"prompt": "a " * (LONG_TEXT // 2)}
        task = asyncio.ensure_future(served.texts(long))
        began = time.monotonic()
        while not task.done():
            await asyncio.sleep(0.01)
            assert time.monotonic() - began < 0.3
            began = time.monotonic()
        with pytest.raises(RequestError, match=f"has {LONG_TEXT // 2} tokens"):
            await task
        served.use("round-robin")
        await served.texts(long)  # what nobody looks at is not refused here
        served.use("disagg")
        began = time.monotonic()
        with pytest.raises(RequestError, match="has more than 2000 tokens"):
            await served.texts(BODY | {"prompt": "a " * 100_000})
        assert time.monotonic() - began < 0.3


DISAGG = """
async def route(request, engines):
    prefill, decode = engines.prefill[0], engines.decode[0]
    kv = await decode.prep_recv(request)
    await prefill.remote_send(request, kv)
    return decode.start_generate(request, begin=kv.end)
"""


@pytest.mark.parametrize(
    ("engine", "verb", "place"),
    [("D1", "prep_recv", ", line 4"), ("P0", "remote_send", ", line 5"), ("D1", "start_generate", "")],
)
async def test_a_refusal_is_told_in_the_engines_words_with_the_policys_line(serve, engine, verb, place):
    body = json.dumps({"error": {"message": "KV of 44 tokens does not fit"}}).encode()
    for name, starts in (
        ("mine", f"policy 'mine', cell [7]{place}: {engine} refused"),
        ("disagg", f"{engine} refused"),
    ):
        async with serve("1P1D") as served:
            served.use(DISAGG if name == "mine" else "disagg")
            served.engines[engine].plan(f"/microserving/{verb}", status=400, body=body)
            with pytest.raises(EngineError) as caught:
                await served.texts({"prompt": "a b c", "max_tokens": 2})
            told = str(caught.value)
            assert told.startswith(f"{starts} {verb}: KV of 44 tokens does not fit")
            assert "{" not in told
            assert (caught.value.engine, caught.value.status, caught.value.body) == (engine, 400, body)
            served.engines[engine].plan(f"/microserving/{verb}", status=400, body=body)
            async with served.http.post("/v1/completions", json={"prompt": "a b c"}) as response:
                assert (response.status, await response.json()) == (400, json.loads(body))
