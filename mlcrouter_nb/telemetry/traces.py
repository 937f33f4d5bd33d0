"""What became of one request: which engine did what, when its tokens came, what it cost."""

import json
import time
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any

TAIL = 2000  # characters of text that a finished trace keeps


@dataclass(slots=True)
class CallTrace:
    """One call to one engine; times are Unix times, `window` the prompt tokens [begin, end) it is about."""

    verb: str
    engine: str
    begin: float
    end_time: float | None = None
    window: tuple[int, int] | None = None
    error: str = ""


@dataclass(eq=False)
class RequestTrace:
    """One request, updated in place while it runs.

    `state` is running, finished, failed or cancelled. `times` holds the monotonic time of each token,
    `pieces` the text as it came: strings, or bytes that are the inside of a JSON string which nobody has read yet."""

    id: str
    policy: str = ""
    arrival: float = field(default_factory=time.time)
    started: float = field(default_factory=time.monotonic)
    ended: float | None = None
    prompt_tokens: int | None = None
    cached_tokens: int | None = None
    usage_tokens: int | None = None
    calls: list[CallTrace] = field(default_factory=list)
    state: str = "running"
    error: str = ""
    resumed: int = 0
    times: "array[float]" = field(default_factory=lambda: array("d"))
    pieces: list[str | bytes] = field(default_factory=list)

    def clock(self) -> float:
        """Unix time now, on the steady clock that the request started with."""
        return self.arrival + time.monotonic() - self.started

    @property
    def completion_tokens(self) -> int:
        """Tokens sent so far; the engine's own count once it has told it."""
        return len(self.times) if self.usage_tokens is None else self.usage_tokens

    @property
    def text(self) -> str:
        """What has been sent; of a finished request its last 2000 characters."""
        return join_text(self.pieces[:])

    @property
    def ttft_s(self) -> float | None:
        """Seconds from arrival to the first token."""
        return self.times[0] - self.started if self.times else None

    @property
    def itl_s(self) -> float | None:
        """Mean seconds between two tokens."""
        n = len(self.times)
        return (self.times[n - 1] - self.times[0]) / (n - 1) if n > 1 else None

    @property
    def duration_s(self) -> float:
        """Seconds from arrival to the end, or to now."""
        return (time.monotonic() if self.ended is None else self.ended) - self.started

    @property
    def route(self) -> str:
        """The engines that computed something, in order: "P0 → D1"."""
        names: list[str] = []
        for call in self.calls[:]:
            if call.verb != "prep_recv" and (not names or names[-1] != call.engine):
                names.append(call.engine)
        return " → ".join(names)

    def finish(self, state: str, error: str = "") -> None:
        """Close the trace and keep the tail of its text only."""
        self.ended = time.monotonic()
        self.state, self.error = state, error
        self.pieces[:] = [join_text(self.pieces)[-TAIL:]]

    def summary(self) -> str:
        """One line: who did what, tokens in, cached and out, TTFT, ITL."""
        parts = [self._work() or "no engine"]
        if self.prompt_tokens is not None:
            cached = f" ({self.cached_tokens} cached)" if self.cached_tokens else ""
            parts.append(f"{self.prompt_tokens} tokens in{cached}")
        parts.append(f"{self.completion_tokens} out")
        if self.ttft_s is not None:
            parts.append(f"TTFT {milliseconds(self.ttft_s)}")
        if self.itl_s is not None:
            parts.append(f"ITL {milliseconds(self.itl_s)}")
        if self.resumed:
            parts.append(f"resumed {self.resumed}×")
        if self.state in ("failed", "cancelled"):
            parts.append(self.state)
        return " · ".join(parts)

    def _work(self) -> str:
        words = {"remote_send": "prefill", "start_generate": "decode", "complete": "prefill + decode"}
        done = []
        for call in self.calls[:]:
            if call.verb in words:
                window = f" [{call.window[0]}, {call.window[1]})" if call.window else ""
                done.append(f"{call.engine} {words[call.verb]}{window}")
        return " → ".join(done)

    def frozen_calls(self) -> tuple[CallTrace, ...]:
        """Copies of the calls, safe to hand to another thread."""
        return tuple(replace(call) for call in self.calls[:])


def milliseconds(seconds: float) -> str:
    """A short time for people: "0.8 ms", "21 ms", "1.24 s"."""
    if seconds >= 1:
        return f"{seconds:.2f} s"
    return f"{seconds * 1e3:.0f} ms" if seconds >= 0.01 else f"{seconds * 1e3:.1f} ms"


def join_text(pieces: Sequence[str | bytes]) -> str:
    """The text of pieces; a run of those that are still JSON is decoded at once."""
    texts: list[str] = []
    encoded: list[bytes] = []
    for piece in pieces:
        if isinstance(piece, bytes):
            encoded.append(piece)
            continue
        if encoded:
            texts.append(decode_json_text(b"".join(encoded)))
            encoded.clear()
        texts.append(piece)
    if encoded:
        texts.append(decode_json_text(b"".join(encoded)))
    return "".join(texts)


def decode_json_text(inside: bytes) -> str:
    """The text of a JSON string, given without its quotes."""
    text: str = json.loads(b'"%b"' % inside)
    return text


def event_text(event: dict[str, Any]) -> str:
    """The text that a completion or chat chunk adds."""
    for choice in event.get("choices") or ():
        if "text" in choice:
            return choice["text"] or ""
        return (choice.get("delta") or {}).get("content") or ""
    return ""
