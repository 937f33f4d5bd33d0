import random
import time
from collections.abc import Callable

import numpy as np
import pytest

from mlcrouter_nb.engine import scheduler as scheduler_module
from mlcrouter_nb.engine.jobs import Event, Failed, Generation, Job, Reserved, Send, Sent, State, Tokens
from mlcrouter_nb.engine.sampler import SamplingParams
from mlcrouter_nb.engine.scheduler import Scheduler
from mlcrouter_nb.engine.text import TextStream
from mlcrouter_nb.protocol.errors import RequestError

from .fake_runner import VOCAB, FakeRunner, greedy_answer


class Letters:
    """A decoder of one letter per id, so that text shows ids."""

    pending = False

    def push(self, id: int) -> str:
        return chr(0x4E00 + id)

    def flush(self) -> str:
        return ""


def ids_of(text: str) -> list[int]:
    return [ord(letter) - 0x4E00 for letter in text]


def generation(prompt: list[int], max_tokens: int = 8, **options: object) -> Generation:
    params = SamplingParams(temperature=0.0, max_tokens=max_tokens, **options.pop("params", {}))  # type: ignore
    job = Generation(
        tokens=list(prompt),
        target=len(prompt),
        params=params,
        text=TextStream(Letters(), params.stop),
        max_length=200,
        prompt_length=len(prompt),
        **options,  # type: ignore[arg-type]
    )
    job.listener = (log := []).append  # type: ignore[assignment]
    job.log = log  # type: ignore[attr-defined]
    return job


def events(job: Job) -> list[Event]:
    return job.log  # type: ignore[attr-defined,no-any-return]


def answer(job: Job) -> list[int]:
    return ids_of("".join(event.text for event in events(job) if isinstance(event, Tokens)))


def reason(job: Job) -> str | None:
    last = events(job)[-1]
    assert isinstance(last, Tokens), last
    return last.finish_reason


def run(*schedulers: Scheduler, until: Callable[[], bool] = lambda: False, limit: int = 2000) -> None:
    for _ in range(limit):
        if until() or not any(scheduler.has_work for scheduler in schedulers):
            return
        for scheduler in schedulers:
            for job, event in scheduler.step():
                job.listener(event)
    raise AssertionError("the schedulers did not come to rest")


def pages_are_free_or_kept(scheduler: Scheduler, runner: FakeRunner) -> bool:
    scheduler._update_stats()
    stats = scheduler.stats
    return len(runner.sequences) == len(scheduler.pool.kept) and stats.kv_pages_cached == len(runner.pages)


def prompt_of(length: int, salt: int = 0) -> list[int]:
    return [(salt * 31 + i * 7 + i * i) % VOCAB for i in range(length)]


@pytest.mark.parametrize("keep", [False, True])
def test_a_batch_says_what_each_would_say_alone(keep: bool) -> None:
    runner = FakeRunner(200)
    scheduler = Scheduler(runner, prefix_cache=keep)
    jobs = [generation(prompt_of(length, salt)) for length in (1, 2, 3, 4, 5, 40) for salt in (0, 1)] * 1
    for job in jobs:
        scheduler.add(job)
    run(scheduler)
    for job in jobs:
        assert answer(job) == greedy_answer(job.tokens[: job.prompt_length], 8)
        assert reason(job) == "length"
    assert pages_are_free_or_kept(scheduler, runner)
    assert max(map(len, runner.batches)) > 4, "they ran together"
    assert scheduler.stats.decode_tokens == 12 * 7


def test_a_long_prompt_is_cut_and_does_not_stop_the_others() -> None:
    runner = FakeRunner(200)
    scheduler = Scheduler(runner)
    short, long = generation([1, 2, 3], 20), generation(prompt_of(100), 2)
    scheduler.add(short)
    scheduler.step()
    scheduler.add(long)
    run(scheduler)
    assert max(max(batch) for batch in runner.batches) == 15
    assert sum(1 in batch and 15 in batch for batch in runner.batches) == 6
    assert answer(long) == greedy_answer(prompt_of(100), 2)


