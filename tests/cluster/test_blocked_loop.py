"""A policy that never awaits blocks the router's loop: calls say so, and the cluster can be stopped all the same."""

import time
from collections.abc import Callable

import psutil
import pytest

from mlcrouter_nb import MlcRouterError
from mlcrouter_nb.cluster import Cluster, current
from mlcrouter_nb.nvshmem.segment import folders, segment_name

StandIns = Callable[..., Cluster]
SPIN = """\
async def route(request, engines):
    while True:
        pass
    return engines.all[0].complete(request)
"""
SLEEP = """\
import time
async def route(request, engines):
    time.sleep(7)
    return engines.all[0].complete(request)
"""


def block(cluster: Cluster, source: str = SPIN) -> None:
    cluster.use(cluster.book.compile("stuck", source, "cell [3]", "stuck.py"))
    cluster.submit("Who?", max_tokens=3)
    while cluster.loop_thread.blocked is None:
        time.sleep(0.01)


def test_a_call_that_times_out_names_the_line(stand_ins: StandIns) -> None:
    cluster = stand_ins(roles="1P1D").start_blocking()
    block(cluster)
    begin = time.monotonic()
    with pytest.raises(MlcRouterError, match=r"policy 'stuck', line [23].*%route down"):
        cluster.use("disagg")
    assert time.monotonic() - begin < 6


@pytest.mark.parametrize(("mode", "source"), [("ok", SPIN), ("ok", SLEEP), ("deaf", SPIN)])
def test_down_ends_the_engines_without_the_loop(stand_ins: StandIns, mode: str, source: str) -> None:
    cluster = stand_ins(mode, roles="1P1D").start_blocking()
    world, pids = cluster.service.launcher.world, [engine.pid for engine in cluster.engines]
    segment = folders()[0] / segment_name(list(world.uid), 1)
    segment.touch()
    block(cluster, source)
    begin = time.monotonic()
    cluster.down_blocking()
    assert time.monotonic() - begin < 5
    assert not any(psutil.pid_exists(pid) for pid in pids)
    assert not segment.exists()
    assert [engine.state for engine in cluster.status().engines] == ["stopped", "stopped"]
    assert cluster.status().state == "stopped"
    assert current.find() is None
    with pytest.raises(MlcRouterError, match="not running"):
        cluster.submit("Who?")


async def test_down_and_up_again(stand_ins: StandIns) -> None:
    port = 0
    for _ in range(2):
        cluster = await stand_ins(roles="1P1D", port=port).start()
        port = cluster.status().url and int(cluster.url.split(":")[2].partition("/")[0])
        assert await cluster.ask("Who?", max_tokens=2) == "Humpty Dumpty "
        block(cluster)
        await cluster.down()
    assert not cluster._thread._thread.is_alive(), "a loop in Python code does not burn on"


def test_who_waits_for_an_answer_is_told(stand_ins: StandIns) -> None:
    cluster = stand_ins(roles="1P1D").start_blocking()
    block(cluster, SLEEP)
    waiting = cluster.submit("Who?")
    cluster.down_blocking()
    assert waiting.wait(1)
