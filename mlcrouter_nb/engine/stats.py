"""Numbers that the engine thread writes and anyone may read."""

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass
class Stats:
    """Counters (tokens, preemptions, bytes put by peer) and gauges (requests, KV pages)."""

    kv_pages_total: int = 0
    kv_pages_free: int = 0
    kv_pages_cached: int = 0  # held by the prefix cache alone
    requests_running: int = 0
    requests_waiting: int = 0
    prefill_tokens: int = 0
    decode_tokens: int = 0
    prefix_hit_tokens: int = 0
    preemptions: int = 0
    put_bytes: Mapping[int, int] = field(default_factory=dict)  # replaced, never changed
