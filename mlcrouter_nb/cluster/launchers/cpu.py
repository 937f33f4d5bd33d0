"""Our CPU engine: `python -m mlcrouter_nb.engine`, a process each, in one NVSHMEM world over shared memory."""

import asyncio
import contextlib
import json
import os
import site
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ...models.cache import log_dir
from ...nvshmem.segment import folders, segment_name
from ...protocol.errors import BootError
from ...protocol.progress import Progress
from .base import Engine, EngineSpec, Launcher, Report, World
from .process import ChildProcess, describe_exit, new_log_path


@dataclass(frozen=True)
class CpuOptions:
    """What all engines of a cluster share.

    `command` is what to run before the arguments; `silence` is how many seconds without a sign of progress mean that an
    engine will never be ready."""

    model_path: Path
    model_id: str
    threads: int | None = None
    prefix_cache: bool = True
    extra_arguments: tuple[str, ...] = ()
    command: tuple[str, ...] = (sys.executable, "-P", "-m", "mlcrouter_nb.engine")
    silence: float = 180.0


class CpuLauncher(Launcher):
    """Starts CPU engines."""

    kind = "cpu"

    def __init__(self, options: CpuOptions, world: World) -> None:
        self.options = options
        self.world = world

    def launch(self, spec: EngineSpec) -> "CpuEngine":
        return CpuEngine(spec, self._arguments(spec), self._environment(spec), self.options.silence)

    def clean_up(self, engines: list[Engine]) -> None:
        """Remove the shared memory of engines that were killed; an engine that exits removes its own."""
        for engine in engines:
            name = segment_name(list(self.world.uid), engine.spec.rank)
            for folder in folders():
                (folder / name).unlink(missing_ok=True)

    def _arguments(self, spec: EngineSpec) -> list[str]:
        options = self.options
        arguments = [*options.command, str(options.model_path), "--served-model-name", options.model_id]
        arguments += ["--host", spec.host, "--port", str(spec.port), "--report-json", "--exit-on-stdin-eof"]
        if spec.role is not None:
            arguments += ["--role", spec.role]
        if options.threads is not None:
            arguments += ["--threads", str(options.threads)]
        if options.prefix_cache:
            arguments.append("--enable-prefix-cache")
        return [*arguments, *options.extra_arguments]

    def _environment(self, spec: EngineSpec) -> dict[str, str]:
        environment = {**os.environ, **self.world.environment(spec.rank)}
        root = str(Path(__file__).resolve().parents[3])
        if root not in {
            str(Path(folder).resolve()) for folder in [*site.getsitepackages(), site.getusersitepackages()]
        }:
            # A checkout that is not installed: -P keeps the working folder, and so the package, off the engine's path.
            environment["PYTHONPATH"] = os.pathsep.join(filter(None, [environment.get("PYTHONPATH"), root]))
        return environment


class CpuEngine(Engine):
    """A CPU engine's process; it reports its progress, and that it is ready, as JSON lines on stdout."""

    def __init__(
        self, spec: EngineSpec, command: Sequence[str], environment: Mapping[str, str], silence: float
    ) -> None:
        super().__init__(spec)
        self.log_path = new_log_path(log_dir(), spec.name)
        self._silence = silence
        self._events: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        try:
            self._child = ChildProcess(
                command, environment=environment, log_path=self.log_path, on_line=self._on_line
            )
        except OSError as error:
            raise BootError(
                f"Engine {spec.name} could not be started: {command[0]}: {error.strerror}."
            ) from error
        self.pid = self._child.pid

    @property
    def exited(self) -> asyncio.Future[int]:
        return self._child.exited

    async def wait_ready(self, report: Report) -> None:
        while True:
            event = await self._next_event()
            if event.get("event") == "ready":
                self.url = str(event["url"])
                self.facts = event
                return
            if event.get("event") == "progress":
                progress = Progress(
                    str(event.get("stage", "")),
                    event.get("done"),
                    event.get("total"),
                    str(event.get("unit", "")),
                )
                report(str(progress), progress.fraction)

    async def stop(self, grace: float) -> None:
        await self._child.stop(grace)

    def terminate(self) -> None:
        self._child.terminate()

    def kill(self, deadline: float) -> None:
        self._child.kill(deadline)

    def _on_line(self, line: bytes) -> None:
        with contextlib.suppress(ValueError):  # not ours: something printed to stdout
            event = json.loads(line)
            if isinstance(event, dict):
                self._events.put_nowait(event)

    async def _next_event(self) -> dict[str, Any]:
        """The next line that the engine reports; raises `BootError` when it has ended or says nothing for too long."""
        getter = asyncio.ensure_future(self._events.get())
        news: set[asyncio.Future[Any]] = {getter, self.exited}
        try:
            await asyncio.wait(news, timeout=self._silence, return_when=asyncio.FIRST_COMPLETED)
            if getter.done():
                return getter.result()
        finally:
            getter.cancel()
        if self.exited.done():
            what = f"stopped before it was ready ({describe_exit(self.exited.result())})"
        else:
            what = f"is not ready, and has reported nothing for {self._silence:g} s"
        raise BootError(
            f"Engine {self.spec.name} {what}. The last lines of its log, {self.log_path}:\n{self.log_tail()}"
        )
