"""`notebooks/01_quickstart.ipynb` as `make demo` runs it."""

import subprocess
import sys
from pathlib import Path

import nbformat
import pytest

NOTEBOOKS = Path(__file__).parents[2] / "notebooks"


def test_the_quickstart_is_short_and_holds_no_outputs() -> None:
    book = nbformat.read(NOTEBOOKS / "01_quickstart.ipynb", as_version=4)
    assert len(book.cells) <= 15
    assert "widgets" not in book.metadata
    assert all(
        not cell.outputs and cell.execution_count is None for cell in book.cells if cell.cell_type == "code"
    )


def test_an_answer_over_openais_client_is_printed_at_once() -> None:
    """Pages made with nbconvert have a block of output for each time that something is printed and flushed."""
    book = nbformat.read(NOTEBOOKS / "01_quickstart.ipynb", as_version=4)
    (cell,) = [cell for cell in book.cells if "OpenAI(" in cell.source]
    assert cell.source.count("print(") == 1 and "flush" not in cell.source


@pytest.mark.kernel
@pytest.mark.engine
@pytest.mark.timeout(280)
def test_every_cell_of_the_quickstart_runs() -> None:
    run = subprocess.run(
        [sys.executable, "-u", str(NOTEBOOKS / "demo.py"), str(NOTEBOOKS / "01_quickstart.ipynb")],
        capture_output=True, text=True, timeout=270,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout + run.stderr
    for text in (
        "3 engines ready",
        "P0 prefill [0, ",
        "pd_balance_factor=0.5",
        "prefill + decode",
        "is stopped",
    ):
        assert text in run.stdout, run.stdout
