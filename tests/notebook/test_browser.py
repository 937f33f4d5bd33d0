"""The quickstart in a real JupyterLab in a real browser.

With MLCROUTER_SCREENSHOTS set to a folder, the panel's pictures are kept there (README's is `panel.png`)."""

import os
import re
import time
from pathlib import Path
from typing import Any

import nbformat
import pytest

QUICKSTART = Path(__file__).parents[2] / "notebooks" / "01_quickstart.ipynb"
LONG = (
    "%%ask --max-tokens 16 --policy disagg\n{} one: "
    + "The tide comes in twice a day, and nobody minds. " * 12
)
STORY = (
    "The tide comes in twice a day because the Moon pulls on the sea as the Earth turns under it. So the old "
    "fisherman had learned to read the water long before he learned to read the clock, and he tied his boat with a "
    "rope so long that the village laughed at it, until the night of the great storm. "
)
EXTRA = [
    LONG.format("Story"),
    "import time\nimport mlcrouter_nb\ntime.sleep(6)\nprint(mlcrouter_nb.cluster().params)",
    LONG.format("Tale"),
    "%%ask --raw --no-wait --max-tokens 300 --seed 1\n" + STORY + "One evening the old man",
    "%%ask --raw --no-wait --max-tokens 300 --seed 2\nLetters from the lighthouse. " + STORY + "The keeper",
    "%%ask --raw --no-wait --max-tokens 300 --seed 3\nOn tides. " + STORY + "The Moon",
]
pytestmark = [pytest.mark.browser, pytest.mark.engine, pytest.mark.kernel, pytest.mark.timeout(300)]


@pytest.fixture
def notebook(tmp_path: Path) -> tuple[Path, dict[str, int]]:
    """The quickstart with some cells before its last; their places by their first words."""
    book = nbformat.read(QUICKSTART, as_version=4)
    book.cells[-1:-1] = [nbformat.v4.new_code_cell(source) for source in EXTRA]
    root = tmp_path / "root"
    root.mkdir()
    nbformat.write(book, root / "quickstart.ipynb")
    places = {cell.source: i for i, cell in enumerate(book.cells)}
    return root, {
        source: next(i for text, i in places.items() if text.startswith(source)) for source in places
    }


def keep(panel: Any, name: str) -> None:
    """Keep a picture where somebody asks for them."""
    if folder := os.environ.get("MLCROUTER_SCREENSHOTS"):
        Path(folder).mkdir(parents=True, exist_ok=True)
        panel.screenshot(path=str(Path(folder) / f"{name}.png"))


def windows(summary: str) -> tuple[int, int]:
    """Where the prefill engine's part of the prompt ended, and the prompt's length, from the line below an answer."""
    match = re.search(r"P0 prefill \[\d+, (\d+)\)", summary)
    length = re.search(r"(\d+) tokens in", summary)
    assert match and length, summary
    return int(match[1]), int(length[1])


