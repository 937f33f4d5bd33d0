"""Clusters of stand-in engines: real processes that load no model."""

import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import psutil
import pytest

from mlcrouter_nb.cluster.launchers.base import World
from mlcrouter_nb.cluster.launchers.cpu import CpuLauncher, CpuOptions

STAND_IN = Path(__file__).parent / "stand_in_engine.py"


def stand_in_options(mode: str = "ok", silence: float = 30.0) -> CpuOptions:
    return CpuOptions(
        model_path=Path("none.gguf"), model_id="stand-in", command=(sys.executable, str(STAND_IN), mode), silence=silence
    )


@pytest.fixture
def launcher() -> Callable[..., CpuLauncher]:
    """`launcher("dies")`: a launcher of stand-in engines of that mode."""

    def make(mode: str = "ok", silence: float = 30.0) -> CpuLauncher:
        return CpuLauncher(stand_in_options(mode, silence), World((1, 2, 3), 3))

    return make


@pytest.fixture(autouse=True)
def cache(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """Logs go to a folder of the test's own."""
    monkeypatch.setenv("MLCROUTER_CACHE", str(tmp_path))
    return tmp_path


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
