"""Put an engine together: model, runner, worker, server."""

import argparse
import errno
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ..models.chat import ChatTemplate
from ..models.names import resolve
from ..models.tokenizer import Tokenizer
from ..protocol.errors import ArgumentError
from ..protocol.progress import OnProgress
from .metrics import EngineMetrics
from .runner import ModelRunner
from .server import make_app
from .service import Service
from .worker import EngineWorker


@dataclass
class Engine:
    """A booted engine."""

    service: Service
    runner: ModelRunner
    labels: dict[str, str]
    _server: web.AppRunner | None = None

    async def listen(self, host: str, port: int, *, grace_s: float) -> int:
        """Open the port and return it; raises `ArgumentError` where it is taken."""
        app = make_app(self.service, EngineMetrics(lambda: self.service.worker.stats, self.labels))
        self._server = web.AppRunner(
            app, handler_cancellation=True, shutdown_timeout=grace_s, access_log=None
        )
        await self._server.setup()
        site = web.TCPSite(self._server, host, port, backlog=1024)
        try:
            await site.start()
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                raise ArgumentError(f"Port {port} of {host} is taken; choose another --port.") from None
            raise ArgumentError(f"{host}:{port} cannot be listened on ({error.strerror}).") from None
        return int(self._server.addresses[0][1])

    def facts(self) -> dict[str, Any]:
        """What a launcher is told of an engine that is ready."""
        return {
            "kernels": self.runner.kernels,
            "kv_pages": self.runner.num_pages,
            "page_size": self.runner.page_size,
            "context_length": self.service.context_length,
            "model": self.service.model,
        }

    async def stop(self) -> bool:
        """No new requests; streams get their grace; then the engine thread ends. False where it does not."""
        if self._server is not None:
            await self._server.cleanup()
        return await self.service.worker.stop()


async def boot(arguments: argparse.Namespace, progress: OnProgress) -> Engine:
    """Everything but the port."""
    files = None
    runner: ModelRunner

    def make_runner() -> ModelRunner:
        nonlocal files, runner
        files = resolve(arguments.model, progress)
        runner = ModelRunner(
            files.path,
            max_num_sequence=arguments.max_num_sequence,
            max_total_tokens=arguments.max_total_seq_length,
            prefill_chunk_size=arguments.prefill_chunk_size,
            nvshmem=config,
            num_threads=arguments.threads,
            kernels=arguments.kernels,
            progress=progress,
        )
        return runner

    config = None
    worker = EngineWorker(
        make_runner, max_num_sequence=arguments.max_num_sequence, prefix_cache=arguments.enable_prefix_cache
    )
    await worker.start()
    assert files is not None
    model = arguments.served_model_name or files.id
    service = Service(
        worker=worker,
        model=model,
        tokenizer=Tokenizer(files.path),
        chat=ChatTemplate.from_file(files.path),
        context_length=min(runner.config.context_length, runner.num_pages * runner.page_size),
        vocab_size=runner.config.vocab_size,
        eos_ids=runner.config.eos_ids,
        world=None if config is None else (config.pe_start, config.npes),
    )
    labels = {"kernels": runner.kernels, "model": model, "role": arguments.role or ""}
    return Engine(service, runner, labels)
