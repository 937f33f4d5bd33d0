"""Segments of shared memory: made once, found by name, gone with their owner."""

import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from mlcrouter_nb.nvshmem import NvshmemConfig, segment, sweep, unlink_all, unlink_own
from mlcrouter_nb.nvshmem.segment import HEADER_BYTES, PageLayout, Segment, segment_name

LAYOUT = PageLayout((2, 4, 2, 3, 16, 8), "float32", 12288)

OWNER = """
import sys, time
from mlcrouter_nb.nvshmem.segment import PageLayout, Segment
Segment.create(sys.argv[1], PageLayout((2, 4, 2, 3, 16, 8), "float32", 12288), 24576)
print("ready", flush=True)
sys.stdin.read()
"""


@pytest.fixture
def uid() -> Iterator[list[int]]:
    uid = [random.randrange(256) for _ in range(128)]
    yield uid
    unlink_all(uid, 4)


def start_owner(name: str) -> "subprocess.Popen[bytes]":
    owner = subprocess.Popen(
        [sys.executable, "-c", OWNER, name], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert owner.stdout is not None
    assert owner.stdout.readline() == b"ready\n"
    return owner


def finish(owner: "subprocess.Popen[bytes]") -> None:
    for pipe in (owner.stdin, owner.stdout):
        assert pipe is not None
        pipe.close()
    owner.wait(10)


def paths(name: str) -> list[Path]:
    return [folder / name for folder in segment.folders() if (folder / name).exists()]


def test_names_are_short_private_and_differ(uid: list[int]) -> None:
    names = {segment_name(uid, pe) for pe in range(20)} | {segment_name([*uid, 1], 0)}
    assert len(names) == 21
    assert all(len(name) <= 30 and name.startswith("mlcrt-") for name in names)
    own = Segment.create(segment_name(uid, 0), LAYOUT, 24576)
    assert os.stat(own.path).st_mode & 0o777 == 0o600
    own.unlink()
    own.close()


def test_what_one_writes_the_other_reads(uid: list[int]) -> None:
    own = Segment.create(segment_name(uid, 0), LAYOUT, 24576)
    peer = Segment.open(segment_name(uid, 0))
    assert peer.layout == LAYOUT
    assert peer.layout.slots == 64
    assert len(peer.memory) == HEADER_BYTES + 24576
    assert not any(peer.memory[HEADER_BYTES:])
    peer.memory[HEADER_BYTES + 100] = 7
    assert own.memory[HEADER_BYTES + 100] == 7
    assert peer.is_current()
    own.unlink()
    assert not peer.is_current()
    for each in (own, peer):
        each.close()
    with pytest.raises(FileNotFoundError, match="not running"):
        Segment.open(segment_name(uid, 0))


def test_a_living_owner_keeps_its_segment(uid: list[int]) -> None:
    name = segment_name(uid, 0)
    owner = start_owner(name)
    try:
        with pytest.raises(FileExistsError, match="uid and pe_start"):
            Segment.create(name, LAYOUT, 24576)
        sweep()
        assert paths(name)
    finally:
        finish(owner)
    assert not paths(name)  # gone at exit


def test_a_killed_owners_segment_is_refused_swept_and_replaced(
    uid: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    name = segment_name(uid, 0)
    owner = start_owner(name)
    peer = Segment.open(name)
    assert peer.is_current()
    owner.send_signal(signal.SIGKILL)
    finish(owner)
    assert paths(name)
    assert not peer.is_current()
    peer.close()
    with pytest.raises(FileNotFoundError):
        Segment.open(name)
    sweep()
    assert paths(name)  # too young to judge
    own = Segment.create(name, LAYOUT, 24576)  # but its own name's heir may take it
    own.unlink()
    own.close()

    owner = start_owner(name)
    owner.send_signal(signal.SIGKILL)
    finish(owner)
    monkeypatch.setattr(segment, "_YOUNG_S", 0.0)
    time.sleep(0.01)
    assert sweep() >= 1
    assert not paths(name)


def test_a_world_and_a_process_clean_up(uid: list[int]) -> None:
    own = [Segment.create(segment_name(uid, pe), LAYOUT, 24576) for pe in range(3)]
    assert unlink_all(uid, 2) == 2
    assert paths(segment_name(uid, 2))
    unlink_own()
    assert not paths(segment_name(uid, 2))
    for each in own:
        each.close()


def test_a_small_shared_memory_is_avoided(
    uid: list[int], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    small, large = tmp_path / "small", tmp_path / "large"
    small.mkdir()
    large.mkdir()
    monkeypatch.setattr(segment, "folders", lambda: [small, large])
    sizes = {small: 64 << 20, large: 1 << 40}

    class Space:
        f_frsize = 1

        def __init__(self, path: Path) -> None:
            self.f_bavail = sizes[path]

    monkeypatch.setattr(segment.os, "statvfs", Space)
    own = Segment.create(segment_name(uid, 0), LAYOUT, 100 << 20)
    assert own.path.parent == large
    peer = Segment.open(segment_name(uid, 0))
    assert peer.path == own.path
    own.unlink()
    for each in (own, peer):
        each.close()


@pytest.mark.parametrize(
    "text",
    [
        "{",
        "[]",
        '{"uid": 3}',
        '{"uid": ["x"], "npes": 2, "pe_start": 0}',
        '{"uid": [1], "npes": 2, "pe_start": 2}',
    ],
)
def test_a_wrong_variable_is_named(text: str) -> None:
    with pytest.raises(ValueError, match="MLC_NVSHMEM_INIT_CONFIG_JSON_STR"):
        NvshmemConfig.from_env({"MLC_NVSHMEM_INIT_CONFIG_JSON_STR": text})


def test_the_variable() -> None:
    assert NvshmemConfig.from_env({}) is None
    text = '{"uid": [1, 2], "npes": 3, "pe_start": 1}'
    assert NvshmemConfig.from_env({"MLC_NVSHMEM_INIT_CONFIG_JSON_STR": text}) == NvshmemConfig([1, 2], 3, 1)
