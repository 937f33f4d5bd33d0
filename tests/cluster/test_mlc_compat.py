"""MLC-LLM's names on stand-in engines; the subclass follows the tutorial's pattern and changes only its imports."""

import contextlib
import signal
import socket
import subprocess
import sys
import threading
import urllib.request
from collections.abc import AsyncGenerator, Callable, Iterator
from pathlib import Path
from typing import Any

import aiohttp
import pytest

from mlcrouter_nb.cluster import Cluster
from mlcrouter_nb.mlc_compat import Router, microserving_entrypoints, openai_api_protocol
from mlcrouter_nb.mlc_compat.rerun import Resumption
from mlcrouter_nb.mlc_compat.serve import open_endpoint
from mlcrouter_nb.protocol.errors import ArgumentError, EngineError

StandIns = Callable[..., Cluster]


class Words:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [ord(c) for c in text]


class LastTokenRouter(Router):
    """Prefill on engine 0, all but the last token; decode on engine 1."""

    async def translate_request(
        self, request: openai_api_protocol.CompletionRequest, request_id: str
    ) -> AsyncGenerator[openai_api_protocol.CompletionResponse, Any]:
        request.user = request_id
        async with aiohttp.ClientSession(
            timeout=aiohttp.ClientTimeout(total=3 * 3600), trust_env=True
        ) as session:
            start = len(request.prompt) - 1
            prepare = microserving_entrypoints.PrepRecvRequest(**request.model_dump(), end=start)
            address, _ = await self.send_prepare_receive(
                session=session, request=prepare, server_url=self.server_urls[1]
            )
            send = microserving_entrypoints.RemoteSendRequest(
                **request.model_dump(),
                begin=0,
                end=start,
                kv_addr_info=address,
                recv_rank=self.device_id_starts[1],
            )
            await self.send_remote_send(session=session, request=send, server_url=self.server_urls[0])
            generate = microserving_entrypoints.StartGenerateRequest(**request.model_dump(), begin=start)
            async for response in self.send_start_generate(
                session=session, request=generate, server_url=self.server_urls[1]
            ):
                if len(response.choices) > 0 and response.choices[0].finish_reason == "preempt":
                    yield None
                yield response


@pytest.fixture
def routers(stand_ins: StandIns) -> Iterator[Callable[..., Router]]:
    """`routers(LastTokenRouter, "ok", num_gpus=[2, 2])`: a booted router of two stand-in engines."""
    made: list[Router] = []

    def make(kind: type[Router] = Router, mode: str = "ok", engines: int = 2, **arguments: Any) -> Router:
        stand_ins(mode, roles="1")  # puts the stand-ins in place of the CPU engines
        arguments = {"num_gpus": [1] * engines} | arguments
        router = kind("stand-in", hosts=["127.0.0.1"] * engines, ports=[0] * engines, **arguments)
        made.append(router)
        return router

    yield make
    for router in made:
        router.terminate()


def completion(prompt: str | list[int] = "Who?", **fields: Any) -> openai_api_protocol.CompletionRequest:
    return openai_api_protocol.CompletionRequest(
        **{"model": "whatever", "prompt": prompt, "max_tokens": 4, "stream": True} | fields
    )


async def text_of(router: Router, request: Any, id: str = "cmpl-1") -> tuple[str, list[Any]]:
    responses = [response async for response in router.handle_completion(request, id)]
    return "".join(choice.text for response in responses for choice in response.choices), responses


async def calls(router: Router, engine: int) -> list[list[Any]]:
    async with (
        aiohttp.ClientSession() as session,
        session.get(f"{router.server_urls[engine]}/calls") as answer,
    ):
        return await answer.json()


async def test_the_attributes(routers: Callable[..., Router]) -> None:
    router = routers(num_gpus=[2, 3])
    assert router.num_servers == len(router.server_urls) == len(router.servers) == 2
    assert router.device_id_starts == [0, 2, 5]
    assert router.server_urls == [f"http://{h}:{p}" for h, p in zip(router.hosts, router.ports, strict=True)]
    assert router.num_running_requests == [0, 0]
    assert router.headers == {"Content-Type": "application/json"}
    assert (router.router_mode, router.pd_balance_factor) == ("disagg", 0.0)
    assert router.tokenizer.encode("Hi") == [72, 105]


