"""The router: takes requests, runs their policies, resumes what breaks, and counts."""

import asyncio
import random
import secrets
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from itertools import count
from types import TracebackType
from typing import Any

from pydantic import BaseModel

from ..protocol.errors import ArgumentError, EngineError, RequestError
from ..protocol.openai import ChatCompletionRequest, CompletionRequest, check_body
from ..telemetry import RequestTrace, Telemetry
from .chunks import Chunk
from .delivery import Delivery, Preempted, Sink
from .dispatch import attempt
from .endpoint import Endpoint
from .groups import Engines
from .parameters import Parameter
from .policy import Policy, PolicyBook
from .prompts import Encoder, Prompts, Template
from .request import Request
from .sinks import QueueSink


class Router:
    """Dispatches requests to endpoints that exist; everything but `use` and `set` runs on one event loop.

    `tokenizer` makes the model's tokenizer when a prompt's tokens are first needed; `chat` is its template; `model` is
    the only name that requests may ask for (None: any). A request is resumed at most `resume_limit` times. A policy
    that does nothing for `stall_s` seconds is ended."""

    def __init__(
        self,
        endpoints: Sequence[Endpoint],
        *,
        telemetry: Telemetry | None = None,
        book: PolicyBook | None = None,
        tokenizer: Callable[[], Encoder] | None = None,
        chat: Template | None = None,
        model: str | None = None,
        context_length: int | None = None,
        resume_limit: int = 3,
        stall_s: float = 180.0,
        backoff_s: float = 0.05,
    ) -> None:
        self.telemetry = telemetry or Telemetry()
        self.book = book or PolicyBook()
        self.model = model
        self.resume_limit, self.stall_s, self.backoff_s = resume_limit, stall_s, backoff_s
        self.draining = False
        self._prompts = Prompts(tokenizer, chat, context_length)
        self._endpoints = list(endpoints)
        for endpoint in self._endpoints:
            endpoint.telemetry = self.telemetry
            state = "ready" if endpoint.available else "starting"
            self.telemetry.emit(
                "engine_state", engine=endpoint.name, role=endpoint.role, url=endpoint.url, state=state
            )
        self._engines = Engines(self._endpoints)
        self._ids, self._run = count(1), secrets.token_hex(4)
        self._requests: set[Request] = set()
        self._quiet = asyncio.Event()
        self._quiet.set()
        roles = {endpoint.role for endpoint in self._endpoints}
        self._policy = self.book.get("disagg" if roles >= {"prefill", "decode"} else "round-robin")
        self._show_policy("policy_changed")

    # Policies

    @property
    def endpoints(self) -> list[Endpoint]:
        """All engines, in order."""
        return list(self._endpoints)

    @property
    def policy(self) -> Policy:
        """The active policy."""
        return self._policy

    @property
    def parameters(self) -> dict[str, Parameter]:
        """The active policy's parameters."""
        return self._policy.parameters

    def use(self, policy: str | Policy, **values: Any) -> Policy:
        """Make a policy active, with these values; requests in flight finish under the old one."""
        chosen = policy if isinstance(policy, Policy) else self.book.get(policy)
        chosen.set(**values)
        if isinstance(policy, Policy):
            self.book.define(policy)
        self._policy = chosen
        self._show_policy("policy_changed")
        return chosen

    def set(self, **values: Any) -> None:
        """Set parameters of the active policy; the next request sees them. Raises `ArgumentError`."""
        if not values:
            raise ArgumentError("set takes parameters, such as pd_balance_factor=0.3.")
        self._policy.set(**values)
        self._show_policy("parameter_changed")

    # Requests

    def request(
        self,
        body: CompletionRequest | ChatCompletionRequest | dict[str, Any],
        *,
        policy: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> Request:
        """Check a request and let it in; `run` must follow.

        Raises `RequestError` for a bad body, a model that is not served, or while the router stops."""
        if self.draining:
            raise RequestError("The router is stopping.", status=503, type="server_error", code="stopping")
        if isinstance(body, BaseModel):
            body = body.model_dump(exclude_unset=True)
        else:
            check_body(ChatCompletionRequest if "messages" in body else CompletionRequest, body)
        if self.model is not None and body.get("model") not in (None, self.model):
            raise RequestError(
                f"The model '{body['model']}' is not served here; there is: {self.model}.",
                status=404, param="model", code="model_not_found",
            )  # fmt: skip
        chosen = self._policy if policy is None else self.book.get(policy)
        request = Request(f"cmpl-{self._run}{next(self._ids):x}", body, headers or {}, chosen, self._prompts)
        if chosen.last_used != request.values:
            chosen.last_used = request.values
            if chosen is self._policy:
                self._show_policy("parameter_changed")
        self._requests.add(request)
        self._quiet.clear()
        self.telemetry.begin(request.trace)
        return request

    async def run(self, request: Request, sink: Sink) -> Delivery:
        """Serve a request into `sink`, in the caller's task: cancelling it ends the request.

        Raises `RequestError`, `EngineError` or `PolicyError`; whatever happens, nothing stays held."""
        state, problem = "cancelled", ""
        try:
            delivery = Delivery(request, sink, self.telemetry)
            await self._attempts(request, delivery)
            delivery.total_usage()
            state = "finished"
            return delivery
        except Exception as error:
            state, problem = ("cancelled", "") if request.left else ("failed", str(error))
            raise
        finally:
            self.forget(request, state, problem)

    def forget(self, request: Request, state: str = "cancelled", problem: str = "") -> None:
        """A request is over, run or not; the second time does nothing."""
        request.leave()
        self._requests.discard(request)
        if not self._requests:
            self._quiet.set()
        self.telemetry.finish(request.trace, state, problem)

    def stream(
        self,
        body: CompletionRequest | ChatCompletionRequest | dict[str, Any],
        *,
        policy: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> "RequestStream":
        """The chunks of a request: `async for chunk in router.stream(...)`, best within `async with`."""
        return RequestStream(self, self.request(body, policy=policy, headers=headers))

    async def _attempts(self, request: Request, delivery: Delivery) -> None:
        failed: list[str] = []
        while True:
            try:
                return await attempt(request, self._engines.without(failed), delivery, self.stall_s)
            except (Preempted, EngineError) as error:
                request.guard.release()
                self._check_resume(request, delivery, error, failed)
            await asyncio.sleep(self.backoff_s * 2**request.attempt * random.uniform(0.5, 1.5))
            if not self._next_attempt(request, delivery):
                return delivery.end()

    def _check_resume(
        self, request: Request, delivery: Delivery, error: Exception, failed: list[str]
    ) -> None:
        """Raise `error` again where another attempt is of no use; remember the engine that failed."""
        if request.left or request.attempt >= self.resume_limit:
            raise error
        if isinstance(error, EngineError):
            again = error.status == 0 or error.status >= 500
            if error.engine in failed:
                failed.remove(error.engine)
            failed.append(error.engine)
            alone = not any(e.available and e.name not in failed for e in self._peers(error.engine))
            if not again or error.status == 501 or (alone and error.status == 504):
                raise error
        reason = delivery.why_not_resumable()
        if reason:
            raise EngineError(f"{error} It could not go on elsewhere: {reason}.", status=502) from error

    def _peers(self, name: str) -> list[Endpoint]:
        role = next((e.role for e in self._endpoints if e.name == name), None)
        return [e for e in self._endpoints if e.role == role]

    def _next_attempt(self, request: Request, delivery: Delivery) -> bool:
        """Prepare the next attempt; False where the client has got all that it asked for."""
        if delivery.begun:
            text, ids, tokens = delivery.sent(self._prompts.tokenizer)
            request.resume(text, ids, tokens)
            if request.max_tokens is not None and request.max_tokens <= 0:
                delivery.finish_with("length")
                return False
            delivery.next_leg(tokens)
        request.next_attempt()
        self.telemetry.emit("request_resumed", request=request.id, attempt=request.attempt)
        return True

    # The end

    async def drain(self, deadline_s: float | None = None) -> bool:
        """Let nothing in any more and wait for what runs; False where the deadline comes first."""
        self.draining = True
        try:
            async with asyncio.timeout(deadline_s):
                await self._quiet.wait()
        except TimeoutError:
            return False
        return True

    async def close(self) -> None:
        """Leave all requests and close all connections."""
        self.draining = True
        for request in list(self._requests):
            request.leave()
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    def _show_policy(self, kind: str) -> None:
        self.telemetry.emit(kind, policy=self._policy.view())


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

    async def __aenter__(self) -> "RequestStream":
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
