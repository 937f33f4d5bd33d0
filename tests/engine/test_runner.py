"""What the runner refuses, and that a refusal changes nothing."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from mlcrouter_nb.engine import runner as runner_module
from mlcrouter_nb.engine.runner import ModelRunner
from mlcrouter_nb.models.tokenizer import Tokenizer
from mlcrouter_nb.protocol.errors import ArgumentError, MlcRouterError

pytestmark = pytest.mark.engine


@pytest.fixture(scope="module")
def runner(model_path: Path) -> Iterator[ModelRunner]:
    runner = ModelRunner(
        model_path, max_num_sequence=4, max_total_tokens=320, prefill_chunk_size=128, num_threads=2
    )
    yield runner
    runner.close()


@pytest.fixture(autouse=True)
def nothing_left(runner: ModelRunner) -> Iterator[None]:
    """Tests use sequences 0 to 9."""
    yield
    for seq in range(10):
        if seq in runner._cache:
            runner.remove_sequence(seq)
    assert runner.free_pages() == runner.num_pages


@pytest.mark.parametrize("kernels", ["auto", "generic"])
def test_greedy_text(model_path: Path, kernels: str) -> None:
    runner = ModelRunner(model_path, max_total_tokens=512, num_threads=2, kernels=kernels)
    tokenizer = Tokenizer(model_path)
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n<|im_start|>assistant\n"
    try:
        runner.add_sequence(0)
        ids = tokenizer.encode(prompt)
        answer: list[int] = []
        while not answer or (answer[-1] not in runner.config.eos_ids and len(answer) < 20):
            ids = [int(runner.forward([(0, ids)])[0].argmax())]
            answer += ids
        assert tokenizer.decode(answer[:-1]) == "The capital of France is Paris."
    finally:
        runner.close()
        runner.close()


def test_pages_are_counted(runner: ModelRunner) -> None:
    assert runner.num_pages == 21  # 320 / 16, and one of TVM's own
    runner.add_sequence(0)
    for n, pages in ((16, 1), (1, 1), (15, 0), (33, 3)):
        assert runner.pages_needed(0, n) == pages
        free = runner.free_pages()
        runner.forward([(0, [5] * n)])
        assert free - runner.free_pages() == pages
    runner.fork_sequence(0, 1, 32)
    assert runner.free_pages() == runner.num_pages - 5
    runner.fork_sequence(0, 2, 33)
    assert runner.free_pages() == runner.num_pages - 6


@pytest.mark.parametrize(
    ("batch", "message"),
    [
        ([], "1 to 4 sequences"),
        ([(0, [])], "at least one"),
        ([(0, [5]), (0, [5])], "once in a batch"),
        ([(7, [5])], "no sequence 7"),
        ([(0, [5] * 129)], "prefill_chunk_size"),
        ([(0, [49152])], "0 to 49151"),
        ([(0, [-1])], "0 to 49151"),
        ([(0, [5]), (1, [5]), (2, [5]), (3, [5]), (4, [5])], "1 to 4 sequences"),
    ],
)
def test_a_bad_batch_is_refused(
    runner: ModelRunner, batch: list[tuple[int, list[int]]], message: str
) -> None:
    for seq in range(5):
        runner.add_sequence(seq)
    with pytest.raises(MlcRouterError, match=message):
        runner.forward(batch)
    assert [runner.sequence_length(seq) for seq in range(5)] == [0] * 5


def test_bad_sequences_are_refused(runner: ModelRunner) -> None:
    runner.add_sequence(0)
    runner.forward([(0, [5] * 10)])
    for call in (
        lambda: runner.add_sequence(0),
        lambda: runner.add_sequence(-1),
        lambda: runner.remove_sequence(1),
        lambda: runner.sequence_length(1),
        lambda: runner.popn(0, 11),
        lambda: runner.popn(0, -1),
        lambda: runner.fork_sequence(0, 1, 11),
        lambda: runner.fork_sequence(0, 0, 5),
        lambda: runner.fork_sequence(2, 1, 5),
        lambda: runner.prepare_recv(0, 0),
        lambda: runner.prepare_recv(0, 8192),
    ):
        with pytest.raises(MlcRouterError):
            call()
    assert runner.sequence_length(0) == 10


def test_a_full_cache_refuses_and_goes_on(runner: ModelRunner) -> None:
    runner.add_sequence(0)
    for _ in range(2):
        runner.forward([(0, [5] * 128)])
    runner.add_sequence(1)
    free = runner.free_pages()
    for call in (lambda: runner.forward([(0, [5]), (1, [6] * 90)]), lambda: runner.prepare_recv(1, 100)):
        with pytest.raises(MlcRouterError, match="full"):
            call()
    assert (runner.free_pages(), runner.sequence_length(0), runner.sequence_length(1)) == (free, 256, 0)
    runner.forward([(1, [6] * 70)])


def test_a_failure_in_the_middle_restores_the_lengths(
    runner: ModelRunner, monkeypatch: pytest.MonkeyPatch
) -> None:
    runner.add_sequence(0)
    runner.add_sequence(1)
    expected = runner.forward([(0, [5] * 20)])
    runner.forward([(1, [5] * 19)])
    free = runner.free_pages()

    def fail(*_: object) -> None:
        raise RuntimeError("no")

    with monkeypatch.context() as patch:
        patch.setattr(runner, "_run", fail)
        with pytest.raises(RuntimeError):
            runner.forward([(0, [5] * 30), (1, [6])])
    assert (runner.sequence_length(0), runner.sequence_length(1), runner.free_pages()) == (20, 19, free)
    assert np.array_equal(runner.forward([(1, [5])]), expected)


def test_an_unsupported_file_is_one_sentence(tmp_path: Path) -> None:
    path = tmp_path / "x.gguf"
    path.write_bytes(b"GGUFnothing")
    with pytest.raises(ArgumentError, match="not a complete GGUF"):
        ModelRunner(path)


def test_aligned_memory() -> None:
    for rows in range(1, 5):
        assert runner_module._aligned_zeros(rows, 576).ctypes.data % 64 == 0
