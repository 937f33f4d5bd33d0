"""Fixtures that several rooms share: the weights, and real engines as processes of their own."""

import json
import os
import random
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import IO, Any

import pytest

BOOT_DEADLINE_S = 150.0  # the first one builds the kernels


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file, fetched on first use."""
    from mlcrouter_nb.models.names import resolve

    return resolve("smollm2-135m").path


class EngineProcess:
    """A real engine. `facts` is its ready event: url, port, kernels, kv_pages, page_size, context_length, model."""

    def __init__(self, arguments: tuple[str, ...], environment: dict[str, str], log: Path) -> None:
        command = [
            sys.executable,
            "-m",
            "mlcrouter_nb.engine",
            *arguments,
            "--report-json",
            "--exit-on-stdin-eof",
        ]
        self.log = log
        with log.open("w") as stderr:
            self.process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=stderr,
                env={**os.environ, **environment},
                start_new_session=True,
            )
        self.facts: dict[str, Any] = {}
        self._lines: list[dict[str, Any]] = []
        self._ready = threading.Event()
        assert self.process.stdout is not None
        self._reader = threading.Thread(target=self._read, args=(self.process.stdout,), daemon=True)
        self._reader.start()

    def wait_until_ready(self) -> None:
        if not self._ready.wait(BOOT_DEADLINE_S) or not self.facts:
            raise AssertionError(
                f"The engine did not start: {self.process.poll()}\n{self.log.read_text()[-3000:]}"
            )

    @property
    def url(self) -> str:
        return str(self.facts["url"])

    def stop(self) -> int:
        """End it; its exit code."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGCONT)
            self.process.terminate()
        try:
            code = self.process.wait(15)
        except subprocess.TimeoutExpired:
            self.process.kill()
            code = self.process.wait(5)
        self._reader.join(5)
        for pipe in (self.process.stdin, self.process.stdout):
            if pipe is not None:
                pipe.close()
        return code

    def _read(self, pipe: IO[bytes]) -> None:
        for line in pipe:
            event = json.loads(line)
            self._lines.append(event)
            if event["event"] == "ready":
                self.facts = event
                self._ready.set()
        self._ready.set()  # it has ended


SpawnEngine = Callable[..., EngineProcess]
SpawnWorld = Callable[..., list[EngineProcess]]


@pytest.fixture(scope="session")
def spawn_world(tmp_path_factory: pytest.TempPathFactory, model_path: Path) -> Iterator[SpawnWorld]:
    """`spawn_world(3, "--enable-prefix-cache")`: engines that can send KV to each other, ranks 0, 1, 2; all ready.

    They end with the session, or by `.stop()`."""
    started: list[EngineProcess] = []

    def spawn(
        count: int, *arguments: str, model: str = "smollm2-135m", env: dict[str, str] | None = None
    ) -> Any:
        uid = [random.randrange(256) for _ in range(128)]
        folder = tmp_path_factory.mktemp("engines")
        threads = () if "--threads" in arguments else ("--threads", "1")
        engines = []
        for rank in range(count):
            world = {
                "MLC_NVSHMEM_INIT_CONFIG_JSON_STR": json.dumps({"uid": uid, "npes": count, "pe_start": rank})
            }
            environment = {**(world if count > 1 else {}), **(env or {})}
            engine = EngineProcess((model, *threads, *arguments), environment, folder / f"{rank}.log")
            engines.append(engine)
            started.append(engine)
        for engine in engines:
            engine.wait_until_ready()
        return engines

    yield spawn
    for engine in started:
        engine.stop()


@pytest.fixture(scope="session")
def spawn_engine(spawn_world: SpawnWorld) -> SpawnEngine:
    """`spawn_engine("--enable-prefix-cache")`: one engine of its own, ready."""

    def spawn(*arguments: str, **options: Any) -> EngineProcess:
        return spawn_world(1, *arguments, **options)[0]

    return spawn


@pytest.fixture(scope="session")
def engine_pair(spawn_world: SpawnWorld) -> list[EngineProcess]:
    """A prefill engine (rank 0) and a decode engine (rank 1), prefix caches on; shared by the session."""
    return spawn_world(2, "--enable-prefix-cache")
