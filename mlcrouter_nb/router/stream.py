"""A stream to come: what `start_generate` and `complete` answer, and what a policy returns or iterates."""

from __future__ import annotations

from collections.abc import AsyncIterator, Awaitable, Callable
from typing import TYPE_CHECKING, Any

from ..protocol.errors import MlcRouterError
from .call import Call
from .chunks import Chunk
from .guard import Lease

if TYPE_CHECKING:
    from .endpoint import Endpoint
    from .kv import KV
    from .request import Request


class Stream:
    """Chunks from one engine. The call begins when the stream is first read, by the policy or by the router.

    Returned or yielded whole it costs least: the router then takes the chunks where they arrive."""

    def __init__(
        self, endpoint: Endpoint, request: Request, verb: str, path: str, fields: dict[str, Any],
        window: tuple[int, int] | None, kv: KV | None,
    ) -> None:  # fmt: skip
        self.endpoint = endpoint
        self._request, self._verb, self._path, self._fields = request, verb, path, fields
        self._window, self._kv = window, kv
        self._call: Call | None = None
        self._begun = False

    async def __aiter__(self) -> AsyncIterator[Chunk]:
        call = await self._open()
        async for chunk in call:
            yield chunk
        self._consumed()

    async def pass_on(self, deliver: Callable[[Chunk], bool], ready: Callable[[], Awaitable[None]]) -> None:
        """Hand each chunk to `deliver` where its bytes arrive; this task only waits for the end.

        Where `deliver` answers False nothing more is read until `ready` has returned."""
        call = await self._open()
        while not await call.pump(deliver):
            await ready()
        self._consumed()

    def close(self) -> None:
        """Leave the stream: the engine stops and frees its KV."""
        self._begun = True
        if self._call is not None:
            self._call.close()

    async def _open(self) -> Call:
        if self._begun:
            raise MlcRouterError(f"the stream of {self._verb} on {self.endpoint.name} was already read.")
        self._begun = True
        guard = self._request.guard
        lease = self._lease()
        try:
            self._call = await self.endpoint.open(
                self._request,
                self._verb,
                self._path,
                self._fields,
                self._window,
                lease,
                lambda: self._first(lease),
            )
            await self._call.opened()
        except BaseException:
            guard.give_back(lease)
            if self._call is not None:
                self._call.close()
            raise
        return self._call

    def _lease(self) -> Lease:
        """What prep_recv has counted goes on; a call of its own is counted now."""
        if self._kv is not None:
            return self._kv.lease
        return self._request.guard.lease(self.endpoint, self._request.known_length)

    def _first(self, lease: Lease) -> None:
        lease.prefilled()
        self.endpoint.show_load()

    def _consumed(self) -> None:
        if self._kv is not None:
            self._kv.consumed = True

    def __repr__(self) -> str:
        return f"<stream of {self._verb} on {self.endpoint.name}>"
