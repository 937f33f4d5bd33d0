"""The stream of events and the picture folded from it."""

import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from .history import History
from .totals import Totals
from .traces import RequestTrace
from .views import EngineView, PolicyView, Snapshot, StreamView, blocked_sentence

SHOWN = 20  # streams in a snapshot
TEXT = 400  # characters of each


@dataclass(frozen=True, slots=True)
class Event:
    """Something that happened; `time` is Unix time, `data` depends on the kind."""

    time: float
    kind: str
    request: str | None
    engine: str | None
    data: dict[str, Any]


class Telemetry:
    """Written on the router's loop, read from any thread.

    Kinds: request_started, call_started, call_finished, first_token, request_resumed, request_finished,
    policy_changed, parameter_changed, engine_state, engine_metrics, cluster_state, router_blocked (`place`, `since`),
    router_answers. Tokens make no event: they update the request's trace in place and call `touch`."""

    def __init__(self) -> None:
        self.version = 0
        self.events: deque[Event] = deque(maxlen=10_000)
        self.live: dict[str, RequestTrace] = {}
        self.finished: deque[RequestTrace] = deque(maxlen=1000)
        self.totals = Totals()
        self._engines: dict[str, EngineView] = {}
        self._policy: PolicyView | None = None
        self._cluster: dict[str, str] = {"state": "stopped", "url": "", "model": "", "kind": ""}
        self._blocked: tuple[str, float] | None = None  # the policy's line, and since when
        self._history = History()
        self._subscribers: list[Callable[[Event], None]] = []
        self._lock = threading.Lock()

    def touch(self) -> None:
        """Say that something visible changed, a token for instance."""
        self.version += 1

    def emit(
        self, kind: str, /, *, request: str | None = None, engine: str | None = None, **data: Any
    ) -> None:
        """Record an event and fold it into the picture; fields of `EngineView` in `data` update that engine."""
        event = Event(time.time(), kind, request, engine, data)
        with self._lock:
            self.events.append(event)
            self._fold(event)
            self.version += 1
            subscribers = tuple(self._subscribers)
        for callback in subscribers:
            callback(event)

    def begin(self, trace: RequestTrace) -> None:
        """A request has arrived."""
        with self._lock:
            self.live[trace.id] = trace
        self.emit("request_started", request=trace.id, policy=trace.policy)

    def finish(self, trace: RequestTrace, state: str, error: str = "") -> None:
        """A request has ended: `state` is finished, failed or cancelled. Its second end does nothing."""
        with self._lock:
            if self.live.pop(trace.id, None) is None:
                return
            trace.finish(state, error)
            self.finished.append(trace)
            self.totals.add(trace)
        self.emit("request_finished", request=trace.id, policy=trace.policy, outcome=state, error=error)

    def subscribe(self, callback: Callable[[Event], None]) -> Callable[[], None]:
        """Call back for each event, on the thread that emits it; answers the function that ends it."""
        with self._lock:
            self._subscribers.append(callback)

        def unsubscribe() -> None:
            with self._lock:
                if callback in self._subscribers:
                    self._subscribers.remove(callback)

        return unsubscribe

    def snapshot(self) -> Snapshot:
        """The picture now."""
        with self._lock:
            now = time.time()
            engines = tuple(self._engines.values())
            self._history.look(now, {engine.name: engine.in_flight for engine in engines})
            return Snapshot(
                time=now,
                engines=tuple(_busy(engine) for engine in engines),
                policy=self._policy,
                running=tuple(_stream(trace) for trace in list(self.live.values())[:SHOWN]),
                in_flight=len(self.live),
                finished=self.totals.count("finished"),
                failed=self.totals.count("failed"),
                history=self._history.points(),
                version=self.version,
                problem=blocked_sentence(self._blocked[0], now - self._blocked[1]) if self._blocked else "",
                **self._cluster,
            )

    def _fold(self, event: Event) -> None:
        if event.engine is not None:
            if event.data.get("state") == "removed":
                self._engines.pop(event.engine, None)
            else:
                view = self._engines.get(event.engine) or EngineView(event.engine)
                known = {key: value for key, value in event.data.items() if key in _ENGINE_FIELDS}
                self._engines[event.engine] = replace(view, **known)
                if "in_flight" in known:
                    self._history.seen(event.time, event.engine, known["in_flight"])
        if event.kind == "cluster_state":
            self._cluster |= {key: value for key, value in event.data.items() if key in self._cluster}
            if event.data.get("state") == "stopped":
                self._blocked = None
        elif event.kind in ("policy_changed", "parameter_changed"):
            self._policy = event.data["policy"]
        elif event.kind == "router_blocked":
            self._blocked = event.data["place"], event.data["since"]
        elif event.kind == "router_answers":
            self._blocked = None


_ENGINE_FIELDS = frozenset(EngineView.__dataclass_fields__) - {"name"}


def _busy(engine: EngineView) -> EngineView:
    return replace(engine, state="busy") if engine.state == "ready" and engine.in_flight else engine


def _stream(trace: RequestTrace) -> StreamView:
    return StreamView(
        id=trace.id,
        policy=trace.policy,
        route=trace.route,
        state=trace.state,
        arrival=trace.arrival,
        prompt_tokens=trace.prompt_tokens,
        cached_tokens=trace.cached_tokens,
        completion_tokens=trace.completion_tokens,
        text=trace.text[-TEXT:],
        ttft_s=trace.ttft_s,
        itl_s=trace.itl_s,
        error=trace.error,
        calls=trace.frozen_calls(),
    )
