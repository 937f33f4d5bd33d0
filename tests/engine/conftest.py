"""An engine's server on the fake runner: everything but the model is real."""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack

import aiohttp
import pytest
from aiohttp import web

from mlcrouter_nb.engine.metrics import EngineMetrics
from mlcrouter_nb.engine.server import make_app
from mlcrouter_nb.engine.service import Service
from mlcrouter_nb.engine.worker import EngineWorker
from mlcrouter_nb.models.chat import ChatTemplate

from .fake_runner import VOCAB, FakeRunner

CONTEXT_LENGTH = 200
EOS = 96


class LetterDecoder:
    pending = False

    def push(self, id: int) -> str:
        return chr(0x20 + id)

    def flush(self) -> str:
        return ""


class LetterTokenizer:
    """One printable character is one token."""

    def encode(self, text: str) -> list[int]:
        return [min(ord(letter) - 0x20, VOCAB - 2) if letter >= " " else 0 for letter in text]

    def fewest_tokens(self, text: str) -> int:
        return len(text)

    def stream_decoder(self) -> LetterDecoder:
        return LetterDecoder()


class ServedEngine:
    """One engine: its fake runner, its service, and a client."""

    def __init__(self, runner: FakeRunner, service: Service, client: aiohttp.ClientSession) -> None:
        self.runner, self.service, self.client = runner, service, client

    async def post(self, path: str, **body: object) -> tuple[int, dict]:
        async with self.client.post(path, json=body) as answer:
            return answer.status, await answer.json()

    async def metrics(self) -> dict[str, float]:
        async with self.client.get("/metrics") as answer:
            lines = (await answer.text()).splitlines()
        pairs = (line.rsplit(" ", 1) for line in lines if not line.startswith("#"))
        return {name.removeprefix("mlcrouter_engine_"): float(value) for name, value in pairs}


StartEngine = Callable[..., Awaitable[ServedEngine]]


@pytest.fixture
async def start_engine() -> AsyncIterator[StartEngine]:
    """Start an engine on a fake runner; the runners of one test share one NVSHMEM world of three."""
    world: dict[int, FakeRunner] = {}
    async with AsyncExitStack() as stack:

        async def start(rank: int | None = 0, *, pages: int = 400, prefix_cache: bool = True) -> ServedEngine:
            runner = FakeRunner(pages, world=world, rank=rank or 0)
            worker = EngineWorker(lambda: runner, prefix_cache=prefix_cache)
            await worker.start()
            stack.push_async_callback(worker.stop)
            service = Service(
                worker=worker,
                model="fake",
                tokenizer=LetterTokenizer(),  # type: ignore[arg-type]
                chat=ChatTemplate("{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"),
                context_length=CONTEXT_LENGTH,
                vocab_size=VOCAB,
                eos_ids=(EOS,),
                world=None if rank is None else (rank, 3),
            )
            app = make_app(service, EngineMetrics(lambda: worker.stats, {"model": "fake"}))
            server = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=1.0)
            await server.setup()
            stack.push_async_callback(server.cleanup)
            await web.TCPSite(server, "127.0.0.1", 0).start()
            host, port = server.addresses[0][:2]
            client = aiohttp.ClientSession(f"http://{host}:{port}", timeout=aiohttp.ClientTimeout(20))
            await stack.enter_async_context(client)
            return ServedEngine(runner, service, client)

        yield start


@pytest.fixture
async def engine(start_engine: StartEngine) -> ServedEngine:
    """One engine."""
    return await start_engine()
