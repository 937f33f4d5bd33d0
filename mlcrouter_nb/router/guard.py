"""What one attempt at a request holds, given back once on every way out."""

from __future__ import annotations

import inspect
from collections.abc import Coroutine
from typing import TYPE_CHECKING, Any, TypeVar

if TYPE_CHECKING:
    from .call import Call
    from .endpoint import Endpoint
    from .kv import KV

T = TypeVar("T")


class Lease:
    """A request's share of an engine's load: one in flight, and the prompt tokens that it waits to have prefilled."""

    __slots__ = ("endpoint", "held", "tokens")

    def __init__(self, endpoint: Endpoint, tokens: int) -> None:
        self.endpoint, self.tokens, self.held = endpoint, tokens, True
        endpoint.in_flight += 1
        endpoint.waiting_tokens += tokens

    def prefilled(self) -> None:
        """The prompt is computed: nothing waits any more."""
        self.endpoint.waiting_tokens -= self.tokens
        self.tokens = 0

    def release(self) -> None:
        """Give it back; the second time does nothing."""
        if self.held:
            self.held = False
            self.prefilled()
            self.endpoint.in_flight -= 1


class Guard:
    """Owns the calls, the load and the reserved KV of one attempt.

    `release` is synchronous, so that a cancelled task, a client that leaves and a policy that swallows its cancellation
    all come to the same end. `user` is the id that engines know the attempt by, unique for ever."""

    def __init__(self, user: str) -> None:
        self.user = user
        self.released = False
        self.calls: set[Call] = set()
        self.leases: set[Lease] = set()
        self._verbs: list[Coroutine[Any, Any, Any]] = []
        self.reserved: dict[Endpoint, KV] = {}
        self.reserving: dict[Endpoint, Call | None] = {}  # the prep_recv calls that have begun
        self.sending: dict[
            Endpoint, Call | None
        ] = {}  # the remote_send calls that may be writing into reserved KV

    def own(self, verb: Coroutine[Any, Any, T]) -> Coroutine[Any, Any, T]:
        """A verb that the policy is to await; one that it never does ends with the attempt, without a warning."""
        self._verbs.append(verb)
        return verb

    def lease(self, endpoint: Endpoint, tokens: int) -> Lease:
        """Count the attempt on an engine."""
        lease = Lease(endpoint, tokens)
        self.leases.add(lease)
        return lease

    def give_back(self, lease: Lease) -> None:
        """One lease is over, and everybody sees it."""
        self.leases.discard(lease)
        if lease.held:
            lease.release()
            lease.endpoint.show_load()

    def release(self) -> None:
        """End whatever is open and give all of it back; the second time does nothing.

        Engines that know how to abort are told to. Their transfer calls stay open until they have answered: a broken
        connection would not tell whether KV is still reserved or written."""
        if self.released:
            return
        self.released = True
        for verb in self._verbs:
            if inspect.getcoroutinestate(verb) == inspect.CORO_CREATED:
                verb.close()
        for lease in list(self.leases):
            self.give_back(lease)
        senders = [(endpoint, call) for endpoint, call in self.sending.items() if endpoint.can_abort]
        holders = [
            (endpoint, call)
            for endpoint, call in self.reserving.items()
            if endpoint.can_abort and not (endpoint in self.reserved and self.reserved[endpoint].consumed)
        ]
        kept = {call for _, call in (*senders, *holders)}
        for call in list(self.calls):
            if call not in kept:
                call.close()
        if senders or holders:
            (senders or holders)[0][0].abandon(self.user, senders, holders)
