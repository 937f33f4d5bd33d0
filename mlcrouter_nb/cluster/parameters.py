"""`cluster.params.pd_balance_factor = 0.3`: the active policy's parameters as attributes."""

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

from ..protocol.errors import ArgumentError

if TYPE_CHECKING:
    from .cluster import Cluster


class LiveParameters:
    """Reads and sets the parameters of whatever policy is active; a set value holds from the next request on."""

    def __init__(self, cluster: "Cluster") -> None:
        object.__setattr__(self, "_cluster", cluster)

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except ArgumentError as error:
            raise AttributeError(str(error)) from None

    def __setattr__(self, name: str, value: Any) -> None:
        self._cluster.set(**{name: value})

    def __dir__(self) -> list[str]:
        return list(self._values())

    def __iter__(self) -> Iterator[str]:
        return iter(self._values())

    def __getitem__(self, name: str) -> Any:
        values = self._values()
        if name not in values:
            raise ArgumentError(
                f"The active policy has no parameter {name!r}; it has: {', '.join(values) or 'none'}."
            )
        return values[name]

    def __repr__(self) -> str:
        return "<parameters " + ", ".join(f"{name}={value!r}" for name, value in self._values().items()) + ">"

    def _values(self) -> dict[str, Any]:
        policy = self._cluster.status().policy
        return (
            {parameter.name: parameter.value for parameter in policy.parameters} if policy is not None else {}
        )
