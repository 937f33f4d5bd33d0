"""Logits are the same bits whatever the batch, the cut, the fork: each against one fresh prefill of the same tokens."""

import ctypes
import math
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlcrouter_nb.engine.runner import ModelRunner
from mlcrouter_nb.protocol.errors import MlcRouterError

pytestmark = pytest.mark.engine

FRESH = 10**6  # the sequence that recomputes everything
STEPS = 30


@pytest.fixture(scope="module")
def runner(model_path: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner(model_path, max_num_sequence=16, max_total_tokens=8192, num_threads=2)
    yield runner
    runner.close()


def tokens(rng: random.Random, count: int) -> list[int]:
    return [rng.randrange(10, 40000) for _ in range(count)]


def prefill(runner: ModelRunner, history: list[int]) -> np.ndarray:
    """Logits of the last token, by one prefill in chunks of the largest size."""
    runner.add_sequence(FRESH)
    try:
        for start in range(0, len(history), runner.prefill_chunk_size):
            logits = runner.forward([(FRESH, history[start : start + runner.prefill_chunk_size])])
        return logits[0]
    finally:
        runner.remove_sequence(FRESH)


@pytest.mark.parametrize("seed", [1, 2])
def test_random_batches_cuts_forks_and_pops(runner: ModelRunner, seed: int) -> None:
    rng = random.Random(seed)
    histories: dict[int, list[int]] = {}
    compared = 0
    names = iter(range(FRESH))
    free = runner.free_pages()
    for _ in range(STEPS):
        change = rng.random()
        if len(histories) < 2 or (change < 0.12 and len(histories) < 7):
            seq = next(names)
            runner.add_sequence(seq)
            histories[seq] = []
        elif change < 0.3 and len(histories) < 7:
            parent = rng.choice(list(histories))
            length = rng.choice([len(histories[parent]), rng.randint(0, len(histories[parent]))])
            child = next(names)
            runner.fork_sequence(parent, child, length)
            histories[child] = histories[parent][:length]
        elif change < 0.4:
            seq = rng.choice(list(histories))
            count = rng.randint(0, len(histories[seq]))
            runner.popn(seq, count)
            del histories[seq][len(histories[seq]) - count :]
        elif change < 0.46 or max(map(len, histories.values())) > 200:
            seq = max(histories, key=lambda name: len(histories[name]))
            runner.remove_sequence(seq)
            del histories[seq]
        if not histories:
            continue
        chosen = rng.sample(list(histories), rng.randint(1, len(histories)))
        decode = rng.random() < 0.4
        batch = [
            (seq, tokens(rng, 1 if decode or rng.random() < 0.3 else rng.randint(2, 60))) for seq in chosen
        ]
        logits = runner.forward(batch)
        for (seq, added), row in zip(batch, logits, strict=True):
            histories[seq] += added
            assert runner.sequence_length(seq) == len(histories[seq])
            assert np.array_equal(row, prefill(runner, histories[seq])), (seed, seq, len(histories[seq]))
            compared += 1
    assert compared >= STEPS
    for seq in histories:
        runner.remove_sequence(seq)
    assert runner.free_pages() == free


def test_cuts_of_one_prompt(runner: ModelRunner) -> None:
    prompt = tokens(random.Random(7), 300)
    expected = prefill(runner, prompt)
    for cuts in ([1, 299], [16, 17, 267], [128, 172], [299, 1], [15] * 20):
        runner.add_sequence(1)
        start = 0
        for size in cuts:
            logits = runner.forward([(1, prompt[start : start + size])])
            start += size
        runner.remove_sequence(1)
        assert start == len(prompt)
        assert np.array_equal(logits[0], expected), cuts


def test_the_end_of_the_longest_context(runner: ModelRunner) -> None:
    """The last of 8,192 positions, as a decode step and as the end of a chunk. What lies before is written here: the
    receiver of a transfer does not look at it either."""
    prompt = tokens(random.Random(8), 100)
    page = np.random.default_rng(8).normal(scale=0.5, size=2 * 3 * 16 * 64).astype(np.float32)
    for pages in runner._cache.pages:
        size = math.prod(int(x) for x in pages.shape)
        memory = np.ctypeslib.as_array((ctypes.c_float * size).from_address(pages.data_ptr()))
        memory.reshape(-1, page.size)[:] = page
    context = runner.config.context_length
    assert context == 8192
    runner.add_sequence(1)
    runner.prepare_recv(1, context - 100)
    runner.forward([(1, prompt[:99])])
    decoded = runner.forward([(1, prompt[99:])])
    assert runner.sequence_length(1) == context
    with pytest.raises(MlcRouterError, match="context is 8192"):
        runner.forward([(1, [5])])
    runner.popn(1, 100)
    chunked = runner.forward([(1, prompt)])
    runner.remove_sequence(1)
    assert np.isfinite(decoded).all()
    assert np.array_equal(decoded, chunked)


def test_the_generic_kernels_keep_the_rule_too(model_path: Path) -> None:
    rng = random.Random(9)
    runner = ModelRunner(model_path, max_total_tokens=1024, num_threads=2, kernels="generic")
    try:
        prompts = [tokens(rng, count) for count in (1, 17, 40)]
        expected = [prefill(runner, prompt) for prompt in prompts]
        for seq in range(3):
            runner.add_sequence(seq)
        runner.forward([(seq, prompts[seq][:-1]) for seq in (1, 2)])
        runner.fork_sequence(2, 3, 33)
        logits = runner.forward([*((seq, prompts[seq][-1:]) for seq in range(3)), (3, prompts[2][33:])])
        for row, same in zip(logits, [*expected, expected[2]], strict=True):
            assert np.array_equal(row, same)
    finally:
        runner.close()
