"""Put an engine together: model, runner, worker, server."""

import argparse
import asyncio
import errno
from dataclasses import dataclass
from typing import Any

from aiohttp import web

from ..models.chat import ChatTemplate
from ..models.names import resolve
from ..models.tokenizer import Tokenizer
from ..nvshmem import NvshmemConfig
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
    role: str
    _server: web.AppRunner | None = None

    async def listen(self, host: str, port: int, *, grace_s: float) -> int:
        """Open the port and return it; raises `ArgumentError` where it is taken."""
        labels = {"kernels": self.runner.kernels, "model": self.service.model, "role": self.role}
        app = make_app(self.service, EngineMetrics(lambda: self.service.worker.stats, labels))
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
    """Everything but the port. Raises `ArgumentError` for a model or an environment that cannot be."""
    try:
        world = NvshmemConfig.from_env()
    except ValueError as error:
        raise ArgumentError(str(error)) from error
    if arguments.prefill_chunk_size <= arguments.max_num_sequence:
        raise ArgumentError(
            f"--prefill-chunk-size {arguments.prefill_chunk_size} must be more than --max-num-sequence "
            f"{arguments.max_num_sequence}: each pass takes a token of every request, and prefill besides."
        )
    files = await asyncio.to_thread(resolve, arguments.model, progress)
    worker: EngineWorker[ModelRunner] = EngineWorker(
        lambda: ModelRunner(
            files.path,
            max_num_sequence=arguments.max_num_sequence,
            max_total_tokens=arguments.max_total_seq_length,
            prefill_chunk_size=arguments.prefill_chunk_size,
            nvshmem=world,
            num_threads=arguments.threads,
            kernels=arguments.kernels,
            progress=progress,
        ),
        max_num_sequence=arguments.max_num_sequence,
        prefix_cache=arguments.enable_prefix_cache,
    )
    await worker.start()
    config = worker.runner.config
    tokenizer = Tokenizer(files.path)
    tokenizer.stream_decoder()  # makes its table now (0.2 s), so that the first request does not wait for it
    service = Service(
        worker=worker,
        model=arguments.served_model_name or files.id,
        tokenizer=tokenizer,
        chat=ChatTemplate.from_file(files.path),
        context_length=min(config.context_length, arguments.max_total_seq_length),
        vocab_size=config.vocab_size,
        eos_ids=config.eos_ids,
        world=None if world is None else (world.pe_start, world.npes),
        temperature=files.temperature,
        top_p=files.top_p,
    )
    return Engine(service, worker.runner, arguments.role or "")
