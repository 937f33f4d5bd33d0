"""Continuous batching: which tokens of which jobs go into the next forward pass.

One step takes a token of every decoding job, then fills the chunk with prefill, first come first served. Jobs are
admitted when the pages for their whole prompt are free; answers grow beyond that, and when pages run out the kept
sequences of the prefix cache go first, then the newest generation is preempted."""

import time
from collections import deque

import numpy as np

from ..protocol.errors import MlcRouterError, RequestError
from .jobs import Event, Failed, Generation, Job, Reserved, Send, Sent, State, Tokens
from .kv_pool import KvPool, Runner
from .sampler import sample
from .stats import Stats

RESERVE_PAGES = 4  # that an admission leaves for each running generation to grow into
WAIT_DEADLINE_S = 600.0  # for prep_recv and remote_send to be admitted; whoever asked may leave before
# From prep_recv to start_generate. Longer than a router waits for remote_send (`router.endpoint.LONGEST_QUEUE_S`): the peer
# writes without asking, and pages that are freed before it has ended would be another request's by then.
RECEIVE_DEADLINE_S = 600.0


class Scheduler:
    """Decides over jobs. All calls come from the engine thread; `step` returns what happened."""

    def __init__(self, runner: Runner, *, max_num_sequence: int = 16, prefix_cache: bool = False) -> None:
        self._runner = runner
        self._max_num_sequence = max_num_sequence
        self.pool = KvPool(runner, prefix_cache=prefix_cache)
        self._waiting: deque[Job] = deque()
        self._receiving: list[Job] = []
        self._running: list[Job] = []  # in order of admission
        self._events: list[tuple[Job, Event]] = []
        self._blocked = False  # the first waiting job found no room, and none was made since
        self.stats = Stats(kv_pages_total=runner.num_pages, kv_pages_free=runner.free_pages())

    # Calls

    def add(self, job: Job) -> None:
        """Queue a job."""
        if isinstance(job, Send) or _awaits_kv(job):
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
        self.pool.close_window(job, begin)
        self._receiving.remove(job)
        job.deadline = None
        job.begun = True
        job.state = State.WAITING
        self._waiting.appendleft(job)
        self._blocked = False

    def abort(self, *jobs: Job) -> None:
        """Forget jobs in whatever state; their pages are free at once. Idempotent."""
        for job in jobs:
            if job.state is not State.ENDED:
                self._release(job)

    def abort_all(self) -> None:
        """Forget every job."""
        self.abort(*self._waiting, *self._receiving, *self._running)

    def fail_all(self, error: MlcRouterError) -> list[tuple[Job, Event]]:
        """End every job with an error, after something unforeseen; returns the events."""
        for job in [*self._waiting, *self._receiving, *self._running]:
            self._fail(job, error)
        return self._take_events()

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
        self._preempt_for_growth()
        self.abort(*(job for job in self._running if isinstance(job, Send) and not job.is_wanted()))
        if batch := self._batch():
            self._forward(batch)
        self._update_stats()
        return self._take_events()

    # Before the pass

    def _expire(self) -> None:
        now = time.monotonic()
        for job in [*self._waiting, *self._receiving]:
            if job.deadline is not None and job.deadline < now:
                waited = "for KV pages" if job.state is State.WAITING else "for start_generate"
                problem = f"The request waited too long {waited}."
                self._fail(job, RequestError(problem, status=503, type="server_error"))

    def _admit(self) -> None:
        for job in list(self._waiting):
            if not _awaits_kv(job) and len(self._running) >= self._max_num_sequence:
                continue
            try:
                admitted = self._take_in(job)
            except Exception as error:
                refused = error if isinstance(error, MlcRouterError) else None
                self._fail(job, refused or MlcRouterError(f"The request could not be admitted: {error}"))
                continue
            if not admitted and not len(self.pool):
                self._fail(job, MlcRouterError("There are too few KV pages for this request."))
            elif not admitted:
                self._blocked = True
                return
        self._blocked = bool(self._waiting)  # what still waits needs a place in the batch

    def _take_in(self, job: Job) -> bool:
        """Give a waiting job what it needs; False, and nothing changed, where there are too few pages."""
        if job.seq < 0:
            is_new = job.cached is None
            growing = sum(isinstance(other, Generation) for other in self._running)
            if not self.pool.place(job, RESERVE_PAGES * growing):
                return False
            self.stats.prefix_hit_tokens += (job.cached or 0) if is_new else 0
        self._waiting.remove(job)
        if isinstance(job, Generation) and job.awaits_kv:
            self._receive(job)
        else:
            job.state = State.RUNNING
            self._running.append(job)
            self.pool.mark_send(job)
        return True

    def _receive(self, job: Generation) -> None:
        self.pool.open_window(job)
        job.state = State.RECEIVING
        job.deadline = time.monotonic() + RECEIVE_DEADLINE_S
        self._receiving.append(job)
        self._events.append((job, Reserved(job.segments, job.cached or 0)))

    def _preempt_for_growth(self) -> None:
        """See to the pages of the pass, where eviction is not enough."""
        while not self.pool.make_room():
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
        job.state, job.held = State.WAITING, 0
        self._waiting.appendleft(job)

    # The pass

    def _batch(self) -> list[tuple[Job, list[int]]]:
        batch = [(job, job.tokens[-1:]) for job in self._running if job.is_decoding]
        budget = self._runner.prefill_chunk_size - len(batch)
        for job in self._running:
            if not job.is_decoding and (count := min(budget, job.next_stop - job.held)) > 0:
                batch.append((job, job.tokens[job.held : job.held + count]))
                budget -= count
        return batch

    def _forward(self, batch: list[tuple[Job, list[int]]]) -> None:
        try:
            logits = self._runner.forward([(job.seq, tokens) for job, tokens in batch])
        except Exception as error:  # whatever the runner met: these jobs end, the engine goes on
            jobs = [job for job, _ in batch]
            for job in [job for job in jobs if isinstance(job, Send)] or jobs:  # likeliest: a peer is gone
                self._fail(job, MlcRouterError(f"The forward pass failed: {error}"))
            return
        for (job, tokens), row in zip(batch, logits, strict=True):
            try:
                self._advance(job, len(tokens), row)
            except MlcRouterError as error:
                self._fail(job, error)

    def _advance(self, job: Job, count: int, logits: np.ndarray) -> None:
        """`count` tokens more are held; where that is all of them, the next result is there."""
        if job.is_decoding:
            self.stats.decode_tokens += count
        else:
            self.stats.prefill_tokens += count
            job.prefilled += count
        job.held += count
        if job.held < job.target:
            self.pool.mark_send(job)
        elif isinstance(job, Generation):
            reason = job.append(sample(logits, job.params, len(job.tokens), job.counts))
            self._tell(job, reason)
            if reason:
                self._release(job, keep=True)
        else:
            self._events.append((job, Sent()))
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
        """Take a job out and give its pages back; with `keep` its KV goes to the prefix cache."""
        for jobs in (self._waiting, self._receiving, self._running):
            if job in jobs:
                jobs.remove(job)
        job.state = State.ENDED
        self._blocked = False
        self.pool.give_back(job, keep=keep)

    def _take_events(self) -> list[tuple[Job, Event]]:
        events, self._events = self._events, []
        return events

    def _update_stats(self) -> None:
        stats = self.stats
        stats.requests_running = len(self.pool)
        stats.requests_waiting = sum(job.seq < 0 for job in self._waiting)
        stats.kv_pages_free = self._runner.free_pages()
        stats.kv_pages_cached = self.pool.cached_pages()
        stats.put_bytes = dict(self._runner.bytes_put)


def _awaits_kv(job: Job) -> bool:
    return isinstance(job, Generation) and job.awaits_kv
