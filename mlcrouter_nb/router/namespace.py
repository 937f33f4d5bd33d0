"""The names that a policy's code sees, its parameters as they were when the request began."""

import asyncio
from collections.abc import Mapping
from contextvars import ContextVar
from typing import Any

from .parameters import choice, slider, switch

# What the running request sees: values by namespace, so that two policies never mix. A task that a policy starts
# inherits it, for it inherits the context.
_values: ContextVar[tuple["Namespace", Mapping[str, Any]] | None] = ContextVar("policy_values", default=None)

GIVEN = {"slider": slider, "choice": choice, "switch": switch, "asyncio": asyncio}


class Namespace(dict[str, Any]):
    """The globals of a cell's code, without its parameters: Python asks `__missing__` for those.

    So the cell's functions, helpers, classes and comprehensions all read a parameter's value for their request, while
    every other name is an ordinary global that lives as long as the policy."""

    def __init__(self, name: str) -> None:
        super().__init__(GIVEN, __name__=f"policy {name}")
        self.policy = name
        self.current: Mapping[str, Any] = {}

    def __missing__(self, name: str) -> Any:
        seen = _values.get()
        values = seen[1] if seen is not None and seen[0] is self else self.current
        return values[name]

    def hold(self, values: Mapping[str, Any]) -> None:
        """From now on code that runs in this context sees these values."""
        _values.set((self, values))
