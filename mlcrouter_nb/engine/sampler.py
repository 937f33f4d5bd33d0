"""Logits to a token: the same answer on any engine, in any batch, before and after a preemption.

The chance for a token comes from the request's seed and the token's position alone, so there is no state to carry."""

from collections.abc import Mapping
from dataclasses import dataclass, field
from hashlib import blake2b
from secrets import randbits

import numpy as np

from ..protocol.errors import MlcRouterError, RequestError
from ..protocol.openai import ChatCompletionRequest, CompletionRequest


@dataclass(frozen=True)
class SamplingParams:
    """How to choose tokens and when to stop; the defaults are OpenAI's."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0  # 0: all
    seed: int = 0
    max_tokens: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)

    @classmethod
    def from_body(
        cls,
        body: CompletionRequest | ChatCompletionRequest,
        vocab_size: int,
        *,
        temperature: float = 1.0,
        top_p: float = 1.0,
    ) -> "SamplingParams":
        """From a request; `temperature` and `top_p` hold where it does not say. Raises `RequestError` (400) for a `logit_bias` of tokens that do not exist."""
        max_tokens = body.max_tokens
        if isinstance(body, ChatCompletionRequest) and body.max_completion_tokens is not None:
            max_tokens = body.max_completion_tokens

        def given(value: float | None, default: float) -> float:
            return default if value is None else value

        return cls(
            temperature=given(body.temperature, temperature),
            top_p=given(body.top_p, top_p),
            top_k=max(0, body.top_k or 0),
            seed=randbits(63) if body.seed is None else body.seed,
            max_tokens=max_tokens,
            stop=tuple(body.stop_strings),
            ignore_eos=body.ignore_eos,
            frequency_penalty=given(body.frequency_penalty, 0.0),
            presence_penalty=given(body.presence_penalty, 0.0),
            logit_bias=_logit_bias(body.logit_bias or {}, vocab_size),
        )


def _logit_bias(given: Mapping[str, float], vocab_size: int) -> dict[int, float]:
    bias = {}
    for key, value in given.items():
        if not (key.isascii() and key.isdigit() and int(key) < vocab_size):
            raise RequestError(
                f"'logit_bias': {key!r} is no token id below {vocab_size}.", param="logit_bias"
            )
        if not -100 <= value <= 100:
            raise RequestError(f"'logit_bias': {value} lies outside -100 to 100.", param="logit_bias")
        bias[int(key)] = value
    return bias


def sample(logits: np.ndarray, params: SamplingParams, position: int, counts: Mapping[int, int]) -> int:
    """The token for `position` of its sequence from `logits` [vocabulary] float32.

    `counts` says how often each token was generated (for the penalties). Raises `MlcRouterError` where the logits
    are not finite."""
    logits = _adjusted(logits, params, counts)
    best = int(logits.argmax())
    if not np.isfinite(logits[best]):
        raise MlcRouterError("The model answered logits that are not finite.")
    if params.temperature == 0:
        return best
    weights = np.exp((logits - logits[best]) / np.float32(max(params.temperature, 1e-5)))
    candidates = _candidates(weights, params)
    share = chance(params.seed, position)
    if candidates is None:
        return _draw(weights, share)
    return int(candidates[_draw(weights[candidates], share)])


def _draw(weights: np.ndarray, share: float, block: int = 256) -> int:
    """The index at `share` of the weights' sum. Sums of blocks first: a running sum of the whole vocabulary is slow."""
    blocks = np.cumsum(np.add.reduceat(weights, np.arange(0, len(weights), block)), dtype=np.float64)
    target = share * blocks[-1]
    chosen = min(int(np.searchsorted(blocks, target, side="right")), len(blocks) - 1)
    within = weights[chosen * block : (chosen + 1) * block]
    rest = target - (blocks[chosen - 1] if chosen else 0.0)
    index = int(np.searchsorted(np.cumsum(within, dtype=np.float64), rest, side="right"))
    if index == len(within):  # the sums were rounded differently
        index = int(within.argmax())
    return chosen * block + index


def chance(seed: int, position: int) -> float:
    """A number in [0, 1) that depends on nothing else."""
    digest = blake2b(f"{seed}:{position}".encode(), digest_size=8).digest()
    return (int.from_bytes(digest, "little") >> 11) / (1 << 53)


def _adjusted(logits: np.ndarray, params: SamplingParams, counts: Mapping[int, int]) -> np.ndarray:
    penalised = (params.frequency_penalty or params.presence_penalty) and counts
    if not penalised and not params.logit_bias:
        return logits
    logits = logits.copy()
    if penalised:
        tokens = np.fromiter(counts, np.int64)
        times = np.fromiter(counts.values(), np.float32)
        logits[tokens] -= np.float32(params.frequency_penalty) * times + np.float32(params.presence_penalty)
    for token, bias in params.logit_bias.items():
        logits[token] += np.float32(bias)
    return logits


def _candidates(weights: np.ndarray, params: SamplingParams) -> np.ndarray | None:
    """Ids that top_k and top_p leave, likeliest first; None: all of them. Ties go to the smaller id."""
    limit = min(params.top_k or len(weights), len(weights))
    if params.top_p >= 1:
        return None if limit == len(weights) else _likeliest(weights, limit)
    total = None if params.top_k else float(weights.sum(dtype=np.float64))
    size = min(64, limit)
    while True:
        ids = _likeliest(weights, size)
        cumulative = np.cumsum(weights[ids], dtype=np.float64)
        whole = size == limit
        mass = cumulative[-1] if whole else total
        if mass is None:  # top_k cuts first: what counts is the mass within it
            size = limit
            continue
        if whole or cumulative[-1] >= params.top_p * mass:
            return ids[: int(np.searchsorted(cumulative, params.top_p * mass)) + 1]
        size = min(size * 16, limit)


def _likeliest(weights: np.ndarray, size: int) -> np.ndarray:
    if size < len(weights):
        smallest = np.partition(weights, -size)[-size]
        ids = np.flatnonzero(weights >= smallest)
    else:
        ids = np.arange(len(weights))
    return ids[np.argsort(-weights[ids], kind="stable")][:size]
