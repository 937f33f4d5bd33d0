"""Plain, frozen pictures of a moment; `dataclasses.asdict` makes them JSON."""

from dataclasses import dataclass, field
from typing import Any

from .traces import CallTrace


@dataclass(frozen=True)
class EngineView:
    """One engine: who it is, how it is, what it carries.

    `state` is starting, ready, busy, failed or stopped; `detail` is progress text, or the error with the log's tail;
    `progress` runs from 0 to 1 while starting. The KV figures are pages, the rates tokens per second."""

    name: str
    role: str | None = None
    url: str = ""
    state: str = "starting"
    detail: str = ""
    progress: float | None = None
    in_flight: int = 0
    waiting_tokens: int = 0
    kv_pages_used: int | None = None
    kv_pages_total: int | None = None
    kv_pages_cached: int | None = None
    prefill_tokens_per_s: float | None = None
    decode_tokens_per_s: float | None = None
    kernels: str = ""


@dataclass(frozen=True)
class ParameterView:
    """One parameter of a policy; `last_used` is the value that the latest request saw."""

    name: str
    kind: str
    value: Any
    low: float | None = None
    high: float | None = None
    step: float | None = None
    options: tuple[Any, ...] = ()
    last_used: Any = None


@dataclass(frozen=True)
class PolicyView:
    """The active policy; `origin` says where it was written ("built-in", "cell [7]", a file)."""

    name: str
    origin: str = ""
    source: str = ""
    doc: str = ""
    parameters: tuple[ParameterView, ...] = ()


@dataclass(frozen=True)
class StreamView:
    """One request that runs: see `RequestTrace`."""

    id: str
    policy: str
    route: str
    state: str
    arrival: float
    prompt_tokens: int | None
    cached_tokens: int | None
    completion_tokens: int
    text: str
    ttft_s: float | None
    itl_s: float | None
    error: str
    calls: tuple[CallTrace, ...]


@dataclass(frozen=True)
class HistoryPoint:
    """The most requests in flight on each engine since the point before; `time` is Unix time."""

    time: float
    in_flight: dict[str, int]


@dataclass(frozen=True)
class Snapshot:
    """All of it, at one moment; `state` is booting, ready, stopping or stopped, `time` Unix time.

    `problem` is a sentence while a policy blocks the router, else ""."""

    time: float
    state: str = "stopped"
    url: str = ""
    model: str = ""
    kind: str = ""
    engines: tuple[EngineView, ...] = ()
    policy: PolicyView | None = None
    running: tuple[StreamView, ...] = ()
    in_flight: int = 0
    finished: int = 0
    failed: int = 0
    history: tuple[HistoryPoint, ...] = field(default_factory=tuple)
    version: int = 0
    problem: str = ""


def blocked_sentence(place: str, seconds: float | None) -> str:
    """What is said of a policy's line that keeps the router from everything else."""
    how_long = "is blocking the router" if seconds is None else f"has blocked the router for {seconds:.0f} s"
    return f"{place}, {how_long}: nothing else goes on until it awaits (a loop without await, time.sleep?)."
