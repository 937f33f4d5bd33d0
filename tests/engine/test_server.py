import asyncio
import json
import random
from typing import Any

import pytest

from mlcrouter_nb.engine import worker as worker_module

from .conftest import CONTEXT_LENGTH, ServedEngine, StartEngine
from .fake_runner import greedy_answer

PROMPT = [1, 2, 3, 4, 5]


def text_of(ids: list[int]) -> str:
    return "".join(chr(0x20 + id) for id in ids)


async def chunks_of(engine: ServedEngine, path: str, **body: object) -> list[Any]:
    async with engine.client.post(path, json={**body, "stream": True}) as answer:
        assert answer.status == 200
        assert answer.content_type == "text/event-stream"
        events = (await answer.text()).split("\n\n")
    assert events[-2:] == ["data: [DONE]", ""]
    return [json.loads(event.removeprefix("data: ")) for event in events[:-2]]


async def rests(engine: ServedEngine, within_s: float = 5.0) -> bool:
    """Whether every page is free or in the prefix cache, and nothing waits."""
    async with asyncio.timeout(within_s):
        while True:
            numbers = await engine.metrics()
            held = numbers["kv_pages_total"] - numbers["kv_pages_free"] - numbers["kv_pages_cached"]
            if held == numbers["requests_running"] == numbers["requests_waiting"] == 0:
                return len(engine.runner.sequences) == len(engine.service.worker.scheduler.pool.kept)
            await asyncio.sleep(0.02)


async def test_a_completion_whole_and_in_chunks(engine: ServedEngine) -> None:
    body = {"model": "fake", "prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True}
    expected = text_of(greedy_answer(PROMPT, 6))
    status, whole = await engine.post("/v1/completions", **body)
    assert status == 200
    assert (whole["object"], whole["model"]) == ("text_completion", "fake")
    assert whole["choices"] == [{"index": 0, "text": expected, "logprobs": None, "finish_reason": "length"}]
    usage = whole["usage"]
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (5, 6, 11)
    assert usage["prompt_tokens_details"] == {"cached_tokens": 0}
    chunks = await chunks_of(engine, "/v1/completions", **body)
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == expected
    assert len({chunk["id"] for chunk in chunks}) == 1
    assert [chunk["choices"][0]["finish_reason"] for chunk in chunks] == [None] * 5 + ["length"]
    assert not any("usage" in chunk for chunk in chunks), "not asked for"


async def test_a_chat_completion_whole_and_in_chunks(engine: ServedEngine) -> None:
    body = {
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
    }
    prompt = engine.service.tokenizer.encode("user: Hi\n")
    expected = text_of(greedy_answer(prompt, 4))
    _, whole = await engine.post("/v1/chat/completions", **body)
    assert whole["object"] == "chat.completion"
    assert whole["choices"][0]["message"]["content"] == expected
    assert whole["usage"]["prompt_tokens"] == len(prompt)
    chunks = await chunks_of(engine, "/v1/chat/completions", **body, stream_options={"include_usage": True})
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks[:-1]) == expected
    assert chunks[-2]["choices"][0]["finish_reason"] == "length"
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] == 4
    assert chunks[-1]["usage"]["prompt_tokens_details"]["cached_tokens"] == len(prompt) - 1


async def test_token_ids_for_who_asks(engine: ServedEngine) -> None:
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
    chunks = await chunks_of(engine, "/v1/completions", **body)
    assert [id for chunk in chunks for id in chunk["choices"][0]["token_ids"]] == greedy_answer(PROMPT, 6)
    _, whole = await engine.post("/v1/completions", **body)
    assert whole["choices"][0]["token_ids"] == greedy_answer(PROMPT, 6)


async def test_a_seed_says_the_same_in_any_company(engine: ServedEngine, start_engine: StartEngine) -> None:
    other = await start_engine(1, prefix_cache=False)
    body = {"prompt": "Hello", "max_tokens": 30, "seed": 5, "temperature": 1.3, "top_p": 0.9}
    _, alone = await other.post("/v1/completions", **body)
    answers = await asyncio.gather(
        *(
            engine.post("/v1/completions", **{**body, "seed": seed, "prompt": "Hello"})
            for seed in (5, 6, 7, 5)
        )
    )
    texts = [answer["choices"][0]["text"] for _, answer in answers]
    assert texts[0] == texts[3] == alone["choices"][0]["text"] != texts[1]


