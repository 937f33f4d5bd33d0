"""KV through the hooks: what a peer wrote gives the same bits as what the receiver would have computed itself."""

import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlcrouter_nb.engine.runner import ModelRunner
from mlcrouter_nb.nvshmem import NvshmemConfig
from mlcrouter_nb.protocol.errors import MlcRouterError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def pair(model_path: Path) -> Iterator[tuple[ModelRunner, ModelRunner]]:
    """A sender (PE 0) and a receiver (PE 1) with fewer pages; two worlds of memory, though one process."""
    uid = [random.randrange(256) for _ in range(8)]
    runners = [
        ModelRunner(model_path, max_total_tokens=size, num_threads=2, nvshmem=NvshmemConfig(uid, 2, pe))
        for pe, size in enumerate((4096, 2048))
    ]
    yield runners[0], runners[1]
    for runner in runners:
        runner.close()


@pytest.fixture(autouse=True)
def nothing_left(pair: tuple[ModelRunner, ModelRunner]) -> Iterator[None]:
    """Tests use sequences 0 to 9; afterwards every page is free again."""
    yield
    for runner in pair:
        for seq in range(10):
            if seq in runner._cache:
                runner.remove_sequence(seq)
        assert runner.free_pages() == runner.num_pages


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 40000) for _ in range(count)]


def alone(runner: ModelRunner, prompt: list[int]) -> np.ndarray:
    runner.add_sequence(9)
    logits = runner.forward([(9, prompt)])[0]
    runner.remove_sequence(9)
    return logits


@pytest.mark.parametrize("seed", range(6))
def test_a_window_sent_equals_a_window_computed(pair: tuple[ModelRunner, ModelRunner], seed: int) -> None:
    """Random lengths; the receiver holds a prefix already, the sender another; the window is sent in random cuts,
    beside other work on both sides."""
    sender, receiver = pair
    rng = random.Random(seed)
    prompt = tokens(rng, rng.choice([2, 16, 17, 33, 150, 300]))
    end = rng.randint(1, len(prompt) - 1)
    matched = rng.choice([0, rng.randint(0, end - 1)])
    known = rng.choice([matched, rng.randint(matched, end - 1)])
    expected = alone(receiver, prompt)

    receiver.add_sequence(5)
    receiver.forward([(5, tokens(rng, rng.randint(1, 40)))])  # so that slots differ from the sender's
    receiver.add_sequence(0)
    if matched:
        receiver.forward([(0, prompt[:matched])])
        receiver.fork_sequence(0, 1, matched)
    else:
        receiver.add_sequence(1)
    segments = receiver.prepare_recv(1, end - matched)
    assert sum(segments[2::2]) == end - matched

    sender.add_sequence(0)
    if known:
        sender.forward([(0, prompt[:known])])
    put = sender.bytes_put.get(1, 0)
    sender.mark_send(0, matched, segments, 1)
    start = known
    sender.add_sequence(2)
    while start < end:
        step = rng.randint(1, end - start)
        sender.forward([(2, tokens(rng, 3)), (0, prompt[start : start + step])])
        receiver.forward([(5, tokens(rng, 1))])
        start += step
    assert sender.bytes_put[1] - put == (end - matched) * sender.kv_bytes_per_token

    logits = receiver.forward([(1, prompt[end:]), (5, [7])])[0]
    assert np.array_equal(logits, expected)
    assert np.array_equal(sender.forward([(0, prompt[end:])])[0], expected)
    assert sender.bytes_put[1] - put == (end - matched) * sender.kv_bytes_per_token  # the window has ended


def test_two_windows_in_one_batch(pair: tuple[ModelRunner, ModelRunner]) -> None:
    sender, receiver = pair
    rng = random.Random(3)
    prompts = [tokens(rng, 40), tokens(rng, 25)]
    for seq, prompt in enumerate(prompts):
        receiver.add_sequence(seq)
        sender.add_sequence(seq)
        sender.mark_send(seq, 0, receiver.prepare_recv(seq, len(prompt) - 1), 1)
    sender.forward([(seq, prompt[:-1]) for seq, prompt in enumerate(prompts)])
    for seq, prompt in enumerate(prompts):
        assert np.array_equal(receiver.forward([(seq, prompt[-1:])])[0], alone(receiver, prompt))