def test_the_quickstart_in_the_browser(
    notebook: tuple[Path, dict[str, int]], tmp_path: Path, labs: Any
) -> None:
    root, place = notebook
    with labs.jupyterlab(tmp_path, root) as address, labs.browser(1180, 1000) as tab:
        page = labs.Page(tab, address, "quickstart.ipynb")

        def at(start: str) -> int:
            return next(i for source, i in place.items() if source.startswith(start))

        # Boot, and the panel appears with three engines.
        boot = page.run(at("%load_ext"))
        assert "engines ready" in boot and "D2" in boot
        page.run(at("%route panel"))
        panel = tab.wait_for_selector(".mlcr")
        page.until("() => document.querySelectorAll('.mlcr-engine').length === 3")
        assert "P0 prefill" in panel.inner_text()
        table = tab.query_selector("[class^=mlcr-static]")
        assert table is not None and not table.is_visible(), (
            "a live view hides the table for pages without one"
        )

        # A stream flows, under the cell and in the panel.
        page.start(at("%%ask --max-tokens 48"))
        page.until(
            "() => document.querySelector('.mlcr-stream.mlcr-running .mlcr-text')?.textContent.length > 20"
        )
        first = len(tab.inner_text(".mlcr-stream .mlcr-text"))
        page.until(f"() => document.querySelector('.mlcr-stream .mlcr-text').textContent.length > {first}")
        page.until("() => document.querySelector('.mlcr-stream[data-state=finished]')")

        # The slider, moved by the mouse while a cell runs, changes where the next prefill runs.
        end, length = windows(page.run(at("%%ask --max-tokens 16 --policy disagg\nStory")))
        assert end == length - 1
        page.start(at("import time"))
        drag_to(tab, 0.8)
        page.until("() => /0\\.[78]\\d/.test(document.querySelector('.mlcr .widget-readout').textContent)")
        deadline = time.monotonic() + 20
        while "pd_balance_factor=" not in page.output(at("import time")):
            assert time.monotonic() < deadline
            tab.wait_for_timeout(100)
        factor = float(re.search(r"pd_balance_factor=([\d.]+)", page.output(at("import time")))[1])  # type: ignore[index]
        assert 0.7 <= factor <= 0.9, "it took effect while the cell was running"
        end, length = windows(page.run(at("%%ask --max-tokens 16 --policy disagg\nTale")))
        assert end == int((1 - factor) * length)
        page.until("() => /last used 0\\.[78]/.test(document.querySelector('.mlcr').textContent)")

        # `%route set` moves the slider; three streams at once, for the picture.
        page.run(at("%route set"))
        page.until("() => document.querySelector('.mlcr .widget-readout').textContent === '0.50'")
        for seed in (1, 2, 3):
            page.run(at(f"%%ask --raw --no-wait --max-tokens 300 --seed {seed}"))
        page.until("() => document.querySelectorAll('.mlcr-running .mlcr-text').length === 3")
        tab.wait_for_timeout(2500)
        keep(panel, "panel")
        tab.evaluate(
            "() => window.jupyterapp.commands.execute('apputils:change-theme', {theme: 'JupyterLab Dark'})"
        )
        tab.wait_for_timeout(800)
        keep(panel, "panel-dark")
        tab.set_viewport_size({"width": 800, "height": 1000})
        tab.wait_for_timeout(500)
        assert tab.evaluate(
            "() => { const p = document.querySelector('.mlcr'); return p.scrollWidth <= p.clientWidth; }"
        )
        keep(panel, "panel-narrow")
        tab.set_viewport_size({"width": 1180, "height": 1000})
        page.until("() => !document.querySelector('.mlcr-running')", 60)

        # The rest of the notebook, and the end; a boot from the panel.
        policy = page.run(at("%%route long_to_disagg"))
        assert "long_to_disagg" in policy
        page.until("() => document.querySelector('.mlcr-controls select').value === 'long_to_disagg'")
        assert "prefill + decode" in page.run(at("%%ask --max-tokens 24"))
        assert len(page.run(at("from openai"))) > 20
        tab.focus(".mlcr-actions button")  # the keyboard reaches it; Enter is no shortcut of Lab's here
        tab.keyboard.press("Enter")
        tab.wait_for_selector("text=Stop it")
        tab.keyboard.press("Enter")
        tab.click("text=Stop cluster")
        keep(panel, "panel-stop")
        tab.click("text=Stop it")
        page.until("() => document.querySelector('.mlcr-boot:not([hidden])')")
        keep(panel, "panel-off")
        tab.click(".mlcr-boot button")
        page.until(
            "() => document.querySelectorAll('.mlcr-engines:not([hidden]) [data-state=starting]').length === 3"
        )
        tab.wait_for_timeout(500)
        keep(panel, "panel-boot")
        page.until("() => document.querySelector('.mlcr-phase').dataset.phase === 'ready'", 60)
        assert page.run(at("%route down")).strip() == "The cluster is stopped."
        assert page.errors == []


def drag_to(tab: Any, fraction: float) -> None:
    """Drag the first slider's handle with the mouse to a place on its track."""
    handle = tab.wait_for_selector(".mlcr .widget-slider .noUi-handle")
    handle.scroll_into_view_if_needed()
    track = tab.query_selector(".mlcr .widget-slider .noUi-base").bounding_box()
    box = handle.bounding_box()
    tab.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2)
    tab.mouse.down()
    for step in range(1, 9):
        x = track["x"] + track["width"] * fraction * step / 8
        tab.mouse.move(x, track["y"] + track["height"] / 2)
        tab.wait_for_timeout(40)
    tab.mouse.up()
