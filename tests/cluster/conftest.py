"""Clusters of stand-in engines: real processes that load no model."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

from mlcrouter_nb.cluster import Cluster, current, service
from mlcrouter_nb.cluster.launchers.base import World
from mlcrouter_nb.cluster.launchers.cpu import CpuLauncher, CpuOptions
from mlcrouter_nb.cluster.model import Model

STAND_IN = Path(__file__).parent / "stand_in_engine.py"


def stand_in_options(mode: str = "ok", silence: float = 30.0) -> CpuOptions:
    command = (sys.executable, str(STAND_IN), mode)
    return CpuOptions(model_path=Path("none.gguf"), model_id="stand-in", command=command, silence=silence)


class Words:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


@pytest.fixture
def launcher() -> Callable[..., CpuLauncher]:
    """`launcher("dies")`: a launcher of stand-in engines of that mode."""

    def make(mode: str = "ok", silence: float = 30.0) -> CpuLauncher:
        return CpuLauncher(stand_in_options(mode, silence), World((1, 2, 3), 3))

    return make


@pytest.fixture
def stand_ins(monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Cluster]]:
    """`stand_ins("dies", roles="1P1D")`: a cluster, not started, whose engines are stand-ins of that mode."""
    made: list[Cluster] = []

    def make(mode: str = "ok", **arguments: Any) -> Cluster:
        async def find_model(options: Any, telemetry: Any) -> Model:
            return Model("stand-in", None, Words(), None)

        def make_launcher(options: Any, model: Model) -> CpuLauncher:
            return CpuLauncher(stand_in_options(mode), options.new_world())

        monkeypatch.setattr(service, "find_model", find_model)
        monkeypatch.setattr(service, "make_launcher", make_launcher)
        made.append(Cluster("stand-in", engine="cpu", **arguments))
        return made[-1]

    yield make
    for cluster in made:
        cluster.down_blocking(grace=0.0)
    assert current.find() is None


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest, tmp_path: Path) -> None:
    """Logs go to a folder of the test's own, except where real engines need the weights."""
    monkeypatch.delenv("MLCROUTER_ENGINE", raising=False)
    monkeypatch.delenv("MLCROUTER_API_KEY", raising=False)
    if request.node.get_closest_marker("engine") is None:
        monkeypatch.setenv("MLCROUTER_CACHE", str(tmp_path))


@pytest.fixture(autouse=True)
def no_process_stays() -> Iterator[None]:
    """Every test ends with the child processes that it began with."""
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    yield
    children = [child for child in psutil.Process().children(recursive=True) if child.pid not in before]
    _, alive = psutil.wait_procs(children, timeout=3)
    for child in alive:
        child.kill()
    assert not alive
