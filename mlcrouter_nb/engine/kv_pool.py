"""Who holds which KV pages: jobs, and the prefix cache, from which room is made."""

import itertools
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ..protocol.errors import RequestError
from .arrival import Arrivals
from .jobs import Generation, Job, Send
from .prefix_cache import PrefixCache, SequenceOwner


class Runner(SequenceOwner, Protocol):
    """What the scheduler and its pool need of a `ModelRunner`."""

    num_pages: int
    prefill_chunk_size: int

    @property
    def bytes_put(self) -> Mapping[int, int]: ...
    @property
    def received_pages(self) -> np.ndarray | None: ...
    def free_pages(self) -> int: ...
    def add_sequence(self, seq: int) -> None: ...
    def fork_sequence(self, parent: int, child: int, length: int) -> None: ...
    def popn(self, seq: int, n: int) -> None: ...
    def forward(self, batch: list[tuple[int, list[int]]]) -> np.ndarray: ...
    def prepare_recv(self, seq: int, n: int) -> list[int]: ...
    def mark_send(self, seq: int, begin: int, segments: list[int], recv_rank: int) -> None: ...


class KvPool:
    """The runner's sequences. A job that has one may count on the pages up to its `target`."""

    def __init__(self, runner: Runner, *, prefix_cache: bool) -> None:
        self._runner = runner
        self._keep = prefix_cache
        self.kept = PrefixCache(runner)
        self._jobs: list[Job] = []  # that have a sequence
        self._ids = itertools.count()
        pages = runner.received_pages
        self._arrivals = None if pages is None else Arrivals(pages)

    def __len__(self) -> int:
        """Number of jobs that hold pages."""
        return len(self._jobs)

    def place(self, job: Job, reserve: int = 0) -> bool:
        """A sequence for the job, forked from what is kept of its tokens.

        False, and nothing changed, where there is no room for it and `reserve` pages more."""
        if not self.make_room(1):  # a fork may copy a page
            return False
        parent, matched = self.kept.match(job.tokens, job.match_limit)
        seq = next(self._ids)
        if matched:
            self._runner.fork_sequence(parent, seq, matched)
        else:
            self._runner.add_sequence(seq)
        if not self.make_room(self._pages(job.target) - self._pages(matched) + reserve):
            self._runner.remove_sequence(seq)
            return False
        self._jobs.append(job)
        job.seq, job.held, job.parent, job.shared = seq, matched, parent, matched // self._runner.page_size
        if job.cached is None:
            job.cached = matched
        return True

    def make_room(self, pages: int = 0) -> bool:
        """Evict what is kept until `pages` are free beyond what jobs count on."""
        committed = sum(self._pages(job.target) - self._pages(job.held) for job in self._jobs)
        while self._runner.free_pages() - committed < pages:
            if not self.kept.evict():
                return False
        return True

    def give_back(self, job: Job, *, keep: bool = False) -> None:
        """End the job's sequence; with `keep` it goes to the prefix cache."""
        if job.seq < 0:
            return
        if isinstance(job, Generation) and job.awaits_kv and self._arrivals is not None:
            self._arrivals.forget(job.segments)
        self._jobs.remove(job)
        seq, job.seq = job.seq, -1
        if keep and self._keep and job.held:
            self.kept.insert(seq, job.tokens[: job.held])
        else:
            self._runner.remove_sequence(seq)

    # Transfers

    def open_window(self, job: Generation) -> None:
        """Reserve the slots that a peer is to write: from what is held up to the window's end."""
        end = job.window_end or 0
        if end > job.held:
            job.segments = self._runner.prepare_recv(job.seq, end - job.held)
            if self._arrivals is not None:
                self._arrivals.expect(job.segments)
        job.held = end

    def close_window(self, job: Generation, begin: int) -> None:
        """Take what was received up to `begin` for the job's own, and drop the rest.

        Raises `RequestError` where `begin` is beyond the window, or the KV before it has not come."""
        if begin > job.held:
            raise RequestError(
                f"start_generate begins at {begin}, but prep_recv reserved {job.held} tokens only.",
                param="begin",
            )
        cached = job.cached or 0
        if self._arrivals is not None:
            if missing := self._arrivals.missing(job.segments, max(0, begin - cached)):
                raise RequestError(
                    f"KV of {missing} tokens before 'begin' has not arrived: let remote_send answer first.",
                    param="begin",
                    code="kv_missing",
                )
            self._arrivals.forget(job.segments)
        if begin < job.held:
            self.make_room(1)  # a page that is shared is copied
            self._runner.popn(job.seq, job.held - begin)
            job.held = begin
            job.cached, job.shared = min(cached, begin), min(job.shared, begin // self._runner.page_size)

    def mark_send(self, job: Job) -> None:
        """From the window's begin on, forward passes send. Up to there they must not: KV goes out in order."""
        if isinstance(job, Send) and not job.marked and job.held >= job.begin:
            self._runner.mark_send(job.seq, job.begin, job.segments, job.recv_rank)
            job.marked = True

    # Numbers

    def cached_pages(self) -> int:
        """Pages that only the prefix cache holds (too few rather than too many, where jobs share pages)."""
        own = sum(self._pages(job.held) - job.shared for job in self._jobs)
        shared: dict[int, int] = {}
        for job in self._jobs:
            shared[job.parent] = max(job.shared, shared.get(job.parent, 0))
        return max(0, self._runner.num_pages - self._runner.free_pages() - own - sum(shared.values()))

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._runner.page_size)
