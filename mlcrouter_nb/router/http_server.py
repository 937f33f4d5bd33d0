"""HTTP/1.1 for the gateway: listens, and stops in order."""

import asyncio
from collections.abc import Awaitable, Callable

from .http_connection import HttpConnection
from .reply import HttpRequest, Reply

Handler = Callable[[HttpRequest, Reply], Awaitable[None]]


class HttpServer:
    """Listens, and hands each request to `handler` in a task of its own."""

    def __init__(self, handler: Handler) -> None:
        self.handler = handler
        self.stopping = False
        self.connections: set[HttpConnection] = set()
        self.loop = asyncio.get_running_loop()
        self._server: asyncio.Server | None = None

    async def start(self, host: str, port: int) -> int:
        """Listen; answers the port. Raises `OSError`."""
        self._server = await self.loop.create_server(lambda: HttpConnection(self), host, port, backlog=2048)
        return int(self._server.sockets[0].getsockname()[1])

    async def stop(self, grace: float) -> None:
        """No new connections; requests get `grace` seconds to end, then they are ended."""
        self.stopping = True
        if self._server is not None:
            self._server.close()
        for connection in list(self.connections):
            connection.close_if_quiet()
        tasks = self._tasks()
        if tasks:
            await asyncio.wait(tasks, timeout=grace)
        tasks = self._tasks()
        for connection in list(self.connections):
            connection.abort()
        if tasks:
            await asyncio.wait(tasks, timeout=5.0)
        await asyncio.sleep(0)  # connection_lost runs in the loop's next turn

    def _tasks(self) -> list[asyncio.Task[None]]:
        return [connection.task for connection in self.connections if connection.task is not None]
