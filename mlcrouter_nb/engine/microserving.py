"""The MicroServing calls: prep_recv, remote_send, start_generate; and our own abort.

Source of the wire format: MLC-LLM, `mlc_llm.serve.entrypoints.microserving_entrypoints`."""

import os
import socket
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field

from aiohttp import web
from pydantic import BaseModel

from ..protocol.errors import RequestError
from ..protocol.microserving import (
    PrepRecvRequest,
    PrepRecvResponse,
    RemoteSendRequest,
    StartGenerateRequest,
    decode_kv_metadata,
    encode_kv_metadata,
)
from ..protocol.openai import CompletionRequest, parse_body
from .jobs import Event, Failed, Generation, Job, Reserved, Send, Tokens
from .responses import CompletionShape, Shape
from .service import Inbox, Service

Respond = Callable[[web.Request, Generation, Inbox, CompletionRequest, Shape], Awaitable[web.StreamResponse]]


class AbortRequest(BaseModel):
    """Which request to forget."""

    user: str


@dataclass
class _Reservation:
    """Between prep_recv and the end of its generation."""

    job: Generation
    inbox: Inbox = field(default_factory=Inbox)


def add_microserving(app: web.Application, service: Service, respond: Respond) -> None:
    """Add the routes; `respond` turns a running generation into an answer."""
    calls = MicroServing(service, respond)
    app.router.add_post("/microserving/prep_recv", calls.prep_recv)
    app.router.add_post("/microserving/remote_send", calls.remote_send)
    app.router.add_post("/microserving/start_generate", calls.start_generate)
    app.router.add_post("/microserving/abort", calls.abort)