def test_a_second_turn_computes_only_what_is_new() -> None:
    runner = FakeRunner(200)
    scheduler = Scheduler(runner, prefix_cache=True)
    first = generation(prompt_of(21))
    scheduler.add(first)
    run(scheduler)
    turn = [*first.tokens, 5, 6, 7]
    again = generation(turn)
    scheduler.add(again)
    run(scheduler)
    assert again.cached == 21 + 7, "the last token was never fed"
    assert again.prefilled == len(turn) - again.cached
    assert answer(again) == greedy_answer(turn, 8)
    assert scheduler.stats.prefix_hit_tokens == again.cached


def test_the_whole_prompt_cached_leaves_one_token_to_compute() -> None:
    scheduler = Scheduler(FakeRunner(), prefix_cache=True)
    jobs = [generation(prompt_of(16)) for _ in range(2)]
    for job in jobs:
        scheduler.add(job)
        run(scheduler)
    assert jobs[1].cached == 15 and jobs[1].prefilled == 1
    assert answer(jobs[0]) == answer(jobs[1])


def test_end_of_sequence_and_stop_strings() -> None:
    expected = greedy_answer([3, 4], 8)
    scheduler = Scheduler(FakeRunner())
    eos = generation([3, 4], eos_ids=(expected[3],))
    ignored = generation([3, 4], eos_ids=(expected[3],), params={"ignore_eos": True})
    stopped = generation([3, 4], params={"stop": ("".join(chr(0x4E00 + id) for id in expected[2:4]),)})
    for job in (eos, ignored, stopped):
        scheduler.add(job)
    run(scheduler)
    assert (answer(eos), reason(eos), eos.completion_tokens) == (expected[:3], "stop", 4)
    assert (answer(ignored), reason(ignored)) == (expected, "length")
    assert (answer(stopped), reason(stopped)) == (expected[:2], "stop")


def test_when_pages_run_out_the_newest_is_computed_again_later() -> None:
    runner = FakeRunner(24)
    scheduler = Scheduler(runner, prefix_cache=True)
    jobs = [generation(prompt_of(9, salt), 50) for salt in range(4)]
    for job in jobs:
        scheduler.add(job)
    run(scheduler)
    assert scheduler.stats.preemptions > 0
    for job in jobs:
        assert answer(job) == greedy_answer(job.tokens[:9], 50)
        assert job.cached == 0, "as it was at the first admission"
    assert pages_are_free_or_kept(scheduler, runner)


def test_the_kept_is_evicted_before_anyone_is_preempted() -> None:
    runner = FakeRunner(24)
    scheduler = Scheduler(runner, prefix_cache=True)
    for salt in range(6):
        scheduler.add(generation(prompt_of(30, salt), 10))
        run(scheduler)
    assert scheduler.stats.preemptions == 0
    assert pages_are_free_or_kept(scheduler, runner)


def test_a_lone_request_may_fill_the_cache() -> None:
    runner = FakeRunner(10)
    scheduler = Scheduler(runner, prefix_cache=True)
    for salt in (0, 0, 1):
        job = generation(prompt_of(20, salt), 100)
        job.max_length = 40
        scheduler.add(job)
        run(scheduler)
        assert (len(job.tokens), reason(job)) == (40, "length")
        assert answer(job) == greedy_answer(prompt_of(20, salt), 20)


def test_a_failed_pass_ends_its_requests_only() -> None:
    runner = FakeRunner()
    scheduler = Scheduler(runner)
    broken, later = generation([1, 2]), generation([1, 2])
    scheduler.add(broken)
    runner.fail_next = RuntimeError("out of luck")
    run(scheduler)
    assert isinstance(events(broken)[-1], Failed) and "out of luck" in str(events(broken)[-1])
    assert runner.sequences == {}
    scheduler.add(later)
    run(scheduler)
    assert answer(later) == greedy_answer([1, 2], 8)


