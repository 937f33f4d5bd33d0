"""One real cluster, 1P2D, for the tests that look at the whole."""

import asyncio
from collections.abc import AsyncIterator

import aiohttp
import pytest

from mlcrouter_nb.cluster import Cluster


@pytest.fixture(scope="module")
def cluster() -> AsyncIterator[Cluster]:
    running = Cluster("smollm2-135m", roles="1P2D")
    asyncio.run(running.start())
    yield running
    asyncio.run(running.down())


@pytest.fixture
async def http(cluster: Cluster) -> AsyncIterator[aiohttp.ClientSession]:
    async with aiohttp.ClientSession(base_url=cluster.url.removesuffix("/v1") + "/") as session:
        yield session
