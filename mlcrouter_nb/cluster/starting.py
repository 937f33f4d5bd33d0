"""What `up()` gives: to be awaited, or entered with `async with`."""

from collections.abc import Coroutine, Generator
from types import TracebackType
from typing import Any

from .cluster import Cluster


class Starting(Coroutine[Any, Any, Cluster]):
    """A cluster that starts when this is awaited; `async with` starts it, and stops it at the end."""

    def __init__(self, start: Coroutine[Any, Any, Cluster]) -> None:
        self._start = start
        self._cluster: Cluster | None = None

    def __await__(self) -> Generator[Any, None, Cluster]:
        return self._start.__await__()

    async def __aenter__(self) -> Cluster:
        self._cluster = await self._start
        return self._cluster

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._cluster is not None:
            await self._cluster.down()

    # What `asyncio.run` and `asyncio.create_task` want of a coroutine

    def send(self, value: Any) -> Any:
        return self._start.send(value)

    def throw(self, *error: Any) -> Any:
        return self._start.throw(*error)

    def close(self) -> None:
        self._start.close()
