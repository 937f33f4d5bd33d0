"""Continuous batching: which tokens of which jobs go into the next forward pass.

One step takes a token of every decoding job, then fills the chunk with prefill, first come first served. Jobs are
admitted when the pages for their whole prompt are free; answers grow beyond that, and when pages run out the kept
sequences of the prefix cache go first, then the newest generation is preempted."""

import itertools
import time
from collections import deque
from collections.abc import Mapping
from typing import Protocol

import numpy as np

from ..protocol.errors import MlcRouterError, RequestError
from .arrival import Arrivals
from .jobs import Event, Failed, Generation, Job, Reserved, Send, Sent, State, Tokens
from .prefix_cache import PrefixCache, SequenceOwner
from .sampler import sample
from .stats import Stats

RESERVE_PAGES = 4  # that an admission leaves for each running generation to grow into
WAIT_DEADLINE_S = 60.0  # for prep_recv and remote_send to be admitted
RECEIVE_DEADLINE_S = 60.0  # from prep_recv to start_generate


class Runner(SequenceOwner, Protocol):
    """What the scheduler needs of a `ModelRunner`."""

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


class Scheduler:
    """Owns the runner's sequences. All calls come from the engine thread; `step` returns what happened."""

    def __init__(self, runner: Runner, *, max_num_sequence: int = 16, prefix_cache: bool = False) -> None:
        self._runner = runner
        self._max_num_sequence = max_num_sequence
        self._keep = prefix_cache
        self._cache = PrefixCache(runner)
        self._waiting: deque[Job] = deque()
        self._receiving: list[Job] = []
        self._running: list[Job] = []  # in order of admission
        pages = runner.received_pages
        self._arrivals = None if pages is None else Arrivals(pages)
        self._ids = itertools.count()
        self._events: list[tuple[Job, Event]] = []
        self._blocked = False  # the first waiting job found no room, and none was made since
        self.stats = Stats(kv_pages_total=runner.num_pages, kv_pages_free=runner.free_pages())

    # Calls

    def add(self, job: Job) -> None:
        """Queue a job."""
        if isinstance(job, Send) or (isinstance(job, Generation) and job.awaits_kv):
            job.deadline = time.monotonic() + WAIT_DEADLINE_S
        self._waiting.append(job)
        self._blocked = False

    def start(self, job: Generation, begin: int) -> None:
        """Generate from received KV: prefill `prompt[begin:]` first. Raises `RequestError` where that cannot be."""
        if job.state is not State.RECEIVING:
            raise RequestError(
                "This request is not waiting for start_generate: its KV was freed, or it was started already.",
                code="not_receiving",
            )
        if begin > job.held:
            raise RequestError(
                f"start_generate begins at {begin}, but prep_recv reserved {job.held} tokens only.",
                param="begin",
            )
        self._check_arrival(job, begin)
        if begin < job.held:
            self._make_room(1)  # a page that is shared is copied
            self._runner.popn(job.seq, job.held - begin)
            job.held = begin
            job.cached = min(job.cached or 0, begin)
            job.shared = min(job.shared, begin // self._runner.page_size)
        self._receiving.remove(job)
        job.deadline = None
        job.begun = True
        job.state = State.WAITING
        self._waiting.appendleft(job)
        self._blocked = False

    def _check_arrival(self, job: Generation, begin: int) -> None:
        if self._arrivals is None:
            return
        if missing := self._arrivals.missing(job.segments, max(0, begin - (job.cached or 0))):
            raise RequestError(
                f"KV of {missing} tokens before 'begin' has not arrived: let remote_send answer first.",
                param="begin",
                code="kv_missing",
            )
        self._arrivals.forget(job.segments)

    def abort(self, *jobs: Job) -> None:
        """Forget jobs in whatever state; their pages are free at once. Idempotent."""
        for job in jobs:
            if job.state is not State.ENDED:
                self._release(job)

    def abort_all(self) -> None:
        """Forget every job."""
        for job in [*self._waiting, *self._receiving, *self._running]:
            self._release(job)

    def fail_all(self, error: MlcRouterError) -> list[tuple[Job, Event]]:
        """End every job with an error, after something unforeseen; returns the events."""
        for job in [*self._waiting, *self._receiving, *self._running]:
            self._fail(job, error)
        events, self._events = self._events, []
        return events

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do before the next deadline."""
        return bool(self._running) or bool(self._waiting and not self._blocked)

    def seconds_to_deadline(self) -> float | None:
        """Until `step` must be called although there is no work."""
        deadlines = [job.deadline for job in [*self._waiting, *self._receiving] if job.deadline is not None]
        return max(0.0, min(deadlines) - time.monotonic()) if deadlines else None

    def step(self) -> list[tuple[Job, Event]]:
        """One forward pass; returns the events of all jobs since the last call."""
        self._expire()
        self._admit()
        self._grow()
        self.abort(*(job for job in self._running if isinstance(job, Send) and not job.is_wanted()))
        batch = self._batch()
        if batch:
            try:
                logits = self._runner.forward([(job.seq, tokens) for job, tokens in batch])
            except Exception as error:  # whatever the runner met: these jobs end, the engine goes on
                jobs = [job for job, _ in batch]
                senders = [job for job in jobs if isinstance(job, Send)]  # likeliest: a peer is gone
                for job in senders or jobs:
                    self._fail(job, MlcRouterError(f"The forward pass failed: {error}"))
            else:
                for (job, tokens), row in zip(batch, logits, strict=True):
                    self._advance(job, len(tokens), row)
        self.update_stats()
        events, self._events = self._events, []
        return events

    # Deadlines and admission

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [*self._waiting, *self._receiving]:
            if job.deadline is not None and job.deadline < now:
                waited = "for KV pages" if job.state is State.WAITING else "for start_generate"
                self._fail(
                    job,
                    RequestError(f"The request waited too long {waited}.", status=503, type="server_error"),
                )

    def _admit(self) -> None:
        for job in list(self._waiting):
            needs_place = not (isinstance(job, Generation) and job.awaits_kv)
            if needs_place and len(self._running) >= self._max_num_sequence:
                continue
            try:
                admitted = self._take_in(job)
            except Exception as error:
                refused = error if isinstance(error, MlcRouterError) else None
                self._fail(job, refused or MlcRouterError(f"The request could not be admitted: {error}"))
                continue
            if not admitted and not self._placed():
                self._fail(job, MlcRouterError("There are too few KV pages for this request."))
            elif not admitted:
                self._blocked = True
                return
        self._blocked = bool(self._waiting)  # what still waits needs a place in the batch

    def _take_in(self, job: Job) -> bool:
        """Give a waiting job what it needs; False, and nothing changed, where there are too few pages."""
        if job.seq < 0 and not self._place(job):
            return False
        self._waiting.remove(job)
        if isinstance(job, Generation) and job.awaits_kv:
            self._reserve(job)
        else:
            job.state = State.RUNNING
            self._running.append(job)
        return True

    def _place(self, job: Job) -> bool:
        """A sequence for the job, forked from what the prefix cache holds of it, and room for the rest."""
        if not self._make_room(1):  # a fork may copy a page
            return False
        parent, matched = self._cache.match(job.tokens, job.match_limit)
        seq = next(self._ids)
        if matched:
            self._runner.fork_sequence(parent, seq, matched)
        else:
            self._runner.add_sequence(seq)
        growing = sum(isinstance(other, Generation) for other in self._running)
        if not self._make_room(self._pages(job.target) - self._pages(matched) + RESERVE_PAGES * growing):
            self._runner.remove_sequence(seq)
            return False
        job.seq, job.held, job.parent, job.shared = seq, matched, parent, matched // self._runner.page_size
        if job.cached is None:
            job.cached = matched
            self.stats.prefix_hit_tokens += matched
        self._mark(job)
        return True

    def _mark(self, job: Job) -> None:
        """From the window's begin on, forward passes send. Up to there they must not: KV goes out in order."""
        if isinstance(job, Send) and not job.marked and job.held >= job.begin:
            self._runner.mark_send(job.seq, job.begin, job.segments, job.recv_rank)
            job.marked = True

    def _reserve(self, job: Generation) -> None:
        matched, window_end = job.held, job.window_end or 0
        if window_end > matched:
            job.segments = self._runner.prepare_recv(job.seq, window_end - matched)
            if self._arrivals is not None:
                self._arrivals.expect(job.segments)
        job.held = window_end
        job.state = State.RECEIVING
        job.deadline = time.monotonic() + RECEIVE_DEADLINE_S
        self._receiving.append(job)
        self._events.append((job, Reserved(job.segments, matched)))

    # Pages

    def _pages(self, tokens: int) -> int:
        return -(-tokens // self._runner.page_size)

    def _committed(self) -> int:
        """Pages that jobs with a sequence will still take for what they are known to compute."""
        return sum(self._pages(job.target) - self._pages(job.held) for job in self._placed())

    def _placed(self) -> list[Job]:
        """Jobs that have a sequence; a started one may still wait for its place in the batch."""
        return [*self._receiving, *self._running, *(job for job in self._waiting if job.seq >= 0)]

    def _make_room(self, pages: int) -> bool:
        """Evict until `pages` are free beyond what is committed."""
        committed = self._committed()
        while self._runner.free_pages() - committed < pages:
            if not self._cache.evict():
                return False
        return True

    def _grow(self) -> None:
        """See to the pages of the next step; preempt where eviction is not enough."""
        while not self._make_room(0):
            newest = next((job for job in reversed(self._running) if isinstance(job, Generation)), None)
            if newest is None:
                return
            self._preempt(newest)

    def _preempt(self, job: Generation) -> None:
        self.stats.preemptions += 1
        self._release(job)
        if job.window_end is not None:  # the router knows where its KV can be had again; we do not
            if job.text:
                job.text.interrupt()
            self._tell(job, "preempt")
            return
        job.state, job.seq, job.held = State.WAITING, -1, 0
        self._waiting.appendleft(job)

    # The batch

    def _batch(self) -> list[tuple[Job, list[int]]]:
        batch = [(job, job.tokens[-1:]) for job in self._running if job.is_decoding]
        budget = self._runner.prefill_chunk_size - len(batch)
        for job in self._running:
            if not job.is_decoding and (count := min(budget, job.next_stop - job.held)) > 0:
                batch.append((job, job.tokens[job.held : job.held + count]))
                budget -= count
        return batch

    def _advance(self, job: Job, count: int, logits: np.ndarray) -> None:
        if job.is_decoding:
            self.stats.decode_tokens += count
        else:
            self.stats.prefill_tokens += count
            job.prefilled += count
        job.held += count
        if job.held < job.target:
            try:
                self._mark(job)
            except Exception as error:
                self._fail(job, MlcRouterError(f"KV cannot be sent: {error}"))
            return
        if isinstance(job, Send):
            self._events.append((job, Sent()))
            self._release(job, keep=True)
        elif isinstance(job, Generation):
            self._append(job, logits)

    def _append(self, job: Generation, logits: np.ndarray) -> None:
        """Sample the next token, and end the generation where it is the last one."""
        try:
            token = sample(logits, job.params, len(job.tokens), job.counts)
        except MlcRouterError as error:
            self._fail(job, error)
            return
        reason = job.append(token)
        self._tell(job, reason)
        if reason:
            self._release(job, keep=True)

    def _tell(self, job: Generation, reason: str | None) -> None:
        text, ids = job.text.take() if job.text else ("", [])
        if ids or text or reason:
            self._events.append((job, Tokens(text, ids, reason)))

    # Endings

    def _fail(self, job: Job, error: MlcRouterError) -> None:
        self._events.append((job, Failed(error)))
        self._release(job)

    def _release(self, job: Job, *, keep: bool = False) -> None:
        """Take a job out and give its sequence back; with `keep` its KV goes to the prefix cache."""
        for jobs in (self._waiting, self._receiving, self._running):
            if job in jobs:
                jobs.remove(job)
        if self._arrivals is not None and isinstance(job, Generation) and job.state is State.RECEIVING:
            self._arrivals.forget(job.segments)
        job.state = State.ENDED
        self._blocked = False
        seq, job.seq = job.seq, -1
        if seq < 0:
            return
        if keep and self._keep and job.held:
            self._cache.insert(seq, job.tokens[: job.held])
        else:
            self._runner.remove_sequence(seq)

    def update_stats(self) -> None:
        """Bring the gauges up to date."""
        stats, placed = self.stats, self._placed()
        stats.requests_running = len(placed)
        stats.requests_waiting = len(self._waiting) + len(self._receiving) + len(self._running) - len(placed)
        stats.kv_pages_free = self._runner.free_pages()
        own = sum(self._pages(job.held) - job.shared for job in placed)
        shared: dict[int, int] = {}
        for job in placed:
            shared[job.parent] = max(job.shared, shared.get(job.parent, 0))
        stats.kv_pages_cached = max(
            0, stats.kv_pages_total - stats.kv_pages_free - own - sum(shared.values())
        )
        stats.put_bytes = dict(self._runner.bytes_put)
