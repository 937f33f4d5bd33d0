"""Requests in flight over the last minute: a point per half second, and only while something happens."""

from collections import deque

from .views import HistoryPoint

SPAN_S = 60.0
STEP_S = 0.5


class History:
    """Keeps the peak of each engine between two points, so that a short burst is seen."""

    def __init__(self) -> None:
        self._points: deque[HistoryPoint] = deque(maxlen=int(SPAN_S / STEP_S) + 1)
        self._now: dict[str, int] = {}
        self._peak: dict[str, int] = {}
        self._changed = False

    def seen(self, time: float, engine: str, in_flight: int) -> None:
        """An engine's count has changed."""
        self._peak[engine] = max(in_flight, self._peak.get(engine, 0), self._now.get(engine, 0))
        self._now[engine] = in_flight
        self._changed = True
        self._step(time)
        if not any(self._now.values()):
            self._rest(time)

    def look(self, time: float, now: dict[str, int]) -> None:
        """Somebody looks: complete the line up to now while requests run or the last change is not drawn."""
        self._now = now
        if self._changed or any(now.values()):
            self._step(time)
        while self._points and self._points[0].time < time - SPAN_S:
            self._points.popleft()

    def points(self) -> tuple[HistoryPoint, ...]:
        """Oldest first."""
        return tuple(self._points)

    def _rest(self, time: float) -> None:
        """All is quiet: draw it at once, for nobody may come to look later."""
        if len(self._points) > 1 and time - self._points[-2].time < STEP_S:
            self._points.pop()
        self._points.append(HistoryPoint(time, dict(self._now)))
        self._changed, self._peak = False, {}

    def _step(self, time: float) -> None:
        if self._points and time - self._points[-1].time < STEP_S:
            return
        self._points.append(HistoryPoint(time, {**self._now, **self._peak}))
        # A peak above what runs now must be followed by another point that shows the fall.
        self._changed = any(count != self._now.get(name, 0) for name, count in self._peak.items())
        self._peak = {}
