"""Engine processes: how they start, fail, die and end."""

import asyncio
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import psutil
import pytest

from mlcrouter_nb.cluster.boot import boot, stop_all
from mlcrouter_nb.cluster.launchers.base import Engine, EngineSpec
from mlcrouter_nb.cluster.launchers.cpu import CpuLauncher
from mlcrouter_nb.cluster.launchers.process import ChildProcess, describe_exit, new_log_path, tail
from mlcrouter_nb.protocol.errors import BootError
from mlcrouter_nb.telemetry import Telemetry

SPECS = [EngineSpec("P0", "prefill", 0), EngineSpec("D1", "decode", 1)]
Launchers = Callable[..., CpuLauncher]


async def test_engines_start_side_by_side_and_stop(launcher: Launchers) -> None:
    telemetry, engines = Telemetry(), []
    begin = time.monotonic()
    await boot(launcher(), SPECS, telemetry, engines)
    assert [view.state for view in telemetry.snapshot().engines] == ["ready", "ready"]
    assert [view.role for view in telemetry.snapshot().engines] == ["prefill", "decode"]
    assert all(engine.url.startswith("http://127.0.0.1:") for engine in engines)
    assert any("building kernels: 3 of 10" in str(event.data.get("detail")) for event in telemetry.events)
    assert {os.getpgid(engine.pid) for engine in engines} == {engine.pid for engine in engines}, (
        "sessions of their own"
    )
    assert time.monotonic() - begin < 10
    await stop_all(launcher(), engines, telemetry, grace=2)
    assert [engine.exited.result() for engine in engines] == [0, 0]
    assert {view.state for view in telemetry.snapshot().engines} == {"stopped"}


async def test_an_engine_that_exits_at_start_is_named_with_its_log(launcher: Launchers) -> None:
    telemetry, engines = Telemetry(), []
    begin = time.monotonic()
    with pytest.raises(BootError, match="P0") as raised:
        await boot(launcher("exits"), SPECS[:1], telemetry, engines)
    assert "exit code 3" in str(raised.value)
    assert "no such instruction: vpdpbusd" in str(raised.value)
    assert time.monotonic() - begin < 5, "at once"
    assert telemetry.snapshot().engines[0].state == "failed"
    await stop_all(launcher(), engines, telemetry, grace=2)


async def test_an_engine_that_is_never_ready_is_given_up(launcher: Launchers) -> None:
    telemetry, engines = Telemetry(), []
    with pytest.raises(BootError, match="reported nothing for"):
        await boot(launcher("silent", silence=1.5), SPECS[:1], telemetry, engines)
    await stop_all(launcher(), engines, telemetry, grace=0.5)


async def test_a_program_that_is_not_there_is_a_boot_error(launcher: Launchers) -> None:
    from dataclasses import replace

    broken = launcher()
    broken.options = replace(broken.options, command=("/nowhere/python",))
    with pytest.raises(BootError, match="/nowhere/python"):
        broken.launch(SPECS[0])


async def test_a_deaf_engine_is_killed(launcher: Launchers) -> None:
    telemetry, engines = Telemetry(), []
    await boot(launcher("deaf"), SPECS[:1], telemetry, engines)
    begin = time.monotonic()
    await stop_all(launcher(), engines, telemetry, grace=0.3)
    assert engines[0].exited.result() == -signal.SIGKILL
    assert time.monotonic() - begin < 2


async def test_a_stopped_engine_is_killed_too(launcher: Launchers) -> None:
    telemetry, engines = Telemetry(), []
    await boot(launcher(), SPECS[:1], telemetry, engines)
    os.kill(engines[0].pid, signal.SIGSTOP)
    await stop_all(launcher(), engines, telemetry, grace=0.3)
    assert not psutil.pid_exists(engines[0].pid)


async def test_an_engine_exits_when_its_stdin_ends_and_no_sibling_holds_the_pipe(launcher: Launchers) -> None:
    """Without a signal: the way engines end when their parent is killed."""
    telemetry, engines = Telemetry(), []
    await boot(launcher("deaf"), SPECS, telemetry, engines)
    first: Engine = engines[0]
    first._child._stdin.close()
    await asyncio.wait_for(asyncio.shield(first.exited), 3)
    assert not engines[1].exited.done()
    await stop_all(launcher(), engines, telemetry, grace=0.1)


@pytest.mark.filterwarnings("ignore:This process:DeprecationWarning")
async def test_a_fork_of_the_parent_does_not_hold_the_pipe(launcher: Launchers) -> None:
    telemetry, engines = Telemetry(), []
    await boot(launcher("deaf"), SPECS[:1], telemetry, engines)
    fork = os.fork()
    if fork == 0:
        time.sleep(10)  # noqa: ASYNC251  (another process)
        os._exit(0)
    try:
        engines[0]._child._stdin.close()
        await asyncio.wait_for(asyncio.shield(engines[0].exited), 3)
    finally:
        os.kill(fork, signal.SIGKILL)
        os.waitpid(fork, 0)  # noqa: ASYNC222
        await stop_all(launcher(), engines, telemetry, grace=0.1)


async def test_the_exit_of_a_ready_engine_is_seen(launcher: Launchers) -> None:
    telemetry, engines = Telemetry(), []
    await boot(launcher("dies"), SPECS[:1], telemetry, engines)
    assert await asyncio.wait_for(asyncio.shield(engines[0].exited), 5) == 7
    assert "out of cheese" in engines[0].log_tail()
    await stop_all(launcher(), engines, telemetry, grace=0.1)


async def test_lines_are_whole_however_they_come(tmp_path: Path) -> None:
    lines: list[bytes] = []
    program = "import sys,time\nfor part in ('a','b\\nc','\\n'):\n sys.stdout.write(part); sys.stdout.flush(); time.sleep(.05)"
    child = ChildProcess(
        ["python3", "-c", program],
        environment=dict(os.environ),
        log_path=tmp_path / "log",
        on_line=lines.append,
    )
    assert await asyncio.wait_for(asyncio.shield(child.exited), 10) == 0
    await child.stop(1)
    assert lines == [b"ab", b"c"]


def test_tail_and_exit_codes(tmp_path: Path) -> None:
    path = tmp_path / "log"
    path.write_text("".join(f"line {i}\n" for i in range(100_000)))
    assert tail(path, 2) == "line 99998\nline 99999"
    assert tail(tmp_path / "none", 2) == ""
    assert describe_exit(3) == "exit code 3"
    assert describe_exit(-9) == "killed by SIGKILL"


def test_old_logs_go(tmp_path: Path) -> None:
    old, young = tmp_path / "old.log", tmp_path / "young.log"
    old.touch()
    young.touch()
    os.utime(old, (1, 1))
    assert new_log_path(tmp_path, "P0").parent == tmp_path
    assert not old.exists()
    assert young.exists()
