"""A shell with the extension, paced stand-in engines, and a look at what a test leaves behind."""

import importlib.util
import json
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from IPython.testing.globalipapp import start_ipython

PACED = Path(__file__).parent / "paced_engines.py"


@pytest.fixture
def paced_engines() -> Iterator[Callable[..., list[str]]]:
    """`paced_engines(3, pace=50)`: the URLs of that many engines, which end with the test."""
    processes = []

    def start(count: int, pace: float = 100.0) -> list[str]:
        process = subprocess.Popen(
            [sys.executable, str(PACED), str(count), str(pace)],
            stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
        )  # fmt: skip
        processes.append(process)
        assert process.stdout is not None
        return [process.stdout.readline().strip() for _ in range(count)]

    yield start
    for process in processes:
        process.stdin.close()
        process.wait(5)
        process.stdout.close()


@pytest.fixture
def engine_state() -> Callable[[str], dict[str, Any]]:
    """What a paced engine says of itself."""

    def get(url: str) -> dict[str, Any]:
        with urllib.request.urlopen(f"{url}/state", timeout=5) as answer:
            return json.load(answer)

    return get


@pytest.fixture(scope="session")
def terminal() -> InteractiveShell:
    """One in-process IPython for all tests."""
    return start_ipython() or InteractiveShell.instance()


@pytest.fixture
def shell(terminal: InteractiveShell) -> Iterator[InteractiveShell]:
    """IPython with the extension; unloaded after the test, whatever it did."""
    terminal.run_line_magic("load_ext", "mlcrouter_nb")
    yield terminal
    if "mlcrouter_nb" in terminal.extension_manager.loaded:
        terminal.run_line_magic("unload_ext", "mlcrouter_nb")


@pytest.fixture
def run(shell: InteractiveShell) -> Callable[[str], ExecutionResult]:
    """Run a cell that must succeed."""

    def run_cell(source: str) -> ExecutionResult:
        result = shell.run_cell(source, store_history=True)
        result.raise_error()
        return result

    return run_cell


@pytest.fixture
def fails(shell: InteractiveShell, capsys: pytest.CaptureFixture[str]) -> Callable[[str], str]:
    """Run a cell that must fail, and answer what the user sees of it."""

    def run_cell(source: str) -> str:
        capsys.readouterr()
        result = shell.run_cell(source, store_history=True)
        assert not result.success, f"{source!r} did not fail"
        output = capsys.readouterr()
        text = output.out + output.err
        assert "Traceback" not in text
        return text

    return run_cell


@pytest.fixture
def start_kernel(tmp_path: Path) -> Iterator[Callable[[], Any]]:
    """`start_kernel()`: a real kernel with the extension loaded; shut down after the test."""
    kernels = []

    def start() -> Any:
        folder = tmp_path / f"kernel{len(kernels)}"
        folder.mkdir()
        kernel = load("kernels").Kernel(folder)
        kernels.append(kernel)
        kernel.run("%load_ext mlcrouter_nb")
        return kernel

    yield start
    for kernel in kernels:
        kernel.close()


def load(name: str) -> Any:
    """A helper module of this folder (tests are imported by path, so they cannot name each other)."""
    if f"notebook_{name}" not in sys.modules:
        spec = importlib.util.spec_from_file_location(
            f"notebook_{name}", Path(__file__).parent / f"{name}.py"
        )
        assert spec is not None and spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        sys.modules[spec.name] = module
        spec.loader.exec_module(module)
    return sys.modules[f"notebook_{name}"]


@pytest.fixture(scope="session")
def kernels() -> Any:
    """The module `kernels.py`."""
    return load("kernels")


@pytest.fixture
def labs() -> Any:
    """The module `labs.py`; skips where there is no browser."""
    module = load("labs")
    if module.CHROMIUM is None:
        pytest.skip("no Chromium or Chrome on this machine")
    return module
