from collections import Counter

import numpy as np
import pytest

from mlcrouter_nb.engine.sampler import SamplingParams, _draw, chance, sample
from mlcrouter_nb.protocol.errors import MlcRouterError, RequestError
from mlcrouter_nb.protocol.openai import ChatCompletionRequest, CompletionRequest

LOGITS = np.log(np.array([0.1, 0.4, 0.05, 0.25, 0.2], np.float32))


def drawn(params: SamplingParams, logits: np.ndarray = LOGITS, times: int = 4000) -> dict[int, float]:
    counts = Counter(sample(logits, params, position, {}) for position in range(times))
    return {id: count / times for id, count in counts.items()}


def test_greedy_takes_the_first_best() -> None:
    assert sample(LOGITS, SamplingParams(temperature=0), 0, {}) == 1
    assert sample(np.zeros(9, np.float32), SamplingParams(temperature=0), 0, {}) == 0


def test_the_distribution_is_the_model_s() -> None:
    shares = drawn(SamplingParams(seed=1))
    assert [shares[id] for id in range(5)] == pytest.approx([0.1, 0.4, 0.05, 0.25, 0.2], abs=0.03)
    hot, cold = drawn(SamplingParams(seed=1, temperature=2)), drawn(SamplingParams(seed=1, temperature=0.3))
    assert hot[1] < 0.35 and cold[1] > 0.7
    assert drawn(SamplingParams(seed=1, temperature=1e-9)) == {1: 1.0}


@pytest.mark.parametrize(
    ("options", "left"),
    [
        ({"top_p": 0.4}, {1}),
        ({"top_p": 0.6}, {1, 3}),
        ({"top_p": 1e-9}, {1}),
        ({"top_k": 1}, {1}),
        ({"top_k": 3}, {1, 3, 4}),
        ({"top_k": 99}, {0, 1, 2, 3, 4}),
        ({"top_k": 2, "top_p": 0.7}, {1, 3}),  # 0.4 of 0.65 is less than 0.7
        ({"top_k": 2, "top_p": 0.6}, {1}),
    ],
)
def test_top_p_and_top_k_cut_the_tail(options: dict, left: set[int]) -> None:
    assert set(drawn(SamplingParams(seed=3, **options))) == left


def test_cuts_of_a_large_vocabulary_agree_with_a_full_sort() -> None:
    generator = np.random.default_rng(0)
    for top_p in (0.1, 0.5, 0.9, 0.999):
        logits = (generator.standard_normal(49152) * 2).astype(np.float32)
        order = np.argsort(-logits, kind="stable")
        weights = np.exp(logits[order].astype(np.float64))
        nucleus = order[: int(np.searchsorted(np.cumsum(weights), top_p * weights.sum())) + 1]
        seen = set(drawn(SamplingParams(seed=2, top_p=top_p), logits, times=200))
        assert seen <= set(nucleus.tolist())


def test_draws_from_a_large_vocabulary_follow_its_weights() -> None:
    weights = np.zeros(5000, np.float32)
    weights[[3, 255, 256, 4999]] = [1, 2, 3, 4]
    counts = Counter(_draw(weights, (i + 0.5) / 10_000) for i in range(10_000))
    assert counts == {3: 1000, 255: 2000, 256: 3000, 4999: 4000}
    assert _draw(weights, 0.0) == 3 and _draw(weights, 1 - 2**-53) == 4999


def test_ties_go_to_the_smaller_id() -> None:
    assert set(drawn(SamplingParams(top_k=2), np.zeros(50, np.float32), times=200)) == {0, 1}


def test_a_seed_and_a_position_say_it_all() -> None:
    params = SamplingParams(seed=7)
    once = [sample(LOGITS, params, position, {}) for position in range(50)]
    assert once == [sample(LOGITS, params, position, {}) for position in range(50)]
    assert once != [sample(LOGITS, SamplingParams(seed=8), position, {}) for position in range(50)]
    assert (
        0 <= min(chance(seed, 0) for seed in range(1000)) < max(chance(seed, 0) for seed in range(1000)) < 1
    )


def test_penalties_and_bias_shift_logits_and_leave_them_alone() -> None:
    before = LOGITS.copy()
    assert sample(LOGITS, SamplingParams(temperature=0, frequency_penalty=0.5), 0, {1: 4}) == 3
    assert sample(LOGITS, SamplingParams(temperature=0, presence_penalty=2.0), 0, {1: 1}) == 3
    assert sample(LOGITS, SamplingParams(temperature=0, logit_bias={2: 100.0}), 0, {}) == 2
    assert (before == LOGITS).all()


@pytest.mark.parametrize("value", [np.nan, np.inf])
def test_logits_that_are_not_finite_are_an_error(value: float) -> None:
    with pytest.raises(MlcRouterError, match="not finite"):
        sample(np.array([0, value, 1], np.float32), SamplingParams(), 0, {})


def test_params_from_a_body() -> None:
    body = CompletionRequest(prompt="x", stop=["a", ""], top_k=-1, logit_bias={"3": -5})
    params = SamplingParams.from_body(body, 10)
    assert (params.temperature, params.top_p, params.top_k, params.max_tokens) == (1.0, 1.0, 0, None)
    assert (params.stop, params.logit_bias) == (("a",), {3: -5})
    advised = SamplingParams.from_body(body, 10, temperature=0.2, top_p=0.9)
    assert (advised.temperature, advised.top_p) == (0.2, 0.9)
    said = CompletionRequest(prompt="x", temperature=0)
    assert SamplingParams.from_body(said, 10, temperature=0.2).temperature == 0
    assert params.seed != SamplingParams.from_body(body, 10).seed
    chat = ChatCompletionRequest(
        messages=[{"role": "user", "content": "x"}], max_tokens=5, max_completion_tokens=7
    )
    assert SamplingParams.from_body(chat, 10).max_tokens == 7


@pytest.mark.parametrize("bias", [{"10": 1}, {"x": 1}, {"-1": 1}, {"²": 1}, {"1": 101}, {"1": float("nan")}])
def test_a_bias_that_cannot_be_is_refused(bias: dict) -> None:
    with pytest.raises(RequestError, match="logit_bias"):
        SamplingParams.from_body(CompletionRequest(prompt="x", logit_bias=bias), 10)
