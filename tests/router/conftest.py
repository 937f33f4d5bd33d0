"""A router with its gateway in front of scripted engines, and the check that nothing is left over."""

import asyncio
import sys
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

import aiohttp
import openai
import pytest
import uvloop

sys.path.insert(0, str(Path(__file__).parent))  # for scripted_engine

from scripted_engine import PlainTemplate, ScriptedEngine, WordTokenizer

from mlcrouter_nb.router.endpoint import Endpoint
from mlcrouter_nb.router.gateway import Gateway
from mlcrouter_nb.router.policy import compile_policy
from mlcrouter_nb.router.router import Router


@pytest.hookimpl(optionalhook=True)
def pytest_asyncio_loop_factories(config, item):
    """Both loops that the router runs on."""
    return {"uvloop": uvloop.new_event_loop, "asyncio": asyncio.new_event_loop}


@dataclass
class Served:
    """What a test works with."""

    router: Router
    gateway: Gateway
    url: str
    engines: dict[str, ScriptedEngine]
    client: openai.AsyncOpenAI
    http: aiohttp.ClientSession

    def use(self, source: str, name: str = "mine", **values) -> None:
        """Make a policy from a source, or a known one's name, active."""
        known = source in self.router.book.names()
        self.router.use(source if known else compile_policy(name, source, "cell [7]"), **values)

    async def texts(self, body: dict) -> list[str]:
        """The texts of a request's chunks."""
        async with self.router.stream(body) as stream:
            return [chunk.text async for chunk in stream]

    async def nothing_left(self, deadline_s: float = 3.0) -> None:
        """Every counter is 0, all KV is free, no call is open; soon, for engines notice a leave a moment later."""
        for _ in range(int(deadline_s / 0.01)):
            if not self.leftovers():
                return
            await asyncio.sleep(0.01)
        assert self.leftovers() == {}

    def leftovers(self) -> dict[str, object]:
        left: dict[str, object] = {}
        for endpoint in self.router.endpoints:
            engine = self.engines[endpoint.name]
            found = endpoint.in_flight, endpoint.waiting_tokens, engine.open, sorted(engine.reserved)
            if found != (0, 0, 0, []):
                left[endpoint.name] = found
        if self.router.telemetry.live:
            left["live"] = list(self.router.telemetry.live)
        return left


@pytest.fixture
def serve():
    """`async with serve("1P2D", ...) as served`; keyword arguments go to the router, `endpoint=` to the endpoints."""

    @asynccontextmanager
    async def serving(roles="1P2D", *, kind="cpu", endpoint=None, api_key=None, host="127.0.0.1", **options):
        if "P" in roles:
            prefill, decode = map(int, roles[:-1].split("P"))
            names = [(f"P{i}", "prefill") for i in range(prefill)]
            names += [(f"D{prefill + i}", "decode") for i in range(decode)]
        else:
            names = [(f"E{i}", None) for i in range(int(roles))]
        options = {
            "tokenizer": WordTokenizer,
            "chat": PlainTemplate(),
            "model": "m",
            "backoff_s": 0.001,
        } | options
        before = asyncio.all_tasks()
        async with AsyncExitStack() as stack:
            engines = {
                name: await stack.enter_async_context(ScriptedEngine(name).serve()) for name, _ in names
            }
            endpoints = [
                Endpoint(name, engines[name].url, role, kind, rank, **(endpoint or {}))
                for rank, (name, role) in enumerate(names)
            ]
            router = Router(endpoints, **options)
            gateway = Gateway(router, api_key=api_key)
            url = await gateway.start(host)
            client = openai.AsyncOpenAI(base_url=f"{url}/v1", api_key=api_key or "none", max_retries=0)
            http = aiohttp.ClientSession(base_url=url)
            served = Served(router, gateway, url, engines, client, http)
            try:
                yield served
                await served.nothing_left()
            finally:
                await client.close()
                await http.close()
                await gateway.stop(1.0)
                await router.close()
        await asyncio.sleep(0)
        left = [task for task in asyncio.all_tasks() - before if not task.done()]
        assert left == []

    return serving