async def test_the_tutorials_subclass(routers: Callable[..., Router]) -> None:
    router = routers(LastTokenRouter, num_gpus=[2, 2])
    request = completion()
    text, responses = await text_of(router, request)
    assert text == "Humpty Dumpty sat on "
    assert request.prompt == [ord(c) for c in "Who?"]
    assert request.debug_config is not None
    assert {response.id for response in responses} == {"cmpl-1"}
    assert await calls(router, 0) == [["remote_send", "cmpl-1", 0, 3, 2]]
    assert await calls(router, 1) == [["prep_recv", "cmpl-1", 3], ["start_generate", "cmpl-1", 3]]


async def test_none_runs_it_again_and_no_token_comes_twice(routers: Callable[..., Router]) -> None:
    router = routers(LastTokenRouter, "preempts")
    text, responses = await text_of(router, completion(stream_options={"include_usage": True}))
    assert text == "Humpty Dumpty sat on "
    assert {response.id for response in responses} == {"cmpl-1"}
    ids = {call[1] for call in await calls(router, 1)}
    assert ids == {"cmpl-1", "cmpl-1-1"}, "an engine sees no id twice"


def response(text: str = "", **fields: Any) -> openai_api_protocol.CompletionResponse:
    return openai_api_protocol.CompletionResponse(choices=[{"text": text}] if text else [], **fields)


def test_a_resumption_counts_what_was_sent() -> None:
    run = Resumption(completion([1, 2], max_tokens=6), "cmpl-1", Words())
    assert run.again(), "nothing was sent: the same again"
    assert run.request.prompt == [1, 2]
    run.pass_on(response("ab"))
    assert run.again()
    assert (run.request.prompt, run.request.max_tokens, run.id) == ([1, 2, 97, 98], 4, "cmpl-1-2")
    run.pass_on(response("cd"))
    assert run.again()
    assert (run.request.prompt, run.request.max_tokens) == ([1, 2, 97, 98, 99, 100], 2)
    usage = run.pass_on(response(usage={"prompt_tokens": 6, "completion_tokens": 2, "total_tokens": 8})).usage
    assert (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens) == (2, 6, 8)
    run.pass_on(response("ef"))
    assert not run.again(), "all of it was sent"
    assert run.closing().choices[0].finish_reason == "length"


def test_what_cannot_be_resumed_is_said() -> None:
    run = Resumption(completion([1], n=2), "cmpl-1", Words())
    run.pass_on(response("a"))
    with pytest.raises(EngineError, match="n > 1"):
        run.again()
    endless = Resumption(completion([1]), "cmpl-1", Words())
    with pytest.raises(EngineError, match="did not end"):
        while endless.again():
            pass


async def test_the_pattern_of_its_own(routers: Callable[..., Router]) -> None:
    router = routers()
    counts = []
    async for _ in router.handle_completion(completion(), "cmpl-1"):
        counts.append(list(router.num_running_requests))
    assert [1, 0] not in counts
    assert [0, 1] in counts, "the decode engine is busy"
    assert router.num_running_requests == [0, 0]
    assert (await calls(router, 1))[0][2] == -1
    router.pd_balance_factor = 0.5
    await text_of(router, completion())
    assert (await calls(router, 0))[1][2:4] == [0, 2], "half of four tokens"
    router.router_mode = "round-robin"
    for _ in range(2):
        await text_of(router, completion())
    assert [len(await calls(router, engine)) for engine in (0, 1)] == [3, 5], "one each"


async def test_without_a_stream(routers: Callable[..., Router]) -> None:
    router = routers(router_mode="round-robin")
    text, responses = await text_of(router, completion(stream=False))
    assert text == "Humpty Dumpty sat on "
    assert len(responses) == 1
    assert responses[0].usage.completion_tokens == 4


async def test_leaving_frees_the_engines(routers: Callable[..., Router]) -> None:
    router = routers()
    async with contextlib.aclosing(
        router.handle_completion(completion(max_tokens=11), "cmpl-1")
    ) as responses:
        async for _ in responses:
            break
    assert router.num_running_requests == [0, 0]