def test_a_failed_pass_with_a_sender_ends_the_sender_only() -> None:
    pair = Pair()
    _, reserved = pair.prep_recv(prompt_of(9), 8)
    local = generation(prompt_of(5, 1))
    pair.prefill.add(local)
    pair.p.fail_next = RuntimeError("the peer is gone")
    with pytest.raises(AssertionError, match="the peer is gone"):
        pair.remote_send(prompt_of(9), 0, 8, reserved.segments)
    run(pair.prefill)
    assert answer(local) == greedy_answer(prompt_of(5, 1), 8)


# Disaggregation


class Pair:
    """A prefill and a decode engine."""

    def __init__(self, pages: int = 200, *, keep: bool = True) -> None:
        world: dict[int, FakeRunner] = {}
        self.p, self.d = FakeRunner(pages, world=world, rank=0), FakeRunner(pages, world=world, rank=1)
        self.prefill, self.decode = Scheduler(self.p, prefix_cache=keep), Scheduler(self.d, prefix_cache=keep)

    def prep_recv(self, prompt: list[int], end: int, max_tokens: int = 8) -> tuple[Generation, Reserved]:
        job = generation(prompt, max_tokens, window_end=end)
        self.decode.add(job)
        run(self.decode, until=lambda: bool(events(job)))
        assert isinstance(events(job)[-1], Reserved)
        return job, events(job).pop()  # type: ignore[return-value]

    def remote_send(self, prompt: list[int], begin: int, end: int, segments: list[int]) -> Send:
        job = Send(tokens=list(prompt), target=end, begin=begin, segments=segments, recv_rank=1)
        job.listener = (log := []).append  # type: ignore[assignment]
        job.log = log  # type: ignore[attr-defined]
        self.prefill.add(job)
        run(self.prefill)
        assert isinstance(events(job)[-1], Sent), events(job)
        return job

    def answer(self, prompt: list[int], end: int) -> tuple[list[int], Generation, Send | None]:
        job, reserved = self.prep_recv(prompt, end)
        assert sum(reserved.segments[2::2]) == end - reserved.matched
        send = (
            self.remote_send(prompt, reserved.matched, end, reserved.segments)
            if reserved.matched < end
            else None
        )
        self.decode.start(job, end)
        run(self.decode)
        return answer(job), job, send


@pytest.mark.parametrize("length", [1, 2, 4, 5, 70])
@pytest.mark.parametrize("factor", [0, 0.1, 0.5, 0.9, 1])
@pytest.mark.parametrize("keep", [False, True])
def test_disagg_says_what_one_engine_says(length: int, factor: float, keep: bool) -> None:
    pair = Pair(keep=keep)
    prompt = prompt_of(length, 3)
    end = length - 1 if factor == 0 else int((1 - factor) * length)
    for _ in ("cold", "warm"):
        text, job, _send = pair.answer(prompt, end)
        assert text == greedy_answer(prompt, 8)
    assert job.cached == (end if keep else 0)
    assert job.prefilled == length - end
    assert pages_are_free_or_kept(pair.decode, pair.d) and pages_are_free_or_kept(pair.prefill, pair.p)


def test_cached_rows_of_the_prefill_engine_are_sent_too() -> None:
    pair = Pair()
    pair.answer(prompt_of(50), 49)
    while pair.decode.pool.kept.evict():
        pass
    text, job, send = pair.answer([*prompt_of(50), 1, 2, 3], 52)
    assert text == greedy_answer([*prompt_of(50), 1, 2, 3], 8)
    assert send is not None and (send.cached, send.prefilled, job.cached) == (49, 3, 0)
    while pair.decode.pool.kept.evict():
        pass
    text, job, send = pair.answer(prompt_of(30), 29)
    assert text == greedy_answer(prompt_of(30), 8)
    assert send is not None and (send.cached, send.prefilled) == (28, 1), "one token must be left to prefill"


