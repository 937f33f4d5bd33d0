"""Starts a cluster's engines side by side, and stops them side by side."""

import asyncio
import time
from collections.abc import Sequence

from ..telemetry import Telemetry
from .launchers.base import Engine, EngineSpec, Launcher
from .launchers.process import describe_exit

TERM_GRACE = 2.0


async def boot(
    launcher: Launcher, specs: Sequence[EngineSpec], telemetry: Telemetry, engines: list[Engine]
) -> None:
    """Launch all engines and return when each answers; `engines` is filled at once, for whoever must stop them.

    The first that fails raises its `BootError`; the others are left to the caller to stop."""
    for spec in specs:
        telemetry.emit(
            "engine_state",
            engine=spec.name,
            role=spec.role,
            state="starting",
            detail="starting",
            progress=None,
            url=spec.url or "",
        )
    for spec in specs:
        engines.append(launcher.launch(spec))
    waits = [asyncio.ensure_future(_wait_ready(engine, telemetry)) for engine in engines]
    try:
        await asyncio.gather(*waits)
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.wait(waits)


async def _wait_ready(engine: Engine, telemetry: Telemetry) -> None:
    name = engine.spec.name

    def report(text: str, fraction: float | None) -> None:
        telemetry.emit("engine_state", engine=name, state="starting", detail=text, progress=fraction)

    try:
        await engine.wait_ready(report)
    except Exception as error:
        telemetry.emit("engine_state", engine=name, state="failed", detail=str(error), progress=None)
        raise
    telemetry.emit(
        "engine_state",
        engine=name,
        state="ready",
        detail="",
        progress=None,
        url=engine.url,
        kernels=str(engine.facts.get("kernels", "")),
        kv_pages_total=engine.facts.get("kv_pages"),
    )


async def stop_all(launcher: Launcher, engines: Sequence[Engine], telemetry: Telemetry, grace: float) -> None:
    """Stop the engines at once, then remove what they left."""
    if engines:
        stops = [asyncio.ensure_future(engine.stop(grace)) for engine in engines]
        await asyncio.wait(stops)
        for stop in stops:
            stop.exception()  # an engine that cannot be stopped does not keep the others
    launcher.clean_up(list(engines))
    _say_stopped(engines, telemetry)


def kill_all(launcher: Launcher, engines: Sequence[Engine], telemetry: Telemetry, grace: float) -> None:
    """`stop_all` from a thread of any kind, for when the loop does not turn; starts no thread, so that it works while
    the interpreter ends."""
    for engine in engines:
        engine.terminate()
    deadline = time.monotonic() + grace
    for engine in engines:
        engine.kill(deadline)
    launcher.clean_up(list(engines))
    _say_stopped(engines, telemetry)


def _say_stopped(engines: Sequence[Engine], telemetry: Telemetry) -> None:
    for engine in engines:
        telemetry.emit(
            "engine_state", engine=engine.spec.name, state="stopped", in_flight=0, waiting_tokens=0
        )


def death_of(engine: Engine, code: int) -> str:
    """What the panel says of an engine that ended by itself."""
    return f"ended by itself ({describe_exit(code)}). The last lines of its log, {engine.log_path}:\n{engine.log_tail()}"
