"""Two real engines: KV travels from one to the other, and the text is the text of one engine."""

import asyncio
import random
import signal
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest

pytestmark = pytest.mark.engine
GREEDY = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
BYTES_PER_TOKEN = 30 * 3 * 64 * 2 * 4  # layers, KV heads, head size, K and V, float32


def prompt_of(length: int, salt: int) -> list[int]:
    """Token ids that no other test has put into a prefix cache."""
    return [1000 + (salt * 7919 + i * 31 + i * i * salt) % 40000 for i in range(length)]


class Client:
    """A client of one engine."""

    def __init__(self, session: aiohttp.ClientSession) -> None:
        self.session = session

    async def post(self, path: str, **body: Any) -> tuple[int, dict]:
        async with self.session.post(path, json=body) as answer:
            return answer.status, await answer.json()

    async def metrics(self) -> dict[str, float]:
        async with self.session.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("mlcrouter_engine_"): float(value) for name, value in pairs}

    async def greedy(self, prompt: Any) -> str:
        status, content = await self.post("/v1/completions", prompt=prompt, **GREEDY)
        assert status == 200, content
        return content["choices"][0]["text"]

    async def rests(self) -> None:
        """Wait until every page is free or in the prefix cache."""
        async with asyncio.timeout(10):
            while True:
                numbers = await self.metrics()
                held = numbers["kv_pages_total"] - numbers["kv_pages_free"] - numbers["kv_pages_cached"]
                if held == numbers["requests_running"] == numbers["requests_waiting"] == 0:
                    return
                await asyncio.sleep(0.05)


class Pair:
    """The prefill engine and the decode engine."""

    def __init__(self, prefill: Client, decode: Client, engines: list) -> None:
        self.prefill, self.decode, self.engines = prefill, decode, engines

    async def answer(self, prompt: Any, length: int, end: int, user: str, **options: Any) -> dict:
        body = {**GREEDY, **options, "prompt": prompt, "user": user}
        status, kv = await self.decode.post("/microserving/prep_recv", end=end, **body)
        assert status == 200, kv
        end = end + length if end < 0 else end
        begin = kv["prefix_matched_length"]
        if begin < end:
            where = {"kv_addr_info": kv["kv_append_metadata"], "recv_rank": 1, "begin": begin, "end": end}
            assert await self.prefill.post("/microserving/remote_send", **body, **where) == (200, {})
        status, content = await self.decode.post("/microserving/start_generate", begin=end, **body)
        assert status == 200, content
        return content


@pytest.fixture
async def pair(engine_pair: list) -> AsyncIterator[Pair]:
    timeout = aiohttp.ClientTimeout(60)
    async with (
        aiohttp.ClientSession(engine_pair[0].url, timeout=timeout) as prefill,
        aiohttp.ClientSession(engine_pair[1].url, timeout=timeout) as decode,
    ):
        yield Pair(Client(prefill), Client(decode), engine_pair)


@pytest.mark.parametrize("factor", [0, 0.1, 0.5, 0.9, 1])
@pytest.mark.parametrize("length", [1, 2, 16, 17, 900])
async def test_disagg_says_what_one_engine_says(pair: Pair, length: int, factor: float) -> None:
    prompt = prompt_of(length, salt=3 + int(factor * 10))
    end = -1 if factor == 0 else int((1 - factor) * length)
    window = end + length if end < 0 else end
    before = await pair.prefill.metrics(), await pair.decode.metrics()
    cold = await pair.answer(prompt, length, end, f"cold {length} {factor}")
    after = await pair.prefill.metrics(), await pair.decode.metrics()
    if length > 1:  # one token alone may be in the cache from another test
        matched = cold["usage"]["prompt_tokens_details"]["cached_tokens"]
        put = 'put_bytes_total{peer="1"}'
        assert after[0].get(put, 0) - before[0].get(put, 0) == (window - matched) * BYTES_PER_TOKEN
        assert after[1]["prefill_tokens_total"] - before[1]["prefill_tokens_total"] == length - window
        assert cold["usage"]["extra"]["prefill_tokens"] == length - window
    warm = await pair.answer(prompt, length, end, f"warm {length} {factor}")
    assert warm["usage"]["prompt_tokens_details"]["cached_tokens"] == window
    again = await pair.decode.greedy(prompt)  # on KV that came from afar
    alone = await pair.prefill.greedy(prompt)
    assert {answer["choices"][0]["text"] for answer in (cold, warm)} == {again} == {alone}


