"""After a preemption or a broken stream: no token twice, none lost."""

import pytest

START, COMPLETE = "/microserving/start_generate", "/v1/completions"


@pytest.mark.parametrize("token_ids", [True, False])
async def test_the_second_engine_gets_prompt_and_what_was_sent(serve, token_ids):
    async with serve("1P2D") as served:
        served.engines["D1"].plan(START, preempt_after=3, token_ids=token_ids)
        body = {"prompt": [7, 8, 9], "max_tokens": 5, "temperature": 0.0}
        assert await served.texts(body) == ["t3 ", "t4 ", "t5 ", "t6 ", "t7 ", ""]
        calls = [c for e in ("D1", "D2") for c in served.engines[e].told(START)]
        second = calls[1]
        tokenizer = served.router._prompts.tokenizer
        sent = [3, 4, 5] if token_ids else tokenizer.encode("t3 t4 t5")
        assert second["prompt"] == [7, 8, 9, *sent]
        assert second["max_tokens"] == 2
        assert second["user"] != calls[0]["user"]
        assert second["begin"] == 5


async def test_an_engine_that_tells_its_tokens_is_believed_and_the_client_does_not_see_them(serve):
    async with serve("1P3D") as served:
        for name in ("D1", "D2"):
            served.engines[name].plan(START, preempt_after=2, tells_generated=True)
        body = {"prompt": [7, 8, 9], "max_tokens": 6, "stream": True}
        async with served.http.post("/v1/completions", json=body) as response:
            assert b"generated" not in await response.read()
        third = served.engines["D3"].told(START)[0]
        assert third["prompt"] == [7, 8, 9, 3, 4, 5, 6]
        assert third["max_tokens"] == 2


@pytest.mark.parametrize("k", range(9))
@pytest.mark.parametrize("policy", ["round-robin", "disagg"])
async def test_every_token_is_a_seam(serve, policy, k):
    async with serve("1P2D", resume_limit=10) as served:
        served.use(policy)
        for engine in served.engines.values():
            for path in (START, COMPLETE):
                engine.plan(path, preempt_after=k)
                engine.plan(path, die_after=1)
        body = {"prompt": "a b c", "max_tokens": 8}
        texts = await served.texts(body)
        assert "".join(texts) == "t3 t4 t5 t6 t7 t8 t9 t10 "


async def test_text_prompts_of_attached_engines_need_no_tokenizer(serve):
    async with serve("2", kind="attach", tokenizer=None, chat=None, model=None) as served:
        served.engines["E0"].plan(COMPLETE, die_after=2)
        async with served.router.stream({"prompt": "a b ", "max_tokens": 4}) as stream:
            assert [chunk.text async for chunk in stream] == ["t2 ", "t3 ", "t4 ", "t5 ", ""]
        told = served.engines["E1"].told(COMPLETE)[0]
        assert (told["prompt"], told["max_tokens"]) == ("a b t2 t3 ", 2)


@pytest.mark.parametrize("how", [{"die_after": 2}, {"preempt_after": 2}])
async def test_token_prompts_without_a_tokenizer_fail_with_a_reason(serve, how):
    async with serve("2", kind="attach", tokenizer=None, chat=None, model=None) as served:
        served.engines["E0"].plan(COMPLETE, **how)
        with pytest.raises(Exception, match="needs a tokenizer"):
            await served.texts({"prompt": [1, 2], "max_tokens": 4})
        served.engines["E0"].plan(COMPLETE, **how, token_ids=True)
        served.engines["E1"].plan(COMPLETE, **how, token_ids=True)
        assert "".join(await served.texts({"prompt": [1, 2], "max_tokens": 4})) == "t2 t3 t4 t5 "


async def test_a_chat_goes_on_as_a_chat(serve):
    async with serve("2") as served:
        served.engines["E0"].plan("/v1/chat/completions", die_after=2)
        answer = await served.client.chat.completions.create(
            model="m", messages=[{"role": "user", "content": "x y"}], max_tokens=4
        )
        # The stand-in counts the words of the messages, then those of the rendered prompt and the two that were sent.
        assert answer.choices[0].message.content == "t2 t3 t6 t7 "
        assert answer.object == "chat.completion"
        told = served.engines["E1"].told(COMPLETE)[0]
        assert "messages" not in told
        assert len(told["prompt"]) == 4 + 2


async def test_a_chat_without_a_template_fails_with_a_reason(serve):
    async with serve("2", kind="attach", tokenizer=None, chat=None, model=None) as served:
        served.engines["E0"].plan("/v1/chat/completions", die_after=2)
        with pytest.raises(Exception, match=r"no\schat template"):
            await served.texts({"messages": [{"role": "user", "content": "x"}]})
        served.engines["E1"].plan("/v1/chat/completions", close=True)
        assert (await served.texts({"messages": [{"role": "user", "content": "x"}], "max_tokens": 1}))[
            1
        ] == "t1 "


@pytest.mark.parametrize(
    ("more", "reason"),
    [({"n": 2}, "n > 1"), ({"logprobs": 1}, "logprobs"), ({"echo": True}, "echo"),
     ({"response_format": {"type": "json_object"}}, "constrained")],
)  # fmt: skip
async def test_what_cannot_be_resumed_says_so(serve, more, reason):
    async with serve("2") as served:
        served.engines["E0"].plan(COMPLETE, die_after=2)
        with pytest.raises(Exception, match=f"could not go on elsewhere.*{reason}"):
            await served.texts({"prompt": "a", "max_tokens": 4, **more})
        served.engines["E0"].plan(COMPLETE, die_after=0)  # before the first token anything may be tried again
        served.engines["E1"].plan(COMPLETE, die_after=0)
        served.engines["E0"].plan(COMPLETE)
        assert (await served.texts({"prompt": "a", "max_tokens": 1, **more}))[0] == "t1 "


async def test_all_tokens_sent_but_not_the_end(serve):
    async with serve("2") as served:
        served.engines["E0"].plan(COMPLETE, die_after=4, tokens=5)
        async with served.router.stream({"prompt": "a", "max_tokens": 4}) as stream:
            chunks = [(chunk.text, chunk.finish_reason) async for chunk in stream]
        assert "".join(text for text, _ in chunks) == "t1 t2 t3 t4 "
        assert chunks[-1] == ("", "length")
        assert stream.usage["completion_tokens"] == 4
        assert served.engines["E1"].calls == []


async def test_a_policy_that_mixed_streams_is_not_run_again_in_their_midst(serve):
    source = """
async def route(request, engines):
    yield engines.all[0].complete(request)
    yield engines.all[1].complete(request)
"""
    async with serve("2") as served:
        served.use(source)
        served.engines["E1"].plan(COMPLETE, die_after=1)
        with pytest.raises(Exception, match="mixed several streams"):
            await served.texts({"prompt": "a", "max_tokens": 2})


async def test_never_onto_the_engine_that_has_just_failed(serve):
    async with serve("3") as served:
        served.use("async def route(request, engines):\n    return engines.all[0].complete(request)\n")
        for name in ("E0", "E1"):
            served.engines[name].plan(COMPLETE, die_after=1)
        assert "".join(await served.texts({"prompt": "a", "max_tokens": 3})) == "t1 t2 t3 "
        assert served.router.telemetry.finished[-1].route == "E0 → E1 → E2"