async def test_the_answer_ends_where_the_context_ends(engine: ServedEngine) -> None:
    prompt = [i % 90 for i in range(CONTEXT_LENGTH - 3)]
    _, whole = await engine.post("/v1/completions", prompt=prompt, temperature=0, ignore_eos=True)
    assert (whole["usage"]["completion_tokens"], whole["choices"][0]["finish_reason"]) == (3, "length")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("change", "status", "says"),
    [
        ({"model": "other"}, 404, "serves 'fake'"),
        ({"max_tokens": 0}, 400, "max_tokens"),
        ({"max_tokens": -1}, 400, "max_tokens"),
        ({"temperature": 9}, 400, "temperature"),
        ({"temperature": "warm"}, 400, "temperature"),
        ({"top_p": 0}, 400, "top_p"),
        ({"n": 2}, 400, "n"),
        ({"logprobs": True}, 400, "logprobs"),
        ({"response_format": {"type": "json_object"}}, 400, "response_format"),
        ({"tools": [{"type": "function"}]}, 400, "tools"),
        ({"logit_bias": {"97": 1}}, 400, "logit_bias"),
        ({"prompt": "x" * 300, "messages": [{"role": "user", "content": "x" * 300}]}, 400, "context"),
        ({"prompt": None, "messages": None}, 400, "prompt|messages"),
        ({"prompt": "", "messages": []}, 400, "prompt|messages"),
        (
            {"prompt": [97], "messages": [{"role": "user", "content": [{"type": "image_url"}]}]},
            400,
            "prompt|text only",
        ),
        ({"prompt": [-1], "messages": [{"role": "king", "content": "x"}]}, 400, "prompt|messages"),
        ({"prompt": [[1], [2]], "messages": 3}, 400, "one prompt|messages"),
        ({"prompt": [[]], "messages": {}}, 400, "empty|messages"),
    ],
)
@pytest.mark.parametrize("stream", [False, True])
async def test_bad_input_is_refused_in_openai_s_shape(
    engine: ServedEngine, path: str, change: dict, status: int, says: str, stream: bool
) -> None:
    body = {"prompt": "Hi", "messages": [{"role": "user", "content": "Hi"}], "stream": stream, **change}
    body.pop("messages" if path == "/v1/completions" else "prompt")
    answered, content = await engine.post(path, **body)
    assert answered == status, content
    assert set(content["error"]) == {"message", "type", "param", "code"}
    assert any(part in content["error"]["message"] for part in says.split("|")), content
    assert engine.runner.sequences == {}


@pytest.mark.parametrize(
    "data", [b"", b"{", b"[]", b'"x"', b"\xff", b'{"prompt": "\\ud800"}', b'{"prompt": NaN}']
)
async def test_a_malformed_body_is_refused(engine: ServedEngine, data: bytes) -> None:
    for path in ("/v1/completions", "/v1/chat/completions", "/microserving/prep_recv", "/microserving/abort"):
        async with engine.client.post(path, data=data) as answer:
            assert answer.status == 400
            assert (await answer.json())["error"]["message"]


async def test_unknown_paths_and_methods(engine: ServedEngine) -> None:
    async with engine.client.get("/v1/nothing") as answer:
        assert answer.status == 404 and "error" in await answer.json()
    async with engine.client.get("/v1/completions") as answer:
        assert answer.status == 405 and "error" in await answer.json()


async def test_a_failed_pass_is_a_500_and_the_engine_lives_on(engine: ServedEngine) -> None:
    engine.runner.fail_next = RuntimeError("out of luck")
    status, content = await engine.post("/v1/completions", prompt=PROMPT, max_tokens=2)
    assert status == 500 and content["error"]["type"] == "server_error"
    assert (await engine.post("/v1/completions", prompt=PROMPT, max_tokens=2))[0] == 200
    assert await rests(engine)


