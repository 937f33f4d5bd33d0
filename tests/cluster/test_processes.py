"""What is left of a cluster when its parent is interrupted, ends, or is killed: engines live on, or nothing does."""

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlcrouter_nb.nvshmem.segment import folders, segment_name

PARENT = Path(__file__).with_name("parent.py")
KINDS = ["stand-in", pytest.param("real", marks=pytest.mark.engine)]


@contextlib.contextmanager
def parent(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], dict[str, Any]]]:
    """A process, in a session of its own, that runs a cluster; and what it says of it."""
    with subprocess.Popen(
        [sys.executable, str(PARENT), *arguments], stdout=subprocess.PIPE, start_new_session=True
    ) as process:
        try:
            yield process, json.loads(process.stdout.readline())
        finally:
            if process.poll() is None:
                process.kill()


def left_over(cluster: dict[str, Any]) -> list[str]:
    """Engine processes, open ports and segments of a cluster."""
    left = [f"process {engine['pid']}" for engine in cluster["engines"] if alive(engine["pid"])]
    for url in [engine["url"] for engine in cluster["engines"]] + [cluster["url"].removesuffix("/v1")]:
        with (
            contextlib.suppress(OSError),
            socket.create_connection(("127.0.0.1", int(url.rpartition(":")[2])), 1),
        ):
            left.append(url)
    for rank in range(2):
        left += [str(folder / segment_name(cluster["uid"], rank)) for folder in folders()
                 if (folder / segment_name(cluster["uid"], rank)).exists()]  # fmt: skip
    return left


def alive(pid: int) -> bool:
    with contextlib.suppress(psutil.NoSuchProcess):
        return psutil.Process(pid).status() != psutil.STATUS_ZOMBIE
    return False


def nothing_is_left(cluster: dict[str, Any], seconds: float = 5.0) -> bool:
    deadline = time.monotonic() + seconds
    while left_over(cluster):
        if time.monotonic() > deadline:
            pytest.fail(f"left after {seconds} s: {left_over(cluster)}")
        time.sleep(0.1)
    return True


@pytest.mark.parametrize("kind", KINDS)
def test_a_killed_parent_leaves_nothing(kind: str) -> None:
    with parent(kind) as (process, cluster):
        assert [item for item in left_over(cluster) if item.startswith("process")], "it runs"
        process.kill()
        process.wait()
        assert nothing_is_left(cluster)


@pytest.mark.parametrize("kind", KINDS)
def test_a_parent_that_forgets_to_stop_leaves_nothing(kind: str) -> None:
    with parent(kind, "returns") as (process, cluster):
        assert process.wait(10) == 0
        assert nothing_is_left(cluster)


@pytest.mark.parametrize("kind", KINDS)
def test_an_interrupt_of_the_parents_group_leaves_engines_alive(kind: str) -> None:
    with parent(kind) as (process, cluster):
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(0.5)
        assert all(alive(engine["pid"]) for engine in cluster["engines"])
        process.kill()
        process.wait()
        assert nothing_is_left(cluster)


@pytest.mark.engine
def test_a_killed_engine_leaves_no_segment() -> None:
    with parent("real") as (_, cluster):
        victim = cluster["engines"][1]["pid"]
        names = [folder / segment_name(cluster["uid"], 1) for folder in folders()]
        assert any(name.exists() for name in names)
        os.kill(victim, signal.SIGKILL)
        deadline = time.monotonic() + 5
        while any(name.exists() for name in names):
            assert time.monotonic() < deadline
            time.sleep(0.05)


def test_a_policy_that_spins_keeps_nobody_from_leaving() -> None:
    with parent("stand-in", "spins") as (process, cluster):
        begin = time.monotonic()
        assert process.wait(10) == 0
        assert time.monotonic() - begin < 6, "a second or so of it until the policy spins"
        assert nothing_is_left(cluster, 0.5)
