import asyncio
import json
from typing import Any

import pytest

from mlcrouter_nb.engine import scheduler as scheduler_module
from mlcrouter_nb.protocol.microserving import decode_kv_metadata, encode_kv_metadata

from .conftest import ServedEngine, StartEngine
from .fake_runner import greedy_answer
from .test_server import rests, text_of

GREEDY = {"max_tokens": 6, "temperature": 0, "ignore_eos": True}


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 31 + i * 7 + i * i) % 90 for i in range(length)]


@pytest.fixture
async def pair(start_engine: StartEngine) -> tuple[ServedEngine, ServedEngine]:
    """A prefill engine (rank 0) and a decode engine (rank 1)."""
    return await start_engine(0), await start_engine(1)


async def prep_recv(engine: ServedEngine, **body: Any) -> tuple[str, int]:
    status, content = await engine.post("/microserving/prep_recv", **{**GREEDY, **body})
    assert status == 200, content
    return content["kv_append_metadata"], content["prefix_matched_length"]


async def disagg(
    pair: tuple[ServedEngine, ServedEngine], prompt: Any, length: int, end: int, user: str
) -> dict:
    prefill, decode = pair
    metadata, matched = await prep_recv(decode, prompt=prompt, end=end, user=user)
    end = end + length if end < 0 else end
    assert sum(size for _, size in decode_kv_metadata(metadata)) == end - matched
    if matched < end:
        send = {"begin": matched, "end": end, "kv_addr_info": metadata, "recv_rank": 1}
        status, content = await prefill.post("/microserving/remote_send", prompt=prompt, user=user, **send)
        assert (status, content) == (200, {})
    status, content = await decode.post("/microserving/start_generate", prompt=prompt, user=user, begin=end)
    assert status == 200, content
    return content


@pytest.mark.parametrize("length", [1, 2, 16, 17, 150])
@pytest.mark.parametrize("factor", [0, 0.1, 0.5, 0.9, 1])
async def test_disagg_says_what_one_engine_says(
    pair: tuple[ServedEngine, ServedEngine], length: int, factor: float
) -> None:
    prompt = prompt_of(length)
    end = -1 if factor == 0 else int((1 - factor) * length)
    expected = text_of(greedy_answer(prompt, 6))
    for user in ("cold", "warm"):
        answer = await disagg(pair, prompt, length, end, user)
        assert answer["choices"][0] == {
            "index": 0,
            "text": expected,
            "logprobs": None,
            "finish_reason": "length",
        }
        assert answer["id"] == user
        assert answer["usage"]["prompt_tokens"] == length
    window = end + length if end < 0 else end
    assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] == window
    assert answer["usage"]["extra"]["prefill_tokens"] == length - window
    assert await rests(pair[0]) and await rests(pair[1])


async def test_the_answer_can_be_a_stream_and_the_prompt_a_text(
    pair: tuple[ServedEngine, ServedEngine],
) -> None:
    prefill, decode = pair
    metadata, _ = await prep_recv(decode, prompt="Hello", end=-1, user="a")
    body = {"prompt": "Hello", "user": "a", "kv_addr_info": metadata, "recv_rank": 1}
    assert await prefill.post("/microserving/remote_send", begin=0, end=-1, **body) == (200, {})
    stream = {"prompt": "Hello", "user": "a", "begin": -1, "stream": True, "max_tokens": 99}
    async with decode.client.post("/microserving/start_generate", json=stream) as answer:
        events = (await answer.text()).split("\n\n")
    assert len(events) == 6 + 2, "prep_recv's max_tokens hold"
    assert all('"id":"a"' in event for event in events[:6])
    assert (await prefill.metrics())['put_bytes_total{peer="1"}'] == 4 * prefill.runner.kv_bytes_per_token


