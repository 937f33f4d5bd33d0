from prometheus_client.parser import text_string_to_metric_families

from mlcrouter_nb.telemetry import CallTrace, RequestTrace, Telemetry
from mlcrouter_nb.telemetry.prometheus import metrics_page


def test_the_page_says_what_happened():
    telemetry = Telemetry()
    telemetry.emit("engine_state", engine="D1", role="decode", state="ready")
    telemetry.emit("call_started", engine="D1", in_flight=2, waiting_tokens=70)
    for state in ("finished", "finished", "failed"):
        trace = RequestTrace("r", "disagg", prompt_tokens=10, cached_tokens=4, started=0.0)
        trace.times.extend([0.02, 0.03])
        trace.calls.append(CallTrace("start_generate", "D1", 0.0, error="x" if state == "failed" else ""))
        telemetry.begin(trace)
        telemetry.finish(trace, state)
    telemetry.begin(RequestTrace("running"))
    samples = {
        (sample.name, *sorted(sample.labels.values())): sample.value
        for family in text_string_to_metric_families(metrics_page(telemetry).decode())
        for sample in family.samples
    }
    assert samples["mlcrouter_requests_total", "disagg", "finished"] == 2
    assert samples["mlcrouter_requests_total", "disagg", "failed"] == 1
    assert samples["mlcrouter_prompt_tokens_total", "disagg"] == 30
    assert samples["mlcrouter_cached_tokens_total", "disagg"] == 12
    assert samples["mlcrouter_completion_tokens_total", "disagg"] == 6
    assert samples["mlcrouter_requests_in_flight",] == 1
    assert samples["mlcrouter_ttft_seconds_bucket", "0.01", "disagg"] == 0
    assert samples["mlcrouter_ttft_seconds_bucket", "0.025", "disagg"] == 3
    assert samples["mlcrouter_ttft_seconds_bucket", "+Inf", "disagg"] == 3
    assert abs(samples["mlcrouter_itl_seconds_sum", "disagg"] - 0.03) < 1e-9
    assert samples["mlcrouter_endpoint_in_flight", "D1", "decode"] == 2
    assert samples["mlcrouter_endpoint_waiting_tokens", "D1", "decode"] == 70
    assert samples["mlcrouter_endpoint_up", "D1", "decode"] == 1
    assert samples["mlcrouter_endpoint_calls_total", "D1", "error", "start_generate"] == 1
