"""The engine's numbers for Prometheus, read from its stats when asked."""

from collections.abc import Callable, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from .stats import Stats

CONTENT_TYPE = CONTENT_TYPE_LATEST
_COUNTERS = {
    "prefill_tokens": "Tokens of prompts that were computed here.",
    "decode_tokens": "Tokens that were fed one by one.",
    "prefix_hit_tokens": "Tokens of prompts that the prefix cache held.",
    "preemptions": "Generations that lost their pages to older ones.",
}
_GAUGES = {
    "kv_pages_total": "Pages of the KV cache.",
    "kv_pages_free": "Pages that nothing holds.",
    "kv_pages_cached": "Pages held by the prefix cache alone.",
    "requests_running": "Requests that hold pages.",
    "requests_waiting": "Requests that wait for pages or for a place in the batch.",
}


class EngineMetrics(Collector):
    """`text()` is the page. `labels` go into `mlcrouter_engine_info`."""

    def __init__(self, stats: Callable[[], Stats], labels: dict[str, str]) -> None:
        self._stats = stats
        self._labels = labels
        self._registry = CollectorRegistry()
        self._registry.register(self)

    def text(self) -> bytes:
        """The exposition format."""
        return generate_latest(self._registry)

    def collect(self) -> Iterator[Metric]:
        """Called by prometheus_client."""
        stats = self._stats()
        for name, help in _COUNTERS.items():
            yield CounterMetricFamily(f"mlcrouter_engine_{name}", help, value=getattr(stats, name))
        for name, help in _GAUGES.items():
            yield GaugeMetricFamily(f"mlcrouter_engine_{name}", help, value=getattr(stats, name))
        put = CounterMetricFamily(
            "mlcrouter_engine_put_bytes", "Bytes of KV written into a peer.", labels=["peer"]
        )
        for peer, total in stats.put_bytes.items():
            put.add_metric([str(peer)], total)
        yield put
        info = GaugeMetricFamily("mlcrouter_engine_info", "What runs here.", labels=list(self._labels))
        info.add_metric(list(self._labels.values()), 1)
        yield info