async def test_a_prefill_engine_sends_what_it_had_cached(pair: Pair, spawn_engine: Any) -> None:
    prompt = prompt_of(300, 77)
    await pair.prefill.post("/v1/completions", prompt=prompt[:200], max_tokens=1)
    before = await pair.prefill.metrics()
    answer = await pair.answer(prompt, 300, -1, "cached on P")
    after = await pair.prefill.metrics()
    assert after["prefill_tokens_total"] - before["prefill_tokens_total"] == 99
    put = 'put_bytes_total{peer="1"}'
    assert after[put] - before.get(put, 0) == 299 * BYTES_PER_TOKEN
    assert answer["choices"][0]["text"] == await pair.prefill.greedy(prompt)


async def test_sampling_with_a_seed_is_the_same_through_disagg(pair: Pair) -> None:
    prompt, options = prompt_of(60, 5), {"temperature": 1.0, "top_p": 0.9, "seed": 11, "max_tokens": 16}
    through = await pair.answer(prompt, 60, -1, "seeded", **options)
    _, alone = await pair.prefill.post("/v1/completions", prompt=prompt, ignore_eos=True, **options)
    assert through["choices"][0]["text"] == alone["choices"][0]["text"]


async def test_a_stopped_prefill_engine_means_no_kv(pair: Pair) -> None:
    prompt = prompt_of(100, 21)
    body = {**GREEDY, "prompt": prompt, "user": "stopped"}
    _, kv = await pair.decode.post("/microserving/prep_recv", end=-1, **body)
    pair.engines[0].process.send_signal(signal.SIGSTOP)
    try:
        where = {"begin": 0, "end": 99, "kv_addr_info": kv["kv_append_metadata"], "recv_rank": 1}
        send = asyncio.create_task(pair.prefill.post("/microserving/remote_send", **body, **where))
        done, _ = await asyncio.wait({send}, timeout=1.0)
        assert not done
    finally:
        pair.engines[0].process.send_signal(signal.SIGCONT)
    assert await send == (200, {})
    _, content = await pair.decode.post("/microserving/start_generate", begin=99, **body)
    assert content["choices"][0]["text"] == await pair.prefill.greedy(prompt)


async def test_a_start_before_the_kv_has_come_is_refused(pair: Pair) -> None:
    prompt = prompt_of(100, 24)
    body = {**GREEDY, "prompt": prompt, "user": "early"}
    _, kv = await pair.decode.post("/microserving/prep_recv", end=-1, **body)
    status, content = await pair.decode.post("/microserving/start_generate", begin=99, **body)
    assert (status, content["error"]["code"]) == (400, "kv_missing"), content
    where = {"begin": 0, "end": 99, "kv_addr_info": kv["kv_append_metadata"], "recv_rank": 1}
    assert await pair.prefill.post("/microserving/remote_send", **body, **where) == (200, {})
    _, content = await pair.decode.post("/microserving/start_generate", begin=99, **body)
    assert content["choices"][0]["text"] == await pair.prefill.greedy(prompt)