def test_bad_windows_are_refused_and_write_nothing(pair: tuple[ModelRunner, ModelRunner]) -> None:
    sender, receiver = pair
    sender.add_sequence(0)
    sender.forward([(0, [5] * 20)])
    slots = receiver.num_pages * receiver.page_size
    for begin, segments, rank, message in (
        (0, [1, 0, 100], 0, "not a peer"),
        (0, [1, 0, 100], 2, "not a peer"),
        (0, [1, 0, 100], -1, "not a peer"),
        (0, [1, slots - 10, 100], 1, "outside"),
        (0, [1, -5, 100], 1, "outside"),
        (0, [2, 0, 100], 1, "count, slot, length"),
        (0, [], 1, "count, slot, length"),
        (0, [1, 0, 20], 1, "nothing to compute"),
        (21, [1, 0, 20], 1, "behind"),
        (-1, [1, 0, 50], 1, "nothing to compute"),
    ):
        with pytest.raises(MlcRouterError, match=message):
            sender.mark_send(0, begin, segments, rank)
    put = dict(sender.bytes_put)
    sender.forward([(0, [5] * 5)])
    assert sender.bytes_put == put


def test_a_batch_may_not_run_past_its_window(pair: tuple[ModelRunner, ModelRunner]) -> None:
    sender, receiver = pair
    receiver.add_sequence(0)
    sender.add_sequence(0)
    sender.mark_send(0, 0, receiver.prepare_recv(0, 10), 1)
    with pytest.raises(MlcRouterError, match="position 10"):
        sender.forward([(0, [5] * 11)])
    assert sender.sequence_length(0) == 0


def test_a_sequence_that_is_cut_back_sends_no_more(pair: tuple[ModelRunner, ModelRunner]) -> None:
    sender, receiver = pair
    receiver.add_sequence(0)
    sender.add_sequence(0)
    sender.mark_send(0, 0, receiver.prepare_recv(0, 40), 1)
    sender.forward([(0, [5] * 20)])
    put = sender.bytes_put[1]
    sender.popn(0, 5)
    sender.forward([(0, [6] * 30)])
    assert sender.bytes_put[1] == put


def test_without_a_world_nothing_is_sent(model_path: Path) -> None:
    runner = ModelRunner(model_path, max_total_tokens=512, num_threads=2)
    try:
        runner.add_sequence(0)
        with pytest.raises(MlcRouterError, match="MLC_NVSHMEM_INIT_CONFIG_JSON_STR"):
            runner.mark_send(0, 0, [1, 0, 5], 1)
    finally:
        runner.close()


def test_a_peer_that_is_gone_is_an_error_and_a_new_one_is_found(model_path: Path) -> None:
    uid = [random.randrange(256) for _ in range(8)]

    def start(pe: int) -> ModelRunner:
        return ModelRunner(model_path, max_total_tokens=512, num_threads=2, nvshmem=NvshmemConfig(uid, 2, pe))

    sender, receiver = start(0), start(1)
    prompt = tokens(random.Random(1), 20)
    try:
        sender.add_sequence(0)
        receiver.add_sequence(0)
        sender.mark_send(0, 0, receiver.prepare_recv(0, 19), 1)
        receiver.close()
        with pytest.raises(MlcRouterError, match="not running"):
            sender.forward([(0, prompt[:19])])
        assert sender.sequence_length(0) == 0
        receiver = start(1)
        receiver.add_sequence(0)
        sender.mark_send(0, 0, receiver.prepare_recv(0, 19), 1)
        sender.forward([(0, prompt[:19])])
        assert np.array_equal(receiver.forward([(0, prompt[19:])])[0], alone(receiver, prompt))
    finally:
        sender.close()
        receiver.close()
