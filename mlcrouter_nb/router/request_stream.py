"""A request that runs in a task of its own, read from another."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from types import TracebackType
from typing import TYPE_CHECKING, Any

from ..telemetry import RequestTrace
from .chunks import Chunk
from .delivery import Delivery
from .request import Request
from .sinks import QueueSink

if TYPE_CHECKING:
    from .router import Router


class RequestStream:
    """A running request: its chunks, its trace, and a way to leave it."""

    def __init__(self, router: Router, request: Request) -> None:
        self.request = request
        self._router = router
        self._sink = QueueSink()
        self._delivery: Delivery | None = None
        self._task = asyncio.get_running_loop().create_task(self._run())
        self._task.add_done_callback(lambda _: router.forget(request))  # also where it never began

    @property
    def trace(self) -> RequestTrace:
        """What becomes of the request."""
        return self.request.trace

    @property
    def usage(self) -> dict[str, Any] | None:
        """OpenAI's usage object, once the stream has ended."""
        return self._delivery.total_usage() if self._delivery is not None else None

    @property
    def finish_reason(self) -> str | None:
        """Why the stream ended."""
        return self._delivery.finish_reason if self._delivery is not None else None

    async def aclose(self) -> None:
        """Leave the request and wait until nothing of it is left."""
        if not self._task.done():
            self.request.leave()
            self._task.cancel()
        await asyncio.gather(self._task, return_exceptions=True)

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        try:
            while (chunk := await self._sink.read()) is not None:
                yield chunk
            await self._task  # raises what went wrong
        finally:
            await self.aclose()

    async def __aenter__(self) -> RequestStream:
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.aclose()

    async def _run(self) -> None:
        try:
            self._delivery = await self._router.run(self.request, self._sink)
        finally:
            self._sink.close()
