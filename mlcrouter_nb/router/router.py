"""The router: takes requests, runs their policies, resumes what breaks, and counts."""

import asyncio
import secrets
from collections.abc import Callable, Mapping, Sequence
from itertools import count
from typing import Any

from pydantic import BaseModel

from ..protocol.errors import ArgumentError, RequestError
from ..protocol.openai import ChatCompletionRequest, CompletionRequest, check_body
from ..telemetry import Telemetry
from .delivery import Delivery, Sink
from .endpoint import Endpoint
from .groups import Engines
from .parameters import Parameter
from .policy import Policy, PolicyBook
from .prompts import Encoder, Prompts, Template
from .request import Request
from .request_stream import RequestStream
from .resuming import Attempts, Limits
from .watchdog import Watchdog


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
        self.limits = Limits(resume_limit, backoff_s, stall_s)
        self.draining = False
        self._prompts = Prompts(tokenizer, chat, context_length)
        self._watchdog = Watchdog(self.telemetry)
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
        body = body.model_dump(exclude_unset=True) if isinstance(body, BaseModel) else _checked(body)
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
        self._watchdog.start()
        state, problem = "cancelled", ""
        try:
            await request.prepare()
            delivery = Delivery(request, sink, self.telemetry)
            await Attempts(request, self._engines, delivery, self._prompts, self.limits).run()
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
    ) -> RequestStream:
        """The chunks of a request: `async for chunk in router.stream(...)`, best within `async with`."""
        return RequestStream(self, self.request(body, policy=policy, headers=headers))

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
        self._watchdog.stop()
        for request in list(self._requests):
            request.leave()
        await asyncio.gather(*(endpoint.close() for endpoint in self._endpoints))

    def _show_policy(self, kind: str) -> None:
        self.telemetry.emit(kind, policy=self._policy.view())


def _checked(body: dict[str, Any]) -> dict[str, Any]:
    """The body as it came, but for numbers and truths that were sent as text; raises `RequestError`."""
    known = check_body(ChatCompletionRequest if "messages" in body else CompletionRequest, body)
    texts = {name for name in known.model_fields_set if isinstance(body.get(name), str)}
    return body | {name: getattr(known, name) for name in texts}
