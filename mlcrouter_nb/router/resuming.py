"""Attempts: what a preemption or a broken stream has interrupted goes on elsewhere, and what cannot fails with a reason."""

import asyncio
import random
from dataclasses import dataclass

from ..protocol.errors import EngineError
from .delivery import Delivery, Preempted
from .dispatch import attempt
from .endpoint import Endpoint
from .groups import Engines
from .prompts import Prompts
from .request import Request


@dataclass(frozen=True)
class Limits:
    """At most `resume_limit` attempts after the first, `backoff_s` seconds (doubled each time, with jitter) between.

    A policy that does nothing for `stall_s` seconds is ended."""

    resume_limit: int
    backoff_s: float
    stall_s: float


class Attempts:
    """The attempts at one request."""

    def __init__(
        self, request: Request, engines: Engines, delivery: Delivery, prompts: Prompts, limits: Limits
    ) -> None:
        self._request, self._engines, self._delivery = request, engines, delivery
        self._prompts, self._limits = prompts, limits
        self._failed: list[str] = []  # engines that broke a call, the latest last

    async def run(self) -> None:
        """Until one succeeds; raises what the last one raised."""
        request = self._request
        while True:
            try:
                engines = self._engines.without(self._failed)
                return await attempt(request, engines, self._delivery, self._limits.stall_s)
            except (Preempted, EngineError) as error:
                request.guard.release()
                self._check(error)
            await asyncio.sleep(self._limits.backoff_s * 2**request.attempt * random.uniform(0.5, 1.5))
            if not self._prepare():
                return self._delivery.end()

    def _check(self, error: Preempted | EngineError) -> None:
        """Raise `error` again where another attempt is of no use; remember the engine that failed."""
        if self._request.left or self._request.attempt >= self._limits.resume_limit:
            raise error
        if isinstance(error, EngineError):
            if error.engine in self._failed:
                self._failed.remove(error.engine)
            self._failed.append(error.engine)
            again = error.status == 0 or (error.status >= 500 and error.status != 501)
            # An engine that is silent once is silent again: that long a wait is worth it for another only.
            if not again or (error.status == 504 and not self._others(error.engine)):
                raise error
        reason = self._delivery.why_not_resumable()
        if reason:
            raise EngineError(f"{error} It could not go on elsewhere: {reason}.", status=502) from error

    def _others(self, name: str) -> list[Endpoint]:
        """Engines of the same role that have not failed."""
        role = next((e.role for e in self._engines if e.name == name), None)
        return [e for e in self._engines if e.role == role and e.name not in self._failed]

    def _prepare(self) -> bool:
        """Make the next attempt go on after what was sent; False where that is all that was asked for."""
        request, delivery = self._request, self._delivery
        if delivery.begun:
            text, ids, tokens = delivery.sent(self._prompts.tokenizer)
            request.resume(text, ids, tokens)
            if request.max_tokens is not None and request.max_tokens <= 0:
                delivery.finish_with("length")
                return False
            delivery.next_leg(tokens)
        request.next_attempt()
        delivery.telemetry.emit("request_resumed", request=request.id, attempt=request.attempt)
        return True
