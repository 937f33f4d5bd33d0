"""Greedy text of one engine equals greedy text through disagg, whatever the balance, the prompt, the cache."""

import aiohttp
import pytest

from mlcrouter_nb.cluster import Cluster

pytestmark = pytest.mark.engine
LENGTHS = (1, 2, 16, 17, 900)


def prompt_of(length: int, salt: int) -> list[int]:
    """Token ids that no other test has put into a prefix cache."""
    return [1000 + (salt * 7919 + i * 31 + i * i * salt) % 40000 for i in range(length)]


async def greedy(http: aiohttp.ClientSession, prompt: list[int]) -> tuple[str, dict]:
    body = {"model": "smollm2-135m", "prompt": prompt, "max_tokens": 12, "temperature": 0, "ignore_eos": True}
    async with http.post("v1/completions", json=body) as answer:
        content = await answer.json()
        assert answer.status == 200, content
    return content["choices"][0]["text"], content["usage"]


@pytest.mark.parametrize("factor", [0, 0.1, 0.5, 0.9, 1])
async def test_disagg_says_what_one_engine_says(
    cluster: Cluster, http: aiohttp.ClientSession, factor: float
) -> None:
    for length in LENGTHS:
        prompt = prompt_of(length, salt=3 + int(factor * 10))
        cluster.use("disagg", pd_balance_factor=factor)
        cold, usage = await greedy(http, prompt)
        assert usage["prompt_tokens"] == length
        warm, _ = await greedy(http, prompt)
        cluster.use("round-robin")
        alone = {(await greedy(http, prompt))[0] for _ in range(3)}
        assert alone == {cold} == {warm}, f"{length} tokens, pd_balance_factor {factor}"