def test_a_window_that_begins_behind_what_the_prefill_engine_holds() -> None:
    pair = Pair()
    pair.answer(prompt_of(60), 30)
    while pair.prefill.pool.kept.evict():
        pass
    text, job, send = pair.answer(prompt_of(60), 59)
    assert text == greedy_answer(prompt_of(60), 8)
    assert send is None and job.cached == 59
    text, job, send = pair.answer([*prompt_of(45), *prompt_of(30, 8)], 74)
    assert text == greedy_answer([*prompt_of(45), *prompt_of(30, 8)], 8)
    assert send is not None and (send.cached, send.prefilled, job.cached) == (0, 74, 45)


def test_a_send_that_nobody_wants_any_more_writes_nothing() -> None:
    pair = Pair()
    _, reserved = pair.prep_recv(prompt_of(60), 59)
    wanted = [True, True, False]
    job = Send(
        tokens=prompt_of(60),
        target=59,
        segments=reserved.segments,
        recv_rank=1,
        is_wanted=lambda: wanted.pop(0),
    )
    pair.prefill.add(job)
    run(pair.prefill)
    assert (job.held, wanted, pair.p.sequences, job.state) == (32, [], {}, State.ENDED)


def test_received_kv_serves_later_requests() -> None:
    pair = Pair()
    pair.answer(prompt_of(40), 39)
    local = generation([*prompt_of(40), 9])
    pair.decode.add(local)
    run(pair.decode)
    assert local.cached == 40 and answer(local) == greedy_answer([*prompt_of(40), 9], 8)


def test_a_start_before_the_window_s_end_recomputes() -> None:
    for begin in (0, 1, 7, 8, 19):
        pair = Pair()
        pair.answer(prompt_of(20), 19)
        job, reserved = pair.prep_recv(prompt_of(20), 19)
        assert reserved.segments == [0]
        pair.decode.start(job, begin)
        run(pair.decode)
        assert answer(job) == greedy_answer(prompt_of(20), 8)
        assert job.prefilled == 20 - begin
        assert pages_are_free_or_kept(pair.decode, pair.d)


def test_a_start_before_the_kv_has_come_is_refused_and_can_be_said_again() -> None:
    pair = Pair()
    pair.answer(prompt_of(10), 9)
    job, reserved = pair.prep_recv([*prompt_of(10), *prompt_of(20, 4)], 29)
    for begin, missing in ((29, 19), (11, 1)):
        with pytest.raises(RequestError, match=f"KV of {missing} tokens"):
            pair.decode.start(job, begin)
    pair.remote_send(job.tokens[:30], reserved.matched, 29, reserved.segments)
    pair.decode.start(job, 29)
    run(pair.decode)
    assert answer(job) == greedy_answer(job.tokens[:30], 8)
    job, reserved = pair.prep_recv(prompt_of(30, 6), 29)
    pair.decode.start(job, 0)  # nothing that was to come is used
    run(pair.decode)
    assert answer(job) == greedy_answer(prompt_of(30, 6), 8)


def test_starts_that_cannot_be() -> None:
    pair = Pair()
    job, reserved = pair.prep_recv(prompt_of(20), 10)
    with pytest.raises(RequestError, match="reserved 10"):
        pair.decode.start(job, 11)
    pair.remote_send(prompt_of(20), 0, 10, reserved.segments)
    pair.decode.start(job, 10)
    with pytest.raises(RequestError, match="started already"):
        pair.decode.start(job, 10)
    pair.decode.abort(job)
    with pytest.raises(RequestError, match="was freed"):
        pair.decode.start(job, 10)
    pair.decode.abort(job)
    assert pair.d.sequences == {}