async def test_many_at_once(pair: tuple[ServedEngine, ServedEngine]) -> None:
    prompts = [prompt_of(5 + number, number % 7) for number in range(40)]
    answers = await asyncio.gather(
        *(disagg(pair, prompt, len(prompt), -1, f"r{number}") for number, prompt in enumerate(prompts))
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        assert answer["choices"][0]["text"] == text_of(greedy_answer(prompt, 6))
    assert await rests(pair[0]) and await rests(pair[1])


@pytest.mark.parametrize(
    ("call", "change", "status", "says"),
    [
        ("prep_recv", {"end": 20}, 400, "must leave a token"),
        ("prep_recv", {"end": 21}, 400, "outside the prompt"),
        ("prep_recv", {"end": -21}, 400, "outside the prompt"),
        ("prep_recv", {"user": None}, 400, "'user' is missing"),
        ("prep_recv", {"user": "known"}, 400, "used once"),
        ("prep_recv", {"prompt": [97] * 20}, 400, "token id"),
        ("prep_recv", {"model": "other"}, 404, "serves 'fake'"),
        ("prep_recv", {"end": None}, 400, "end"),
        ("remote_send", {"begin": 10, "end": 10}, 400, "must not be empty"),
        ("remote_send", {"begin": 11, "end": 10}, 400, "must not be empty"),
        ("remote_send", {"end": 20}, 400, "before the prompt's last"),
        ("remote_send", {"end": 18}, 400, "room for 19"),
        ("remote_send", {"recv_rank": 0}, 400, "recv_rank"),
        ("remote_send", {"recv_rank": 3}, 400, "recv_rank"),
        ("remote_send", {"recv_rank": -1}, 400, "recv_rank"),
        ("remote_send", {"kv_addr_info": "AAAA"}, 400, "kv_append_metadata"),
        ("remote_send", {"kv_addr_info": "not base64"}, 400, "kv_append_metadata"),
        ("remote_send", {"user": ""}, 400, "'user' is missing"),
        ("start_generate", {"user": "nobody"}, 404, "no prepared request"),
        ("start_generate", {"user": None}, 404, "no prepared request"),
        ("start_generate", {"begin": 20}, 400, "at least one token"),
        ("start_generate", {"begin": -21}, 400, "outside the prompt"),
        ("start_generate", {"begin": 19, "prompt": [1] * 20}, 400, "differs"),
    ],
)
async def test_calls_that_cannot_be(
    pair: tuple[ServedEngine, ServedEngine], call: str, change: dict, status: int, says: str
) -> None:
    prefill, decode = pair
    prompt = prompt_of(20)
    metadata, _ = await prep_recv(decode, prompt=prompt, end=19, user="known")
    bodies: dict[str, dict] = {
        "prep_recv": {"end": 19, "user": "new"},
        "remote_send": {"begin": 0, "end": 19, "kv_addr_info": metadata, "recv_rank": 1, "user": "known"},
        "start_generate": {"begin": 19, "user": "known"},
    }
    engine = prefill if call == "remote_send" else decode
    answered, content = await engine.post(
        f"/microserving/{call}", **{"prompt": prompt, **bodies[call], **change}
    )
    assert answered == status, content
    assert says in content["error"]["message"]
    assert prefill.runner.sequences == {} and len(decode.runner.sequences) == 1
    body = {"prompt": prompt, "user": "known"}
    assert (await prefill.post("/microserving/remote_send", **{**body, **bodies["remote_send"]}))[0] == 200
    _, answer = await decode.post("/microserving/start_generate", **body, begin=19)
    assert answer["choices"][0]["text"] == text_of(greedy_answer(prompt, 6)), "the prepared one is unharmed"


async def test_without_a_world_only_the_empty_window_works(start_engine: StartEngine) -> None:
    engine = await start_engine(None)
    status, content = await engine.post("/microserving/prep_recv", prompt=[1, 2], end=-1, user="a")
    assert status == 400 and "started alone" in content["error"]["message"]
    metadata, matched = await prep_recv(engine, prompt=[1, 2], end=0, user="a")
    assert (metadata, matched) == (encode_kv_metadata([0]), 0)
    _, answer = await engine.post("/microserving/start_generate", prompt=[1, 2], begin=0, user="a")
    assert answer["choices"][0]["text"] == text_of(greedy_answer([1, 2], 6))


async def test_abort_frees_at_once_and_may_be_said_twice(pair: tuple[ServedEngine, ServedEngine]) -> None:
    decode = pair[1]
    for state in ("unknown", "receiving", "generating", "ended"):
        if state in ("receiving", "generating"):
            await prep_recv(decode, prompt=prompt_of(20), end=0, user=state, max_tokens=150)
        call = None
        if state == "generating":
            body = {"prompt": prompt_of(20), "begin": 0, "user": state}
            call = asyncio.create_task(decode.post("/microserving/start_generate", **body))
            await asyncio.sleep(0.01)
        for _ in range(2):
            assert await decode.post("/microserving/abort", user=state) == (200, {})
        if call is not None:
            status, _ = await call
            assert status in (200, 409)
        assert await rests(decode, within_s=0.5)
        status, _ = await decode.post(
            "/microserving/start_generate", prompt=prompt_of(20), begin=0, user=state
        )
        assert status == 404


async def test_kv_that_nobody_starts_is_freed(
    pair: tuple[ServedEngine, ServedEngine], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scheduler_module, "RECEIVE_DEADLINE_S", 0.2)
    decode = pair[1]
    await prep_recv(decode, prompt=prompt_of(20), end=19, user="a")
    assert (await decode.metrics())["requests_running"] == 1
    assert await rests(decode, within_s=1.0)
    status, _ = await decode.post("/microserving/start_generate", prompt=prompt_of(20), begin=19, user="a")
    assert status == 404
    await prep_recv(decode, prompt=prompt_of(20), end=0, user="a")


async def test_a_client_that_leaves_start_generate_frees_its_kv(
    pair: tuple[ServedEngine, ServedEngine],
) -> None:
    decode = pair[1]
    for wait in (0.0, 0.002, 0.02):
        await prep_recv(decode, prompt=prompt_of(20), end=0, user="a", max_tokens=150)
        body = {"prompt": prompt_of(20), "begin": 0, "user": "a", "stream": True}
        with pytest.raises(TimeoutError):
            async with (
                asyncio.timeout(wait),
                decode.client.post("/microserving/start_generate", json=body) as answer,
            ):
                await answer.read()
                raise TimeoutError  # it was quick
        assert (await decode.post("/microserving/abort", user="a"))[0] == 200
        assert await rests(decode)


async def test_a_failed_send_is_an_error_and_not_an_empty_answer(
    pair: tuple[ServedEngine, ServedEngine],
) -> None:
    prefill, decode = pair
    metadata, _ = await prep_recv(decode, prompt=prompt_of(20), end=19, user="a")
    prefill.runner.fail_next = RuntimeError("the peer is gone")
    send = {"begin": 0, "end": 19, "kv_addr_info": metadata, "recv_rank": 1, "user": "a"}
    status, content = await prefill.post("/microserving/remote_send", prompt=prompt_of(20), **send)
    assert status == 500 and "the peer is gone" in content["error"]["message"]
    assert await rests(prefill)


async def test_a_preemption_tells_the_tokens_that_were_given(start_engine: StartEngine) -> None:
    decode = await start_engine(1)
    scheduler = decode.service.worker.scheduler
    body = {"prompt": [7], "user": "a", "begin": 0, "stream": True}
    await prep_recv(decode, prompt=[7], end=0, user="a", max_tokens=190)

    def preempt() -> None:
        scheduler._preempt(scheduler._running[0])

    async with decode.client.post("/microserving/start_generate", json=body) as answer:
        await answer.content.readuntil(b"\n\n")
        await decode.service.worker.call(preempt)
        rest = await answer.text()
    last = [json.loads(line[6:]) for line in rest.split("\n\n") if line.startswith("data: {")][-1]
    [choice] = last["choices"]
    count = len(choice["generated_token_ids"])
    assert choice["finish_reason"] == "preempt" and count > 0
    assert choice["generated_token_ids"] == greedy_answer([7], count)