class MicroServing:
    """The calls of one engine. A request's id is its `user`, the same in all three calls."""

    def __init__(self, service: Service, respond: Respond) -> None:
        self._service = service
        self._respond = respond
        self._reservations: dict[str, _Reservation] = {}
        self._sends: dict[str, tuple[Send, Inbox]] = {}

    async def prep_recv(self, request: web.Request) -> web.Response:
        """Reserve KV for `prompt[:end]`; answers where it goes and how much of it was there already."""
        body = parse_body(PrepRecvRequest, await request.read())
        prompt = await self._service.prompt_of(body)
        user = self._new_user(body.user, self._reservations)
        end = _from_start(body.end, len(prompt), "end")
        if end >= len(prompt):
            raise RequestError(
                f"'end' is {body.end}; it must leave a token of the {len(prompt)} to prefill.", param="end"
            )
        if end > 0:
            self._world()
        job = self._service.generation(body, prompt, lambda event: self._hear(user, event), window_end=end)
        reservation = self._reservations[user] = _Reservation(job)
        self._service.worker.submit(job)
        try:
            reserved = await reservation.inbox.get()
        except BaseException:
            self._forget(user, reservation)
            raise
        if not isinstance(reserved, Reserved):
            raise RequestError("The request was started before it was reserved.", status=409)
        return web.json_response(
            PrepRecvResponse(
                kv_append_metadata=encode_kv_metadata(reserved.segments),
                prefix_matched_length=reserved.matched,
            ).model_dump()
        )

    async def remote_send(self, request: web.Request) -> web.Response:
        """Prefill `prompt[:end]` and write KV of `[begin, end)` into a peer; answers when it is there."""
        body = parse_body(RemoteSendRequest, await request.read())
        prompt = await self._service.prompt_of(body.model_copy(update={"n": 1}))
        user = self._new_user(body.user, self._sends)
        begin, end = _from_start(body.begin, len(prompt), "begin"), _from_start(body.end, len(prompt), "end")
        if not begin < end < len(prompt):
            raise RequestError(
                f"The window {body.begin} to {body.end} must not be empty and must end before the prompt's last of "
                f"{len(prompt)} tokens.",
                param="end",
            )
        segments = decode_kv_metadata(body.kv_addr_info)
        if sum(length for _, length in segments) != end - begin:
            raise RequestError(
                f"kv_addr_info has room for {sum(length for _, length in segments)} tokens, the window has {end - begin}.",
                param="kv_addr_info",
            )
        rank, num_pes = self._world()
        if not 0 <= body.recv_rank < num_pes or body.recv_rank == rank:
            raise RequestError(
                f"recv_rank is {body.recv_rank}; it must be another engine's than {rank}, below {num_pes}.",
                param="recv_rank",
            )
        inbox = Inbox()
        job = Send(
            tokens=prompt,
            target=end,
            listener=inbox.put,
            begin=begin,
            segments=[len(segments), *(number for segment in segments for number in segment)],
            recv_rank=body.recv_rank,
            is_wanted=lambda: _client_waits(request),
        )
        self._sends[user] = job, inbox
        try:
            async with self._service.running(job):
                await inbox.get()
        finally:
            del self._sends[user]
        return web.json_response({})

    async def start_generate(self, request: web.Request) -> web.StreamResponse:
        """Prefill `prompt[begin:]` behind the received KV and generate, with the sampling of prep_recv's body."""
        body = parse_body(StartGenerateRequest, await request.read())
        prompt = await self._service.prompt_of(body)
        reservation = self._reservations.get(body.user or "")
        if reservation is None:
            raise RequestError(
                f"There is no prepared request {body.user!r}: call prep_recv with this 'user' first "
                "(its KV is freed when it is not started in time).",
                status=404,
                param="user",
                code="unknown_request",
            )
        job = reservation.job
        if prompt != job.tokens[: job.prompt_length]:
            raise RequestError(
                "The prompt differs from the one that prep_recv was called with.", param="prompt"
            )
        begin = _from_start(body.begin, len(prompt), "begin")
        if begin >= len(prompt):
            raise RequestError(
                f"'begin' is {body.begin}; at least one token must be left to prefill.", param="begin"
            )
        worker = self._service.worker
        try:
            await worker.call(lambda: worker.scheduler.start(job, begin))
        except RequestError:
            raise  # not started by this call, so not ours to end
        except BaseException:
            self._forget(body.user or "", reservation)
            raise
        try:
            shape = CompletionShape(self._service.model, id=body.user or "")
            return await self._respond(request, job, reservation.inbox, body, shape)
        finally:
            self._forget(body.user or "", reservation)

    async def abort(self, request: web.Request) -> web.Response:
        """Forget a request, wherever it is. When this answers, the engine writes no more KV for it."""
        user = parse_body(AbortRequest, await request.read()).user
        reservation, send = self._reservations.get(user), self._sends.get(user)
        jobs: list[Job] = [*([reservation.job] if reservation else []), *([send[0]] if send else [])]
        if jobs:
            worker = self._service.worker
            await worker.call(lambda: worker.scheduler.abort(*jobs))
        aborted = Failed(RequestError("The request was aborted.", status=409, code="aborted"))
        if reservation:
            self._reservations.pop(user, None)
            reservation.inbox.put(aborted)
        if send:
            send[1].put(aborted)
        return web.json_response({})

    def _hear(self, user: str, event: Event) -> None:
        """Pass on an event; a reservation that failed or a generation that ended is known no more."""
        reservation = self._reservations.get(user)
        if reservation is None:
            return
        reservation.inbox.put(event)
        if isinstance(event, Failed) or (isinstance(event, Tokens) and event.finish_reason):
            del self._reservations[user]

    def _forget(self, user: str, reservation: _Reservation) -> None:
        self._service.worker.abort(reservation.job)
        if self._reservations.get(user) is reservation:
            del self._reservations[user]

    def _new_user(
        self, user: str | None, known: dict[str, _Reservation] | dict[str, tuple[Send, Inbox]]
    ) -> str:
        if not user:
            raise RequestError(
                "'user' is missing: the MicroServing calls carry the request's id in it.", param="user"
            )
        if user in known:
            raise RequestError(f"There is a request {user!r} already; ids are used once.", param="user")
        return user

    def _world(self) -> tuple[int, int]:
        """`(own rank, number of PEs)`."""
        if self._service.world is None:
            raise RequestError(
                "This engine was started alone, and KV can be sent between engines of one world only: use a policy of "
                "one engine (round-robin), let the router start the engines, or start them with "
                "MLC_NVSHMEM_INIT_CONFIG_JSON_STR, as mlcrouter-nb serve --help shows."
            )
        return self._service.world


def _client_waits(request: web.Request) -> bool:
    """Whether the client is still there, as the system knows it: after this process was stopped for a while, the
    event loop hears of a leave only after it was given the request."""
    transport = request.transport
    if transport is None or transport.is_closing():
        return False
    try:
        with socket.socket(fileno=os.dup(transport.get_extra_info("socket").fileno())) as connection:
            return connection.recv(1, socket.MSG_PEEK | socket.MSG_DONTWAIT) != b""
    except BlockingIOError:
        return True
    except OSError:
        return False


def _from_start(position: int, length: int, param: str) -> int:
    """A position in the prompt; negative ones count from its end."""
    if not -length <= position <= length:
        raise RequestError(f"'{param}' is {position}, outside the prompt of {length} tokens.", param=param)
    return position + length if position < 0 else position
