import json
import threading
import time
from dataclasses import asdict

import pytest

from mlcrouter_nb.telemetry import CallTrace, PolicyView, RequestTrace, Telemetry


def test_events_are_folded_into_the_picture():
    telemetry = Telemetry()
    telemetry.emit("cluster_state", state="ready", url="http://x", model="m", kind="cpu")
    telemetry.emit("engine_state", engine="P0", role="prefill", state="ready", url="http://p")
    telemetry.emit(
        "engine_metrics", engine="P0", kv_pages_used=3, kv_pages_total=10, prefill_tokens_per_s=12.5
    )
    telemetry.emit("call_started", engine="P0", verb="remote_send", in_flight=1, waiting_tokens=40)
    telemetry.emit("policy_changed", policy=PolicyView("disagg"))
    snapshot = telemetry.snapshot()
    [engine] = snapshot.engines
    assert (engine.state, engine.role, engine.in_flight, engine.waiting_tokens) == ("busy", "prefill", 1, 40)
    assert (engine.kv_pages_used, engine.prefill_tokens_per_s) == (3, 12.5)
    assert (snapshot.state, snapshot.url, snapshot.policy.name) == ("ready", "http://x", "disagg")
    json.dumps(asdict(snapshot))
    telemetry.emit("engine_state", engine="P0", state="removed")
    assert telemetry.snapshot().engines == ()


def test_the_version_stands_still_when_nothing_happens():
    telemetry = Telemetry()
    telemetry.emit("engine_state", engine="P0", state="ready")
    version = telemetry.version
    assert telemetry.snapshot().version == version
    telemetry.snapshot()
    assert telemetry.version == version
    telemetry.touch()
    assert telemetry.version > version


def test_subscribers_hear_each_event_until_they_leave():
    telemetry, heard = Telemetry(), []
    leave = telemetry.subscribe(lambda event: heard.append(event.kind))
    telemetry.emit("one")
    leave()
    leave()
    telemetry.emit("two")
    assert heard == ["one"]


def trace_of_disagg() -> RequestTrace:
    trace = RequestTrace("r1", "disagg", arrival=100.0, started=0.0)
    trace.prompt_tokens, trace.cached_tokens = 900, 32
    trace.calls = [
        CallTrace("prep_recv", "D1", 100.0, 100.1, (0, 810)),
        CallTrace("remote_send", "P0", 100.1, 100.4, (32, 810)),
        CallTrace("start_generate", "D1", 100.4, None, (810, 900)),
    ]
    trace.times.extend([0.5, 0.52, 0.54])
    trace.pieces.extend(["Hel", b"l\\u006f", b"\\n", "!"])
    return trace


def test_a_trace_sums_itself_up():
    trace = trace_of_disagg()
    assert trace.text == "Hello\n!"
    assert trace.route == "P0 → D1"
    assert trace.ttft_s == 0.5
    assert abs(trace.itl_s - 0.02) < 1e-9
    assert trace.summary() == (
        "P0 prefill [32, 810) → D1 decode [810, 900) · 900 tokens in (32 cached) · 3 out · TTFT 500 ms · ITL 20 ms"
    )
    assert RequestTrace("r").summary() == "no engine · 0 out"


def test_a_trace_ends_once_and_keeps_its_tail():
    telemetry, trace = Telemetry(), trace_of_disagg()
    trace.pieces.append("x" * 5000)
    telemetry.begin(trace)
    assert telemetry.snapshot().in_flight == 1
    assert telemetry.snapshot().running[0].route == "P0 → D1"
    telemetry.finish(trace, "failed", "why")
    telemetry.finish(trace, "finished")
    snapshot = telemetry.snapshot()
    assert (snapshot.in_flight, snapshot.failed, snapshot.finished) == (0, 1, 0)
    assert telemetry.finished[0].error == "why"
    assert trace.text == "x" * 2000
    assert [event.kind for event in telemetry.events].count("request_finished") == 1


def test_only_the_first_streams_are_shown():
    telemetry = Telemetry()
    for i in range(30):
        telemetry.begin(RequestTrace(f"r{i}"))
    snapshot = telemetry.snapshot()
    assert (len(snapshot.running), snapshot.in_flight) == (20, 30)


def test_snapshots_from_another_thread_while_requests_run():
    telemetry, failures, stop = Telemetry(), [], threading.Event()

    def look() -> None:
        while not stop.is_set():
            try:
                asdict(telemetry.snapshot())
            except Exception as error:
                failures.append(error)
                return

    watcher = threading.Thread(target=look)
    watcher.start()
    try:
        for i in range(2000):
            trace = RequestTrace(f"r{i}")
            telemetry.begin(trace)
            telemetry.emit("call_started", request=trace.id, engine=f"E{i % 50}", in_flight=1)
            trace.calls.append(CallTrace("complete", "E0", 0.0))
            for _ in range(3):
                trace.times.append(1.0)
                trace.pieces.append("x")
                telemetry.touch()
            telemetry.finish(trace, "finished")
    finally:
        stop.set()
        watcher.join(5)
    assert failures == []


@pytest.mark.parametrize("end", [("router_answers", {}), ("cluster_state", {"state": "stopped"})])
def test_a_policy_that_blocks_is_a_problem_until_the_router_answers_or_stops(end):
    telemetry = Telemetry()
    telemetry.emit("cluster_state", state="ready")
    telemetry.emit("router_blocked", place="policy 'spin', line 3", since=time.time() - 5)
    assert "policy 'spin', line 3, has blocked the router for 5 s" in telemetry.snapshot().problem
    kind, data = end
    telemetry.emit(kind, **data)
    assert telemetry.snapshot().problem == ""
