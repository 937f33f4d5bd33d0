"""What a launcher is: it turns an `EngineSpec` into an engine that answers at a URL."""

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, ClassVar

from ..roles import Role

# report(text, fraction): what the engine is doing while it starts; the fraction is 0 to 1, or None where unknown.
Report = Callable[[str, float | None], None]


@dataclass(frozen=True)
class EngineSpec:
    """One engine to start: its name and role, where it listens (port 0: any), its first worker in the NVSHMEM world."""

    name: str
    role: Role | None
    rank: int = 0
    host: str = "127.0.0.1"
    port: int = 0
    url: str | None = None


@dataclass(frozen=True)
class World:
    """The NVSHMEM world that a cluster's engines share: a random uid, and how many workers there are."""

    uid: tuple[int, ...]
    npes: int

    def environment(self, rank: int) -> dict[str, str]:
        """The variable that tells an engine its place, as MLC-LLM's engines read it."""
        import json

        config = {"uid": list(self.uid), "npes": self.npes, "pe_start": rank}
        return {"MLC_NVSHMEM_INIT_CONFIG_JSON_STR": json.dumps(config)}


@dataclass
class Engine(ABC):
    """A launched engine.

    `url` is set once `wait_ready` has returned; `facts` is what it said about itself then (KV pages, kernels)."""

    spec: EngineSpec
    url: str = ""
    facts: dict[str, Any] = field(default_factory=dict)
    log_path: Path | None = None

    @property
    def exited(self) -> asyncio.Future[int] | None:
        """Resolves with the exit code when the engine's process ends; None where we did not start it."""
        return None

    @abstractmethod
    async def wait_ready(self, report: Report) -> None:
        """Return when the engine answers; raises `BootError` with its exit code and log when it will not."""

    @abstractmethod
    async def stop(self, grace: float) -> None:
        """End the engine: asked politely, then, after `grace` seconds, not."""

    def terminate(self) -> None:  # noqa: B027
        """Ask the engine to end; needs no loop, does not wait. Nothing for engines that are not ours."""

    def kill(self, deadline: float) -> None:  # noqa: B027
        """`stop` without a loop: wait until the monotonic time `deadline`, then kill. Blocks."""

    def log_tail(self, lines: int = 15) -> str:
        """The last lines of its log; empty where there is none."""
        from .process import tail

        return tail(self.log_path, lines) if self.log_path is not None else ""


class Launcher(ABC):
    """Starts the engines of one kind, for one cluster."""

    kind: ClassVar[str]

    @abstractmethod
    def launch(self, spec: EngineSpec) -> Engine:
        """Start an engine; does not wait for it."""

    def clean_up(self, engines: list[Engine]) -> None:  # noqa: B027
        """Remove what engines that have ended may have left behind."""