def test_a_disaggregated_request_that_is_preempted_says_so() -> None:
    pair = Pair(pages=12, keep=False)
    old = generation(prompt_of(8, 1), 35)
    pair.decode.add(old)
    run(pair.decode, until=lambda: bool(events(old)))
    job, reserved = pair.prep_recv(prompt_of(8), 7, max_tokens=40)
    pair.remote_send(prompt_of(8), 0, 7, reserved.segments)
    pair.decode.start(job, 7)
    run(pair.decode)
    assert reason(job) == "preempt"
    given = answer(job)
    assert 0 < len(given) < 40 and given == greedy_answer(prompt_of(8), 40)[: len(given)]
    assert [id for event in events(job) if isinstance(event, Tokens) for id in event.ids] == given
    assert answer(old) == greedy_answer(prompt_of(8, 1), 35)
    assert pair.d.sequences == {}


def test_reservations_that_nobody_starts_are_freed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "RECEIVE_DEADLINE_S", 0.05)
    pair = Pair()
    job, _ = pair.prep_recv(prompt_of(20), 19)
    assert 0 < (pair.decode.seconds_to_deadline() or 0) <= 0.05
    time.sleep(0.06)
    for _, event in pair.decode.step():
        job.listener(event)
    assert isinstance(failed := events(job)[-1], Failed) and "too long" in str(failed.error)
    assert (pair.d.sequences, job.state, pair.decode.seconds_to_deadline()) == ({}, State.ENDED, None)


def test_a_reservation_waits_for_pages_and_not_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(scheduler_module, "WAIT_DEADLINE_S", 0.05)
    pair = Pair(pages=6)
    first, _ = pair.prep_recv(prompt_of(20), 19)
    second = generation(prompt_of(20, 5), window_end=19)
    pair.decode.add(second)
    run(pair.decode)
    assert second.state is State.WAITING
    pair.decode.abort(first)
    run(pair.decode)
    assert second.state is State.RECEIVING
    third = generation(prompt_of(20, 6), window_end=19)
    pair.decode.add(third)
    run(pair.decode)
    time.sleep(0.06)
    for job, event in pair.decode.step():
        job.listener(event)
    assert isinstance(events(third)[-1], Failed)
    assert second.state is State.RECEIVING


def test_aborts_at_random_moments_leave_nothing_behind() -> None:
    chance = random.Random(5)
    for round in range(30):
        pair = Pair(pages=chance.choice([30, 60, 200]), keep=chance.random() < 0.7)
        pending: list[tuple[Scheduler, Job]] = []
        whole: list[Generation] = []
        for _ in range(25):
            prompt = prompt_of(chance.randrange(1, 60), chance.randrange(4))
            kind = chance.randrange(3)
            if kind == 0:
                job: Job = generation(prompt, chance.randrange(1, 30))
                pair.decode.add(job)
                pending.append((pair.decode, job))
                whole.append(job)  # type: ignore[arg-type]
            elif kind == 1 and len(prompt) > 1:
                job = generation(prompt, 5, window_end=chance.randrange(len(prompt)))
                pair.decode.add(job)
                pending.append((pair.decode, job))
            for scheduler in (pair.prefill, pair.decode):
                for _ in range(chance.randrange(4)):
                    for done, event in scheduler.step():
                        done.listener(event)
            if pending and chance.random() < 0.5:
                scheduler, job = pending.pop(chance.randrange(len(pending)))
                scheduler.abort(job)
                scheduler.abort(job)
        for scheduler, job in pending:
            if isinstance(job, Generation) and job.window_end is not None:
                scheduler.abort(job)
        run(pair.prefill, pair.decode)
        assert pages_are_free_or_kept(pair.decode, pair.d), round
        assert not np.isnan(pair.d.received_pages).any(), "no mark is left"
        for job in whole:
            if events(job) and isinstance(events(job)[-1], Tokens) and events(job)[-1].finish_reason:  # type: ignore
                assert answer(job) == greedy_answer(job.tokens[: job.prompt_length], job.completion_tokens)
