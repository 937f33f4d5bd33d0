"""OpenAI's own client, over the wire."""

import openai
import pytest

POLICIES = ["round-robin", "least-loaded", "disagg"]
USAGE = {"include_usage": True}


@pytest.mark.parametrize("policy", POLICIES)
async def test_completions(serve, policy):
    async with serve("1P2D") as served:
        served.use(policy)
        answer = await served.client.completions.create(model="m", prompt="a b c", max_tokens=3)
        assert answer.object == "text_completion"
        assert (answer.choices[0].text, answer.choices[0].finish_reason) == ("t3 t4 t5 ", "length")
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens, answer.usage.total_tokens) == (
            3,
            3,
            6,
        )
        stream = await served.client.completions.create(
            model="m", prompt="a b c", max_tokens=3, stream=True, stream_options=USAGE
        )
        chunks = [chunk async for chunk in stream]
        assert "".join(choice.text for chunk in chunks for choice in chunk.choices) == "t3 t4 t5 "
        assert len({chunk.id for chunk in chunks}) == 1
        assert chunks[-1].choices == []
        assert (chunks[-1].usage.prompt_tokens, chunks[-1].usage.completion_tokens) == (3, 3)


@pytest.mark.parametrize("policy", POLICIES)
async def test_chat(serve, policy):
    messages = [{"role": "system", "content": "be good"}, {"role": "user", "content": "hi"}]
    async with serve("1P2D") as served:
        served.use(policy)
        first = 6 if policy == "disagg" else 3  # the stand-in renders no template
        answer = await served.client.chat.completions.create(
            model="m", messages=messages, max_completion_tokens=2
        )
        assert answer.object == "chat.completion"
        assert answer.choices[0].message.role == "assistant"
        assert answer.choices[0].message.content == f"t{first} t{first + 1} "
        assert answer.choices[0].finish_reason == "length"
        assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (first, 2)
        stream = await served.client.chat.completions.create(
            model="m", messages=messages, max_tokens=2, stream=True, stream_options=USAGE
        )
        chunks = [chunk async for chunk in stream]
        assert {chunk.object for chunk in chunks} == {"chat.completion.chunk"}
        assert chunks[0].choices[0].delta.role == "assistant"
        text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
        assert text == f"t{first} t{first + 1} "
        assert chunks[-1].usage.total_tokens == first + 2


async def test_errors_are_the_clients_own(serve):
    async with serve("1P1D") as served:
        with pytest.raises(openai.NotFoundError, match="there is: m"):
            await served.client.completions.create(model="x", prompt="a")
        with pytest.raises(openai.BadRequestError, match="temperature"):
            await served.client.completions.create(model="m", prompt="a", temperature=9)
        assert [model.id async for model in served.client.models.list()] == ["m"]
        assert (await served.client.models.retrieve("m")).id == "m"


async def test_an_error_in_mid_stream_raises(serve):
    async with serve("1", resume_limit=0) as served:
        served.engines["E0"].plan("/v1/completions", die_after=1)
        stream = await served.client.completions.create(model="m", prompt="a", max_tokens=3, stream=True)
        with pytest.raises(openai.APIError, match="E0 closed the connection"):
            async for _ in stream:
                pass