async def test_a_failure_in_mid_stream_is_told_and_done(engine: ServedEngine) -> None:
    async with engine.client.post(
        "/v1/completions", json={"prompt": PROMPT, "stream": True, "ignore_eos": True}
    ) as answer:
        await answer.content.readuntil(b"\n\n")
        engine.runner.fail_next = RuntimeError("out of luck")
        events = (await answer.text()).split("\n\n")
    assert "out of luck" in json.loads(events[-3].removeprefix("data: "))["error"]["message"]
    assert events[-2:] == ["data: [DONE]", ""]


async def test_models_health_and_metrics(engine: ServedEngine, monkeypatch: pytest.MonkeyPatch) -> None:
    async with engine.client.get("/v1/models") as answer:
        content = await answer.json()
    assert content["object"] == "list" and [model["id"] for model in content["data"]] == ["fake"]
    await engine.post("/v1/completions", prompt=PROMPT, max_tokens=3, ignore_eos=True)
    numbers = await engine.metrics()
    assert numbers["prefill_tokens_total"] == 5 and numbers["decode_tokens_total"] == 2
    assert numbers['info{model="fake"}'] == 1
    async with engine.client.get("/health") as answer:
        assert answer.status == 200
    monkeypatch.setattr(worker_module, "STUCK_AFTER_S", 0.0)
    engine.service.worker._step_began = 1.0
    engine.service.worker._turn = lambda: asyncio.run(asyncio.sleep(0.01))  # type: ignore[method-assign]
    await asyncio.sleep(1.1)  # its last turn may have slept
    engine.service.worker._step_began = 1.0
    async with engine.client.get("/health") as answer:
        assert answer.status == 503 and "one step" in (await answer.json())["error"]["message"]


async def test_health_when_the_engine_thread_is_dead(engine: ServedEngine) -> None:
    await engine.service.worker.stop()
    async with engine.client.get("/health") as answer:
        assert answer.status == 503


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_s_leave_ends_its_request(engine: ServedEngine, stream: bool) -> None:
    body = {"prompt": PROMPT, "stream": stream, "ignore_eos": True, "max_tokens": 150}
    real_forward = engine.runner.forward

    def slow(batch: list) -> Any:
        import time

        time.sleep(0.02)
        return real_forward(batch)

    engine.runner.forward = slow  # type: ignore[method-assign]
    with pytest.raises(TimeoutError):
        async with asyncio.timeout(0.3), engine.client.post("/v1/completions", json=body) as answer:
            await answer.read()
    assert await rests(engine, within_s=1.0)
    assert len(engine.runner.batches) < 60


async def test_two_hundred_requests_a_third_of_them_left(engine: ServedEngine) -> None:
    chance = random.Random(2)

    async def one(number: int) -> str:
        body = {
            "prompt": [(number + i) % 90 for i in range(1 + number % 60)],
            "max_tokens": 1 + number % 40,
            "stream": number % 2 == 0,
        }
        patience = chance.uniform(0, 0.5) if number % 3 == 0 else None
        try:
            async with asyncio.timeout(patience), engine.client.post("/v1/completions", json=body) as answer:
                await answer.read()
                return str(answer.status)
        except TimeoutError:
            return "left"

    outcomes = await asyncio.gather(*(one(number) for number in range(200)))
    assert {outcome for i, outcome in enumerate(outcomes) if i % 3} == {"200"}
    assert await rests(engine)
    left = [
        t for t in asyncio.all_tasks() if "handler" in repr(t.get_coro()) and t is not asyncio.current_task()
    ]
    assert len(left) <= 100, "only keep-alive connections"


async def test_a_very_long_prompt_is_refused_politely(engine: ServedEngine) -> None:
    status, content = await engine.post("/v1/completions", prompt="x" * 900_000)
    assert status == 400 and "context" in content["error"]["message"]


async def test_a_raw_client_that_closes_before_the_first_token(engine: ServedEngine) -> None:
    host, port = engine.client._base_url.host, engine.client._base_url.port  # type: ignore[union-attr]
    body = json.dumps({"prompt": PROMPT, "max_tokens": 150, "ignore_eos": True}).encode()
    for _ in range(10):
        _, writer = await asyncio.open_connection(host, port)
        head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n"
        writer.write(head.encode() + body)
        await writer.drain()
        writer.close()
        await writer.wait_closed()
    assert await rests(engine)
