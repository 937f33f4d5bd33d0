"""Two hundred requests, a third of them left at random moments: nothing stays behind."""

import asyncio
import random

import aiohttp
import pytest

from mlcrouter_nb.cluster import Cluster

pytestmark = pytest.mark.engine


async def one(http: aiohttp.ClientSession, number: int, patience: float | None) -> str:
    body = {
        "model": "smollm2-135m",
        "prompt": f"{number} is a number that " * (1 + number % 9),
        "max_tokens": 8 + number % 9,
        "stream": number % 3 != 0,
        "seed": number,
    }

    async def ask() -> str:
        async with http.post("v1/completions", json=body) as answer:
            await answer.read()
            return f"{answer.status}"

    try:
        return await asyncio.wait_for(ask(), patience)
    except TimeoutError:
        return "left"


@pytest.mark.parametrize("policy", ["disagg", "least-loaded"])
async def test_nothing_stays_behind(cluster: Cluster, http: aiohttp.ClientSession, policy: str) -> None:
    cluster.use(policy)
    chance = random.Random(policy)
    gate = asyncio.Semaphore(24)

    async def limited(number: int) -> str:
        async with gate:
            return await one(http, number, chance.uniform(0.0, 1.5) if number % 3 == 0 else None)

    outcomes = await asyncio.gather(*(limited(number) for number in range(100)))
    assert {outcome for i, outcome in enumerate(outcomes) if i % 3} == {"200"}
    assert "left" in outcomes
    for _ in range(100):
        engines = cluster.status().engines
        held = {e.name: (e.in_flight, e.waiting_tokens, e.kv_pages_used - e.kv_pages_cached) for e in engines}
        if set(held.values()) == {(0, 0, 0)} and cluster.status().in_flight == 0:
            break
        await asyncio.sleep(0.1)
    assert set(held.values()) == {(0, 0, 0)}, held
    assert cluster.status().in_flight == 0