async def test_an_engines_refusal_is_a_sentence(routers: Callable[..., Router]) -> None:
    router = routers()
    async with aiohttp.ClientSession() as session:
        with pytest.raises(EngineError, match="404"):
            await router.send_remote_send(session, completion(), f"{router.server_urls[0]}/nowhere")
        with pytest.raises(EngineError, match="failed"):
            await router.send_prepare_receive(session, completion(), "http://127.0.0.1:9")


async def test_one_endpoint_cannot_disaggregate(routers: Callable[..., Router]) -> None:
    router = routers(engines=1)
    with pytest.raises(ArgumentError, match="two engines"):
        await text_of(router, completion())


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"pd_balance_factor": 1.2}, r"1\.2"),
        ({"pd_balance_factor": -0.1}, r"-0\.1"),
        ({"router_mode": "turbo"}, "turbo"),
        ({"ports": [1, 2]}, "1, 2 and 1 entries"),
    ],
)
def test_wrong_arguments(arguments: dict[str, Any], said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        Router("stand-in", **arguments)


def test_serve_runs_until_a_signal(tmp_path: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    script = tmp_path / "custom_router.py"
    script.write_text(
        f"import sys; sys.path.insert(0, {str(Path(__file__).parent)!r})\n"
        "import parent; parent.use_stand_ins('ok')\n"
        "from mlcrouter_nb.mlc_compat import Router, serve\n"
        "class CustomRouter(Router):\n    pass\n"
        f"serve(model='stand-in', model_lib='/none', router_host='127.0.0.1', router_port={port},\n"
        "    endpoint_hosts=['127.0.0.1', '127.0.0.1'], endpoint_ports=[0, 0], endpoint_num_gpus=[1, 1],\n"
        "    enable_prefix_cache=False, router_type=CustomRouter)\n"
    )
    with subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE) as process:
        try:
            assert process.stdout.readline().decode().strip() == f"http://127.0.0.1:{port}/v1"
            body = b'{"model": "any", "prompt": "Who?", "max_tokens": 2}'
            request = urllib.request.Request(f"http://127.0.0.1:{port}/v1/completions", body)
            with urllib.request.urlopen(request, timeout=10) as answer:
                assert b"Humpty Dumpty " in answer.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            if process.poll() is None:
                process.kill()


async def test_serve_hands_requests_to_the_subclass(routers: Callable[..., Router]) -> None:
    router = routers(LastTokenRouter, num_gpus=[2, 2])
    with socket.create_server(("127.0.0.1", 0)) as probe:
        port = probe.getsockname()[1]
    opener = threading.Thread(target=open_endpoint, args=(router, "127.0.0.1", port))
    opener.start()
    opener.join(10)
    async with aiohttp.ClientSession(f"http://127.0.0.1:{port}") as session:
        body = {"model": "/path/to/model", "prompt": "Who?", "max_tokens": 3}
        async with session.post("/v1/completions", json=body) as answer:
            content = await answer.json()
            assert answer.status == 200, content
        assert content["choices"][0]["text"] == "Humpty Dumpty sat "
        assert content["choices"][0]["finish_reason"] == "length"
        assert content["usage"]["completion_tokens"] == 3
        async with session.post("/v1/completions", json={**body, "stream": True}) as answer:
            lines = (await answer.text()).split("\n\n")
        assert lines[-2] == "data: [DONE]"
        assert sum('"text":' in line for line in lines) == 3
    assert [call[0] for call in await calls(router, 1)] == ["prep_recv", "start_generate"] * 2


@pytest.mark.engine
async def test_the_subclass_on_real_engines_says_what_one_engine_says() -> None:
    router = LastTokenRouter("smollm2-135m", hosts=["127.0.0.1"] * 2, ports=[0, 0], num_gpus=[2, 2])
    try:
        prompt = "The capital of France is"
        disaggregated, _ = await text_of(router, completion(prompt, max_tokens=8, temperature=0))
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0}
        async with (
            aiohttp.ClientSession(router.server_urls[0]) as session,
            session.post("/v1/completions", json=body) as answer,
        ):
            assert disaggregated == (await answer.json())["choices"][0]["text"]
        async with aiohttp.ClientSession(router.server_urls[0]) as session, session.get("/metrics") as answer:
            assert 'mlcrouter_engine_put_bytes_total{peer="2"}' in await answer.text(), "KV went to rank 2"
    finally:
        router.terminate()
