"""Engines as a policy sees them: by role, by name, by load."""

import random
from collections.abc import Callable, Iterator, Sequence
from itertools import count
from typing import Any, overload

from ..protocol.errors import ArgumentError, MlcRouterError, RequestError
from .endpoint import Endpoint


class Group(Sequence[Endpoint]):
    """Engines to choose from; those that are not available are left out."""

    def __init__(self, title: str, endpoints: Sequence[Endpoint]) -> None:
        self._title = title
        self._endpoints = endpoints
        self._turns, self._ties = count(), count()

    @property
    def members(self) -> list[Endpoint]:
        """Those that may be chosen now; raises `RequestError` (503) where there is none."""
        members = [endpoint for endpoint in self._endpoints if endpoint.available]
        if not members:
            raise RequestError(
                f"No {self._title + ' ' if self._title else ''}engine is ready.",
                status=503,
                type="server_error",
                code="no_engine",
            )
        return members

    def least_loaded(self, by: "str | Callable[[Endpoint], float]" = "in_flight") -> Endpoint:
        """The one with the least load; equals take turns.

        `by` is "in_flight" (requests), "waiting_tokens" (prompt tokens not yet prefilled), or a function of an engine."""
        if isinstance(by, str) and by not in ("in_flight", "waiting_tokens"):
            raise MlcRouterError(f"least_loaded(by={by!r}): it knows 'in_flight' and 'waiting_tokens'.")
        members = self.members
        first = next(self._ties) % len(members)
        turned = members[first:] + members[:first]
        if isinstance(by, str):
            name = by
            return min(turned, key=lambda endpoint: getattr(endpoint, name))
        return min(turned, key=by)

    def round_robin(self) -> Endpoint:
        """The next in turn."""
        members = self.members
        return members[next(self._turns) % len(members)]

    def random(self) -> Endpoint:
        """Any of them."""
        return random.choice(self.members)

    def without(self, names: Sequence[str]) -> "Group":
        """The group less some engines; where none would be left, those named first are forgiven. Turns go on."""
        for forgiven in range(len(names) + 1):
            left = [endpoint for endpoint in self._endpoints if endpoint.name not in names[forgiven:]]
            if any(endpoint.available for endpoint in left):
                break
        group = Group(self._title, left)
        group._turns, group._ties = self._turns, self._ties
        return group

    def __iter__(self) -> Iterator[Endpoint]:
        return iter([endpoint for endpoint in self._endpoints if endpoint.available])

    def __len__(self) -> int:
        return sum(endpoint.available for endpoint in self._endpoints)

    @overload
    def __getitem__(self, index: int) -> Endpoint: ...
    @overload
    def __getitem__(self, index: slice) -> Sequence[Endpoint]: ...
    def __getitem__(self, index: int | slice) -> Endpoint | Sequence[Endpoint]:
        return list(self)[index]

    def __repr__(self) -> str:
        title = f"{self._title} " if self._title else ""
        return f"<{title}engines: {', '.join(endpoint.name for endpoint in self)}>"


class Engines:
    """`prefill`, `decode` and `all`; one by its name. Without roles the three are the same group."""

    def __init__(self, endpoints: Sequence[Endpoint]) -> None:
        self.all = Group("", endpoints)
        self.prefill = self.decode = self.all
        if any(endpoint.role for endpoint in endpoints):
            self.prefill = Group("prefill", [e for e in endpoints if e.role == "prefill"])
            self.decode = Group("decode", [e for e in endpoints if e.role == "decode"])

    def without(self, names: Sequence[str]) -> "Engines":
        """For a second attempt: not again the engines that have just failed, where there are others."""
        if not names:
            return self
        engines = Engines(())
        engines.all = self.all.without(names)
        same = self.prefill is self.all
        engines.prefill = engines.all if same else self.prefill.without(names)
        engines.decode = engines.all if same else self.decode.without(names)
        return engines

    def __getitem__(self, name: str | int) -> Endpoint:
        """An engine by name, or by its place among all."""
        if isinstance(name, int):
            return self.all[name]
        for endpoint in self.all:
            if endpoint.name == name:
                return endpoint
        known = ", ".join(endpoint.name for endpoint in self.all) or "none"
        raise ArgumentError(f"there is no engine '{name}' that is ready; there are: {known}.")

    def __getattr__(self, name: str) -> Any:
        raise AttributeError(
            f"engines has no '{name}'; an engine is found by its name: engines[\"{name}\"].",
            name=name,
            obj=self,
        )

    def __iter__(self) -> Iterator[Endpoint]:
        return iter(self.all)

    def __len__(self) -> int:
        return len(self.all)

    def __repr__(self) -> str:
        return f"<Engines {' '.join(endpoint.name for endpoint in self)}>"
