"""Resuming where it counts: a decode engine that is killed in the middle of an answer."""

import asyncio
import os
import signal

import pytest

from mlcrouter_nb.cluster import Cluster
from mlcrouter_nb.telemetry import RequestTrace

QUESTION = {"prompt": "The history of the printing press begins with", "max_tokens": 40, "temperature": 0.0}


async def ask(cluster: Cluster):
    return await cluster.ask(**QUESTION, chat=False)


async def decoding(cluster: Cluster) -> RequestTrace:
    """A request that has got some tokens."""
    for _ in range(10_000):
        for trace in list(cluster.telemetry.live.values()):
            if trace.completion_tokens > 8:
                return trace
        await asyncio.sleep(0.005)
    raise AssertionError("no request came that far")


@pytest.mark.engine
def test_an_answer_goes_on_when_its_engine_is_killed():
    async def scenario() -> None:
        async with Cluster("smollm2-135m", roles="1P2D") as cluster:
            cluster.use("disagg", pd_balance_factor=0.2)
            expected = await ask(cluster)
            asking = asyncio.create_task(ask(cluster))
            victim = (await decoding(cluster)).calls[-1].engine
            os.kill(next(e.pid for e in cluster.engines if e.spec.name == victim), signal.SIGKILL)
            answer = await asking
            assert answer == expected
            assert answer.trace.resumed == 1
            assert (answer.usage["prompt_tokens"], answer.usage["completion_tokens"]) == (8, 40)
            states = {engine.name: (engine.state, engine.in_flight) for engine in cluster.status().engines}
            assert states.pop(victim) == ("failed", 0)
            assert set(states.values()) == {("ready", 0)}
            assert await ask(cluster) == expected

    asyncio.run(scenario())
