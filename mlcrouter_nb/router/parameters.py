"""Parameters of a policy: module-level names of its cell that the panel shows as controls."""

from collections.abc import Iterable
from typing import Any

from ..protocol.errors import ArgumentError
from ..telemetry.views import ParameterView


class Parameter:
    """A value that a person may change while requests run; a request sees the one that held when it began."""

    kind = "parameter"
    value: Any

    def check(self, name: str, value: Any) -> Any:
        """The value as the policy will see it; raises `ArgumentError` where it does not fit."""
        raise NotImplementedError

    def view(self, name: str, value: Any, last_used: Any = None) -> ParameterView:
        """What the panel needs to draw the control."""
        return ParameterView(name=name, kind=self.kind, value=value, last_used=last_used)


class Slider(Parameter):
    """A number from `low` to `high`; whole numbers only where all of its numbers are whole."""

    kind = "slider"

    def __init__(self, low: float, high: float, value: float | None, step: float | None) -> None:
        numbers = [x for x in (low, high, value, step) if x is not None]
        for number in numbers:
            if isinstance(number, bool) or not isinstance(number, int | float) or number != number:
                raise ArgumentError(f"slider takes numbers, not {number!r}.")
        if not low < high:
            raise ArgumentError(f"slider({low}, {high}) is empty; the low end must be below the high end.")
        if step is not None and step <= 0:
            raise ArgumentError(f"step is {step}; it must be above 0.")
        self.low, self.high = low, high
        self.whole = all(isinstance(x, int) for x in numbers)
        self.step = step if step is not None else (1 if self.whole else (high - low) / 100)
        self.value = self.check("value", low if value is None else value)

    def check(self, name: str, value: Any) -> float:
        if isinstance(value, bool) or not isinstance(value, int | float):
            raise ArgumentError(f"{name} is {value!r}; it takes a number from {self.low} to {self.high}.")
        if not self.low <= value <= self.high:
            raise ArgumentError(f"{name} is {value}; it must lie between {self.low} and {self.high}.")
        if not self.whole:
            return float(value)
        if value != int(value):
            raise ArgumentError(f"{name} is {value}; it takes a whole number.")
        return int(value)

    def view(self, name: str, value: Any, last_used: Any = None) -> ParameterView:
        return ParameterView(name, self.kind, value, self.low, self.high, self.step, (), last_used)

    def __repr__(self) -> str:
        return f"slider({self.low}, {self.high}, value={self.value})"


class Choice(Parameter):
    """One of several values."""

    kind = "choice"

    def __init__(self, options: Iterable[Any], value: Any) -> None:
        self.options = tuple(options)
        if not self.options:
            raise ArgumentError("choice needs at least one option.")
        self.value = self.check("value", self.options[0] if value is None else value)

    def check(self, name: str, value: Any) -> Any:
        if value not in self.options:
            raise ArgumentError(f"{name} is {value!r}; it takes one of {', '.join(map(repr, self.options))}.")
        return self.options[self.options.index(value)]

    def view(self, name: str, value: Any, last_used: Any = None) -> ParameterView:
        return ParameterView(name, self.kind, value, options=self.options, last_used=last_used)

    def __repr__(self) -> str:
        return f"choice({list(self.options)!r}, value={self.value!r})"


class Switch(Parameter):
    """On or off."""

    kind = "switch"

    def __init__(self, value: bool) -> None:
        self.value = self.check("value", value)

    def check(self, name: str, value: Any) -> bool:
        if not isinstance(value, bool):
            raise ArgumentError(f"{name} is {value!r}; it takes True or False.")
        return value

    def __repr__(self) -> str:
        return f"switch({self.value})"


def slider(low: float, high: float, *, value: float | None = None, step: float | None = None) -> Slider:
    """A number from `low` to `high`, at first `value` (default: `low`)."""
    return Slider(low, high, value, step)


def choice(options: Iterable[Any], *, value: Any = None) -> Choice:
    """One of `options`, at first `value` (default: the first)."""
    return Choice(options, value)


def switch(value: bool) -> Switch:
    """True or False, at first `value`."""
    return Switch(value)
