"""The metrics page: Prometheus's text, made from the telemetry when somebody asks for it."""

from collections.abc import Iterable

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.registry import Collector

from .telemetry import Telemetry

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"


def metrics_page(telemetry: Telemetry) -> bytes:
    """All series of the router; their names begin with `mlcrouter_`."""
    registry = CollectorRegistry()
    registry.register(_Page(telemetry))
    return generate_latest(registry)


class _Page(Collector):
    def __init__(self, telemetry: Telemetry) -> None:
        self.telemetry = telemetry

    def collect(self) -> Iterable[Metric]:
        yield from self._requests()
        yield from self._histograms()
        yield from self._endpoints()

    def _requests(self) -> Iterable[Metric]:
        policies = list(self.telemetry.totals.policies.items())
        requests = CounterMetricFamily(
            "mlcrouter_requests", "Requests that ended.", labels=("policy", "outcome")
        )
        for name, policy in policies:
            for outcome, count in list(policy.outcomes.items()):
                requests.add_metric((name, outcome), count)
        yield requests
        for field, text in (
            ("prompt_tokens", "Prompt tokens of ended requests."),
            ("cached_tokens", "Prompt tokens that an engine already held."),
            ("completion_tokens", "Tokens sent to clients."),
            ("resumed", "Times that a request went on elsewhere after a preemption or a broken stream."),
        ):
            family = CounterMetricFamily(f"mlcrouter_{field}", text, labels=("policy",))
            for name, policy in policies:
                family.add_metric((name,), getattr(policy, field))
            yield family
        yield GaugeMetricFamily(
            "mlcrouter_requests_in_flight", "Requests that run now.", value=len(self.telemetry.live)
        )

    def _histograms(self) -> Iterable[Metric]:
        for field, name, text in (
            ("ttft", "mlcrouter_ttft_seconds", "Time to first token."),
            ("itl", "mlcrouter_itl_seconds", "Mean time between tokens of a request."),
            ("duration", "mlcrouter_request_seconds", "Time from arrival to end."),
        ):
            family = HistogramMetricFamily(name, text, labels=("policy",))
            for policy, totals in list(self.telemetry.totals.policies.items()):
                histogram = getattr(totals, field)
                family.add_metric((policy,), histogram.cumulative(), histogram.sum)
            yield family

    def _endpoints(self) -> Iterable[Metric]:
        engines = self.telemetry.snapshot().engines
        for field, text in (
            ("in_flight", "Requests that hold this endpoint."),
            ("waiting_tokens", "Prompt tokens that wait for their prefill there."),
        ):
            gauge = GaugeMetricFamily(f"mlcrouter_endpoint_{field}", text, labels=("endpoint", "role"))
            for engine in engines:
                gauge.add_metric((engine.name, engine.role or ""), getattr(engine, field))
            yield gauge
        up = GaugeMetricFamily("mlcrouter_endpoint_up", "1 while it serves.", labels=("endpoint", "role"))
        for engine in engines:
            up.add_metric((engine.name, engine.role or ""), engine.state in ("ready", "busy"))
        yield up
        calls = CounterMetricFamily(
            "mlcrouter_endpoint_calls", "Calls of ended requests.", labels=("endpoint", "verb", "outcome")
        )
        for key, count in list(self.telemetry.totals.calls.items()):
            calls.add_metric(key, count)
        yield calls