async def test_a_stopped_engine_writes_nothing_for_clients_that_left_meanwhile(pair: Pair) -> None:
    body = {**GREEDY, "prompt": prompt_of(100, 22), "user": "left"}
    _, kv = await pair.decode.post("/microserving/prep_recv", end=-1, **body)
    where = {"begin": 0, "end": 99, "kv_addr_info": kv["kv_append_metadata"], "recv_rank": 1}
    before = await pair.prefill.metrics()
    pair.engines[0].process.send_signal(signal.SIGSTOP)
    try:
        for number in range(5):
            with pytest.raises(TimeoutError):
                async with asyncio.timeout(0.2):
                    await pair.prefill.post(
                        "/microserving/remote_send", **{**body, "user": str(number)}, **where
                    )
    finally:
        pair.engines[0].process.send_signal(signal.SIGCONT)
    await pair.decode.post("/microserving/abort", user="left")
    await pair.prefill.greedy(prompt_of(30, 23))
    await pair.prefill.rests()
    put = 'put_bytes_total{peer="1"}'
    assert (await pair.prefill.metrics()).get(put, 0) == before.get(put, 0)


async def test_slots_outside_the_peer_s_pages_are_refused(pair: Pair) -> None:
    from mlcrouter_nb.protocol.microserving import encode_kv_metadata

    where = {"begin": 0, "end": 19, "kv_addr_info": encode_kv_metadata([1, 10**6, 19]), "recv_rank": 1}
    body = {"prompt": prompt_of(20, 4), "user": "far"}
    status, content = await pair.prefill.post("/microserving/remote_send", **body, **where)
    assert 400 <= status <= 500 and "slots" in content["error"]["message"]
    await pair.prefill.rests()


async def test_many_requests_with_clients_that_leave(pair: Pair) -> None:
    chance = random.Random(8)

    async def one(number: int) -> str:
        prompt = prompt_of(chance.randrange(2, 200), number % 9)
        patience = chance.uniform(0.0, 1.0) if number % 3 == 0 else None
        user = f"many {number}"
        try:
            async with asyncio.timeout(patience):
                await pair.answer(prompt, len(prompt), -1, user, max_tokens=1 + number % 12)
                return "done"
        except TimeoutError:
            for engine in (pair.prefill, pair.decode):  # the prefill engine first: it must write no more
                assert await engine.post("/microserving/abort", user=user) == (200, {})
            return "left"

    gate = asyncio.Semaphore(16)

    async def limited(number: int) -> str:
        async with gate:
            return await one(number)

    outcomes = await asyncio.gather(*(limited(number) for number in range(60)))
    assert {outcome for i, outcome in enumerate(outcomes) if i % 3} == {"done"}
    await pair.prefill.rests()
    await pair.decode.rests()
    prompt = prompt_of(50, 30)
    assert (await pair.answer(prompt, 50, -1, "after"))["choices"][0]["text"] == await pair.prefill.greedy(
        prompt
    )


async def test_a_batch_of_disaggregated_requests_says_the_same(pair: Pair) -> None:
    prompts = [prompt_of(40 + 13 * i, 50 + i) for i in range(8)]
    answers = await asyncio.gather(
        *(pair.answer(prompt, len(prompt), -1, f"batch {i}") for i, prompt in enumerate(prompts))
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["choices"][0]["text"] == await pair.prefill.greedy(prompt)


async def test_chat_over_the_openai_client(pair: Pair) -> None:
    openai = pytest.importorskip("openai")
    question = {
        "model": "smollm2-135m",
        "messages": [{"role": "user", "content": "Why is the sky blue?"}],
        "max_tokens": 24,
        "temperature": 0,
    }
    async with openai.AsyncOpenAI(base_url=f"{pair.engines[1].url}/v1", api_key="none") as client:
        whole = await client.chat.completions.create(**question)
        stream = await client.chat.completions.create(
            **question, stream=True, stream_options={"include_usage": True}
        )
        chunks = [chunk async for chunk in stream]
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks[:-1])
    assert text == whole.choices[0].message.content and "sky" in text
    assert chunks[-1].usage.prompt_tokens == whole.usage.prompt_tokens > 30 and not chunks[-1].choices


async def test_a_prompt_longer_than_the_context_and_one_that_just_fits(pair: Pair) -> None:
    status, content = await pair.decode.post("/v1/completions", prompt=[5] * 8192, max_tokens=1)
    assert status == 400 and content["error"]["code"] == "context_length_exceeded"
