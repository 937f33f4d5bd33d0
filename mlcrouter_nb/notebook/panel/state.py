"""What the panel is told: a snapshot, cut down to what it draws. Plain JSON, a few kilobytes."""

from collections.abc import Iterable, Sequence
from typing import Any

from ...cluster import Cluster
from ...telemetry import CallTrace, EngineView, RequestTrace, Snapshot, StreamView

STREAMS = 5  # running requests that are drawn
RECENT = 2  # rows that ended requests may fill while fewer run
TEXT = 280  # characters of each
DETAIL = 1600  # characters of a dead engine's log

PHASES = {"stopped": "stopping"}  # engines are gone, the cluster is not yet


def panel_state(cluster: Cluster | None, snapshot: Snapshot | None) -> dict[str, Any]:
    """The state without the clock: equal states draw the same picture."""
    if cluster is None or snapshot is None:
        return {"phase": "off", "engines": [], "streams": [], "more": 0}
    names = [engine.name for engine in snapshot.engines]
    streams = [stream_row(stream, stream.calls) for stream in snapshot.running[:STREAMS]]
    recent = recently_ended(cluster, RECENT - len(streams))
    return {
        "phase": PHASES.get(snapshot.state, snapshot.state),
        "model": snapshot.model,
        "kind": " ".join([snapshot.kind, *sorted({e.kernels for e in snapshot.engines if e.kernels})]),
        "url": snapshot.url,
        "doc": " ".join(snapshot.policy.doc.partition("\n\n")[0].split())
        if snapshot.policy is not None
        else "",
        "engines": [engine_card(engine) for engine in snapshot.engines],
        "streams": streams + [stream_row(trace, trace.frozen_calls()) for trace in recent],
        "more": max(0, snapshot.in_flight - len(streams)),
        "finished": snapshot.finished,
        "failed": snapshot.failed,
        "history": history(snapshot, names),
    }


def engine_card(engine: EngineView) -> dict[str, Any]:
    """What a card shows of an engine."""
    return {
        "name": engine.name,
        "role": engine.role or "",
        "state": engine.state,
        "detail": engine.detail[-DETAIL:],
        "progress": engine.progress,
        "port": engine.url.rstrip("/").rpartition(":")[2] if engine.url else "",
        "in_flight": engine.in_flight,
        "waiting": engine.waiting_tokens,
        "used": engine.kv_pages_used,
        "cached": engine.kv_pages_cached,
        "total": engine.kv_pages_total,
        "prefill": _rounded(engine.prefill_tokens_per_s),
        "decode": _rounded(engine.decode_tokens_per_s),
    }


def stream_row(request: StreamView | RequestTrace, calls: Iterable[CallTrace]) -> dict[str, Any]:
    """One request: its figures, the end of its text, and who prefilled which part of its prompt."""
    return {
        "id": request.id,
        "state": request.state,
        "policy": request.policy,
        "route": request.route,
        "prompt": request.prompt_tokens,
        "cached": request.cached_tokens,
        "out": request.completion_tokens,
        "ttft": None if request.ttft_s is None else round(request.ttft_s, 4),
        "itl": None if request.itl_s is None else round(request.itl_s, 4),
        "text": tail(request.text),
        "error": request.error[:TEXT],
        "parts": prompt_parts(request.prompt_tokens, list(calls)),
    }


def tail(text: str) -> str:
    """The end of a text on one line, from a word's begin."""
    line = " ".join(text[-2 * TEXT :].split())
    return line if len(line) <= TEXT else f"… {line[-TEXT:].partition(' ')[2]}"


def prompt_parts(tokens: int | None, calls: Sequence[CallTrace]) -> list[tuple[str, int]]:
    """The prompt from left to right: `(engine, tokens that it prefilled)`; "" is what was cached."""
    if not tokens:
        return []
    parts: list[tuple[str, int]] = []
    at = 0
    for call in calls:
        if call.verb == "prep_recv" or call.window is None:
            continue
        begin, end = call.window
        if begin > at:
            parts.append(("", begin - at))
        if end > max(at, begin):
            parts.append((call.engine, end - max(at, begin)))
        at = max(at, end)
    return parts


def recently_ended(cluster: Cluster, count: int) -> list[RequestTrace]:
    """The last requests that ended, newest first."""
    if count <= 0:
        return []
    for _ in range(3):
        try:
            return list(reversed(cluster.telemetry.finished))[:count]
        except RuntimeError:  # the router's thread has just added one
            continue
    return []


def history(snapshot: Snapshot, names: list[str]) -> list[list[float]]:
    """Points `[Unix time, in flight on the first engine, on the second, ...]`."""
    return [
        [round(point.time, 1), *(point.in_flight.get(name, 0) for name in names)]
        for point in snapshot.history
    ]


def _rounded(rate: float | None) -> float | None:
    return None if rate is None else round(rate)
