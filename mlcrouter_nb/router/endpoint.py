"""An engine as the router sees it: the verbs that policies call, and its load."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from functools import partial
from typing import TYPE_CHECKING, Any

from ..protocol.errors import EngineError, MlcRouterError
from ..telemetry import CallTrace, Telemetry
from .aborting import ABORT_S, Held, abandon
from .call import Call
from .connections import Pool
from .guard import Guard, Lease
from .kv import KV, check_reserved, whole
from .stream import Stream

if TYPE_CHECKING:
    from .request import Request

# A call may take as long as a slow engine needs for the tokens ahead of it, where that is longer than its deadline. Engines
# keep reserved KV for longer than the longest wait (`engine.scheduler.RECEIVE_DEADLINE_S`): it is written until then.
SLOWEST_TOKENS_PER_S = 50.0
LONGEST_QUEUE_S = 480.0


class Endpoint:
    """One engine: the verbs, its load, its connections.

    `kind` is "cpu", "mlc" or "attach"; `rank` its first worker in the NVSHMEM world; `role` "prefill", "decode" or
    None. `in_flight` counts requests that hold it, `waiting_tokens` prompt tokens not yet prefilled. An endpoint that
    is not `available` is not chosen. Deadlines are in seconds."""

    def __init__(
        self,
        name: str,
        url: str,
        role: str | None = None,
        kind: str = "attach",
        rank: int = 0,
        model: str | None = None,
        *,
        connect_s: float = 5.0,
        transfer_s: float = 60.0,
        idle_s: float = 120.0,
    ) -> None:
        self.name, self.url, self.role = name, url.rstrip("/"), role
        self.kind, self.rank, self.model = kind, rank, model
        self.available = True
        self.in_flight = 0
        self.waiting_tokens = 0
        self.telemetry: Telemetry | None = None
        self.transfer_s, self.idle_s = transfer_s, idle_s
        self._pool = Pool(name, self.url, connect_s)
        self._aborts: set[asyncio.Task[None]] = set()

    # The verbs

    def prep_recv(self, request: Request, *, end: int = -1) -> Coroutine[Any, Any, KV]:
        """Reserve KV here for the prompt's window [0, end); a negative `end` counts from the prompt's end.

        Raises `EngineError` when the engine refuses or does not answer in time."""
        return request.guard.own(self._prep_recv(request, end))

    async def _prep_recv(self, request: Request, end: int) -> KV:
        end = whole("prep_recv", "end", end)
        length = len(request.prompt)
        stop = end if end >= 0 else length + end
        if not 0 <= stop < length:
            raise MlcRouterError(
                f"prep_recv: end={end} is outside the prompt; it must lie in 0 to {length - 1}, or -{length} to -1."
            )
        guard = request.guard
        if self in guard.reserving:
            raise MlcRouterError(f"prep_recv was called twice on {self.name} for one request.")
        lease = guard.lease(self, length - stop)
        guard.reserving[self] = None
        try:
            answer = await self._ask(request, "prep_recv", {"end": end}, (0, stop), None, guard.reserving)
            try:
                told = check_reserved(answer, stop, length)
            except ValueError as error:
                raise self._nonsense("prep_recv", json.dumps(answer).encode()) from error
        except BaseException:
            guard.give_back(lease)
            raise
        if guard.released:
            raise MlcRouterError("the request is over.")
        matched = told.prefix_matched_length
        kv = guard.reserved[self] = KV(self, matched, max(stop, matched), told.kv_append_metadata, lease)
        return kv

    def remote_send(
        self, request: Request, kv: KV, *, begin: int | None = None, end: int | None = None
    ) -> Coroutine[Any, Any, None]:
        """Prefill the window here and write its KV into `kv`'s engine; returns once it has arrived there.

        The window is [kv.prefix_matched_length, kv.end) unless told otherwise; an empty one returns at once."""
        return request.guard.own(self._remote_send(request, kv, begin, end))

    async def _remote_send(self, request: Request, kv: KV, begin: int | None, end: int | None) -> None:
        begin = None if begin is None else whole("remote_send", "begin", begin)
        end = None if end is None else whole("remote_send", "end", end)
        length = len(request.prompt)
        first = kv.prefix_matched_length if begin is None else begin if begin >= 0 else length + begin
        stop = kv.end if end is None else end if end >= 0 else length + end
        if first >= stop:
            return
        if kv.endpoint is self:
            raise MlcRouterError(
                f"{self.name} cannot send KV to itself; take different engines for prefill and decode, "
                "for instance with roles 1P1D."
            )
        if (first, stop) != (kv.prefix_matched_length, kv.end):
            raise MlcRouterError(
                f"remote_send: the window [{first}, {stop}) is not what {kv.endpoint.name} has reserved, "
                f"[{kv.prefix_matched_length}, {kv.end})."
            )
        guard = request.guard
        fields = {
            "begin": first, "end": stop, "kv_addr_info": kv.metadata, "recv_rank": kv.endpoint.rank,
            "n": 1,
        }  # fmt: skip
        lease = guard.lease(self, stop - first)
        guard.sending[self] = None
        try:
            await self._ask(request, "remote_send", fields, (first, stop), lease, guard.sending)
        finally:
            guard.give_back(lease)
        del guard.sending[self]

    def start_generate(self, request: Request, *, begin: int) -> Stream:
        """The stream of a request whose KV before `begin` is here: prefills the rest and generates.

        A `begin` before the match starts at the match; a negative one counts from the prompt's end."""
        kv = request.guard.reserved.get(self)
        if kv is None:
            raise MlcRouterError(
                f"start_generate on {self.name} needs an earlier prep_recv on {self.name} for this request."
            )
        if kv.started:
            raise MlcRouterError(f"start_generate was called twice on {self.name} for one request.")
        begin = whole("start_generate", "begin", begin)
        length = len(request.prompt)
        first = max(begin if begin >= 0 else length + begin, kv.prefix_matched_length)
        if first > max(kv.end, kv.prefix_matched_length) or first >= length:
            raise MlcRouterError(
                f"start_generate: begin={begin} leaves a gap; {self.name} holds the KV up to {kv.end} of {length} tokens."
            )
        kv.started = True
        fields = request.microserving_fields(self.kind) | {"begin": first}
        return Stream(
            self, request, "start_generate", "/microserving/start_generate", fields, (first, length), kv
        )

    def complete(self, request: Request) -> Stream:
        """The stream of a request that this engine serves alone."""
        path, fields = request.complete_fields()
        return Stream(self, request, "complete", path, fields, None, None)

    # What the router uses

    async def open(
        self, request: Request, verb: str, path: str, fields: dict[str, Any], window: tuple[int, int] | None,
        lease: Lease | None, on_first: Callable[[], None] | None = None,
    ) -> Call:  # fmt: skip
        """Begin a call that the request's guard owns; its end gives the lease back, if one is given."""
        guard = request.guard
        if guard.released:
            raise MlcRouterError("the request is over; no more calls can be made for it.")
        trace = self._begin_trace(request, verb, window)
        idle_s = max(self.idle_s, self._queue_s(request.known_length))
        call = Call(
            self.name, verb, idle_s, on_first or _nothing, partial(self._ended, request, guard, trace, lease)
        )
        guard.calls.add(call)
        try:
            await self._pool.send(call, path, json.dumps(fields, ensure_ascii=False).encode())
        except BaseException as error:
            left = EngineError(f"The call to {self.name} was left.", engine=self.name, status=499)
            call.fail(error if isinstance(error, EngineError) else left)
            raise
        return call

    def _ended(
        self, request: Request, guard: Guard, trace: CallTrace, lease: Lease | None, call: Call
    ) -> None:
        guard.calls.discard(call)
        if lease is not None:
            guard.leases.discard(lease)
            lease.release()
        trace.end_time = request.trace.clock()
        if call.error is not None:
            trace.error = str(call.error)
        request.progress = call.ended_at
        if self.telemetry is not None:
            self.telemetry.emit(
                "call_finished", request=request.id, engine=self.name, verb=trace.verb, error=trace.error,
                in_flight=self.in_flight, waiting_tokens=self.waiting_tokens,
            )  # fmt: skip

    def _begin_trace(self, request: Request, verb: str, window: tuple[int, int] | None) -> CallTrace:
        """Note that a call begins."""
        trace = CallTrace(verb, self.name, request.trace.clock(), window=window)
        request.trace.calls.append(trace)
        if self.telemetry is not None:
            self.telemetry.emit(
                "call_started", request=request.id, engine=self.name, verb=verb, window=window,
                in_flight=self.in_flight, waiting_tokens=self.waiting_tokens,
            )  # fmt: skip
        return trace

    def show_load(self) -> None:
        """Tell the telemetry how much this engine carries."""
        if self.telemetry is not None:
            self.telemetry.emit(
                "engine_load", engine=self.name, in_flight=self.in_flight, waiting_tokens=self.waiting_tokens
            )

    def abandon(self, user: str, senders: Held, holders: Held) -> None:
        """Free what engines hold for an attempt, in a task that `close` waits for."""
        task = asyncio.get_running_loop().create_task(abandon(user, senders, holders))
        self._aborts.add(task)
        task.add_done_callback(self._aborts.discard)

    @property
    def can_abort(self) -> bool:
        """Whether the engine knows `POST /microserving/abort`, which is ours."""
        return self.kind == "cpu"

    async def ask(self, path: str, body: bytes | None = None, deadline_s: float = 2.0) -> tuple[int, bytes]:
        """Status and body of a call that belongs to no request: POST, or GET where `body` is None.

        Raises `EngineError`."""
        call = Call(self.name, path, deadline_s, _nothing, _nothing)
        try:
            async with asyncio.timeout(deadline_s):
                await self._pool.send(call, path, body)
                answer = await call.body()
        except TimeoutError as error:
            problem = f"{self.name} did not answer within {deadline_s:g} s."
            raise EngineError(problem, engine=self.name, status=504) from error
        finally:
            call.close()
        return call.status, answer

    async def close(self) -> None:
        """Let the last aborts go out, then close all connections."""
        if self._aborts:
            await asyncio.wait(self._aborts, timeout=ABORT_S)
        for task in list(self._aborts):
            task.cancel()
        await asyncio.gather(*self._aborts, return_exceptions=True)
        self._pool.close()

    async def _ask(
        self,
        request: Request,
        verb: str,
        fields: dict[str, Any],
        window: tuple[int, int],
        lease: Lease | None,
        mine: dict[Endpoint, Call | None],
    ) -> dict[str, Any]:
        """One of the two calls that answer JSON, within the deadline for transfers; `mine` is told the call."""
        fields = request.microserving_fields(self.kind) | fields
        call: Call | None = None
        patience = max(self.transfer_s, self._queue_s(len(request.prompt)))
        try:
            async with asyncio.timeout(patience) as scope:
                call = await self.open(request, verb, f"/microserving/{verb}", fields, window, lease)
                mine[self] = call
                body = await call.body()
        except TimeoutError as error:
            if not scope.expired():
                raise
            problem = f"{self.name} did not answer {verb} within {patience:.3g} s."
            raise EngineError(problem, engine=self.name, status=504) from error
        finally:
            if call is not None and not self.can_abort:  # else the guard ends it in order
                call.close()
        if call.status == 404 and self.kind == "attach":
            raise EngineError(
                f"{self.name} at {self.url} does not know {verb}; a policy that disaggregates needs MicroServing "
                "engines, or choose a one-engine policy such as round-robin.",
                engine=self.name,
                status=501,
            )
        if call.status != 200:
            raise call.refusal(body)
        try:
            answer = json.loads(body)
            if not isinstance(answer, dict):
                raise ValueError("not an object")
        except ValueError as error:
            raise self._nonsense(verb, body) from error
        return answer

    def _queue_s(self, tokens: int) -> float:
        """Seconds that a call with a prompt of `tokens` may have to wait for others: a queue is no failure."""
        ahead = max(self.waiting_tokens, self.in_flight * tokens)
        return min(ahead / SLOWEST_TOKENS_PER_S, LONGEST_QUEUE_S)

    def _nonsense(self, verb: str, body: bytes) -> EngineError:
        start = body[:200].decode(errors="replace")
        problem = f"{self.name} answered {verb} with something that it does not define: {start}"
        return EngineError(problem, engine=self.name, status=502, body=body)

    def __repr__(self) -> str:
        return f"<{self.name} {self.role or 'engine'} at {self.url}, {self.in_flight} in flight>"


def _nothing(*_: Any) -> None:
    """For calls that nobody counts."""
