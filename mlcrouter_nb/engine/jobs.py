"""What the scheduler works on: a generation, KV to receive, KV to send; and what it reports of them."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from ..protocol.errors import MlcRouterError
from .sampler import SamplingParams
from .text import TextStream


class State(Enum):
    """Where a job is. KV pages are held in RECEIVING and RUNNING only."""

    WAITING = "waiting"  # for pages, or for a place in the batch
    RECEIVING = "receiving"  # pages are reserved, a peer writes into them
    RUNNING = "running"  # in the batch: prefill, then decode
    ENDED = "ended"


@dataclass(frozen=True)
class Tokens:
    """New text of a generation. `ids` are the tokens shown to the end by it; the last one has a `finish_reason`."""

    text: str
    ids: list[int]
    finish_reason: str | None = None


@dataclass(frozen=True)
class Reserved:
    """KV is reserved: `segments` is the wire list, `matched` the leading tokens that were there already."""

    segments: list[int]
    matched: int


@dataclass(frozen=True)
class Sent:
    """The KV has arrived on the peer."""


@dataclass(frozen=True)
class Failed:
    """The job ended with an error."""

    error: MlcRouterError


Event = Tokens | Reserved | Sent | Failed


def _ignore(event: Event) -> None:
    pass


@dataclass(eq=False)
class Job:
    """Tokens whose KV is wanted up to `target`, exclusively. `seq` is the runner's sequence while there is one."""

    tokens: list[int]
    target: int
    listener: Callable[[Event], None] = _ignore
    state: State = State.WAITING
    seq: int = -1
    held: int = 0  # tokens with KV
    cached: int | None = None  # tokens found in the prefix cache at first admission
    parent: int = -1  # the kept sequence that the beginning was forked from,
    shared: int = 0  # and the pages shared with it
    prefilled: int = 0  # tokens of the prompt that were computed here
    arrival: float = field(default_factory=time.monotonic)
    deadline: float | None = None  # for WAITING and RECEIVING

    @property
    def next_stop(self) -> int:
        """How far the next passes may go."""
        return self.target

    @property
    def match_limit(self) -> int:
        """How much of it may come from the prefix cache: one token must be left to compute."""
        return self.target - 1

    @property
    def is_decoding(self) -> bool:
        """Whether it goes on token by token."""
        return False


@dataclass(eq=False)
class Generation(Job):
    """A completion. With `window_end` set its first tokens' KV comes from a peer: it waits in RECEIVING until started."""

    params: SamplingParams = field(default_factory=SamplingParams)
    text: TextStream | None = None
    eos_ids: tuple[int, ...] = ()
    max_length: int = 0  # of prompt and answer
    window_end: int | None = None
    segments: list[int] = field(default_factory=lambda: [0])  # the slots reserved for a peer
    prompt_length: int = 0
    begun: bool = False  # start_generate has come
    counts: Counter[int] = field(default_factory=Counter)  # of generated tokens
    first_token_at: float | None = None
    last_token_at: float | None = None

    @property
    def completion_tokens(self) -> int:
        return len(self.tokens) - self.prompt_length

    @property
    def is_decoding(self) -> bool:
        return self.completion_tokens > 0 and self.held == len(self.tokens) - 1

    @property
    def awaits_kv(self) -> bool:
        """Whether it is to reserve KV for a peer's writing, or waits for it."""
        return self.window_end is not None and not self.begun

    @property
    def match_limit(self) -> int:
        return self.target - 1 if self.window_end is None else self.window_end

    def append(self, token: int) -> str | None:
        """Add a sampled token; the finish reason where it was the last one."""
        self.last_token_at = time.monotonic()
        self.first_token_at = self.first_token_at or self.last_token_at
        self.tokens.append(token)
        self.target += 1
        self.counts[token] += 1
        if token in self.eos_ids and not self.params.ignore_eos:
            self._end_text()
            return "stop"
        if self.text and self.text.push(token):
            return "stop"
        if self.completion_tokens == self.params.max_tokens or len(self.tokens) >= self.max_length:
            self._end_text()
            return "length"
        return None

    def _end_text(self) -> None:
        if self.text:
            self.text.end()


def _always() -> bool:
    return True


@dataclass(eq=False)
class Send(Job):
    """Prefill up to `target` and write KV of positions from `begin` into the slots `segments` of PE `recv_rank`.

    Once nobody wants it any more, the peer may have given the slots to another request: nothing may be written."""

    begin: int = 0
    segments: list[int] = field(default_factory=list)
    recv_rank: int = 0
    is_wanted: Callable[[], bool] = _always
    marked: bool = False  # the runner sends from here on

    @property
    def next_stop(self) -> int:
        return self.target if self.marked else self.begin
