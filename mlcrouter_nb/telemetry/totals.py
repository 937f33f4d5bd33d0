"""Sums over all finished requests, in the shape that Prometheus wants."""

from bisect import bisect_left

from .traces import RequestTrace

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0)
SHORT = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.05, 0.1, 0.25, 0.5, 1.0)


class Histogram:
    """Counts by upper bound (seconds), and their sum."""

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self.bounds = bounds
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def add(self, seconds: float) -> None:
        self.counts[bisect_left(self.bounds, seconds)] += 1
        self.sum += seconds

    def cumulative(self) -> list[tuple[str, float]]:
        """`(upper bound, count up to it)`, as Prometheus's `_bucket` lines."""
        total, buckets = 0, []
        for bound, count in zip([*map(str, self.bounds), "+Inf"], self.counts, strict=True):
            total += count
            buckets.append((bound, float(total)))
        return buckets


class PolicyTotals:
    """What the requests of one policy came to."""

    def __init__(self) -> None:
        self.outcomes: dict[str, int] = {}
        self.prompt_tokens = self.cached_tokens = self.completion_tokens = self.resumed = 0
        self.ttft, self.itl, self.duration = Histogram(SECONDS), Histogram(SHORT), Histogram(SECONDS)


class Totals:
    """By policy, and calls by engine and verb."""

    def __init__(self) -> None:
        self.policies: dict[str, PolicyTotals] = {}
        self.calls: dict[tuple[str, str, str], int] = {}

    def add(self, trace: RequestTrace) -> None:
        """Count a finished request."""
        policy = self.policies.setdefault(trace.policy, PolicyTotals())
        policy.outcomes[trace.state] = policy.outcomes.get(trace.state, 0) + 1
        policy.prompt_tokens += trace.prompt_tokens or 0
        policy.cached_tokens += trace.cached_tokens or 0
        policy.completion_tokens += trace.completion_tokens
        policy.resumed += trace.resumed
        policy.duration.add(trace.duration_s)
        if trace.ttft_s is not None:
            policy.ttft.add(trace.ttft_s)
        if trace.itl_s is not None:
            policy.itl.add(trace.itl_s)
        for call in trace.calls:
            key = call.engine, call.verb, "error" if call.error else "ok"
            self.calls[key] = self.calls.get(key, 0) + 1

    def count(self, outcome: str) -> int:
        """Requests that ended so, over all policies."""
        return sum(policy.outcomes.get(outcome, 0) for policy in self.policies.values())
