"""What nbconvert makes of an executed notebook, seen in a browser that reaches no other server."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import nbformat
import pytest

pytestmark = [pytest.mark.browser, pytest.mark.kernel, pytest.mark.timeout(180)]


def nbconvert(folder: Path, *arguments: str) -> None:
    environment = os.environ | {
        "IPYTHONDIR": str(folder / "ipython"),
        "JUPYTER_CONFIG_DIR": str(folder / "config"),
    }
    run = subprocess.run(
        [sys.executable, "-m", "nbconvert", *arguments],
        cwd=folder, env=environment, capture_output=True, text=True, timeout=90,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr


@pytest.fixture
def notebook(tmp_path: Path, paced_engines: Callable[..., list[str]]) -> Path:
    up = f"%load_ext mlcrouter_nb\nc = %route up --roles 2 --endpoint-urls {' '.join(paced_engines(2))}"
    cells = [nbformat.v4.new_code_cell(source) for source in (up, "%route panel", "%route down")]
    nbformat.write(nbformat.v4.new_notebook(cells=cells), tmp_path / "book.ipynb")
    return tmp_path


@pytest.mark.parametrize(
    "steps",
    [
        [["--to", "html", "--execute", "book.ipynb"]],
        [["--to", "notebook", "--execute", "--inplace", "book.ipynb"], ["--to", "html", "book.ipynb"]],
    ],
    ids=["html", "ipynb-then-html"],
)
def test_the_page_shows_the_table_of_the_panel_once(
    notebook: Path, labs: Any, steps: list[list[str]]
) -> None:
    for arguments in steps:
        nbconvert(notebook, *arguments)
    with labs.browser(1000, 800) as tab:
        tab.route(
            "**/*", lambda route: route.continue_() if route.request.url[:5] == "file:" else route.abort()
        )
        tab.goto((notebook / "book.html").as_uri())
        tab.wait_for_timeout(500)
        rows = [row for row in tab.query_selector_all("th[scope=row]") if row.is_visible()]
        assert [row.inner_text() for row in rows] == ["E0", "E1"]
