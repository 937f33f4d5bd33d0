"""Run a notebook without a browser and print what its cells print, as they print it."""

import sys
import time
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError


class PrintingClient(NotebookClient):
    """Executes a notebook and prints each source and each output when it arrives."""

    shown: dict[str, tuple[str, float]] = {}

    def process_message(self, msg: dict[str, Any], cell: Any, cell_index: int) -> Any:
        content = msg["content"]
        if msg["msg_type"] == "stream":
            print(content["text"], end="", flush=True)
        elif msg["msg_type"] in ("display_data", "update_display_data", "execute_result"):
            self.show(content)
        return super().process_message(msg, cell, cell_index)

    def show(self, content: dict[str, Any]) -> None:
        """Print the text of a display; one that is updated in place, at most once a second and when it is done."""
        text = content["data"].get("text/plain", "").rstrip()
        display = content.get("transient", {}).get("display_id")
        if display:
            before, when = self.shown.get(display, ("", 0.0))
            if text == before or (before and time.monotonic() - when < 1 and "..." in text):
                return
            self.shown[display] = (text, time.monotonic())
            known = set(before.splitlines())
            text = "\n".join(line for line in text.splitlines() if line not in known)
        if text:
            print(text, flush=True)


def on_cell(cell: Any, cell_index: int) -> None:
    if cell.cell_type == "code" and cell.source.strip():
        print("\n" + "\n".join(f">>> {line}" for line in cell.source.splitlines()), flush=True)


def main(path: Path) -> int:
    """Run the notebook at `path`; 0 if every cell ran, 1 if one failed."""
    notebook = nbformat.read(path, as_version=4)
    client = PrintingClient(
        notebook, timeout=280, resources={"metadata": {"path": str(path.parent)}}, on_cell_start=on_cell
    )
    started = time.monotonic()
    try:
        client.execute()
    except CellExecutionError as error:
        print(f"\n{error}", file=sys.stderr)
        return 1
    cells = sum(cell.cell_type == "code" for cell in notebook.cells)
    print(f"\n{path.name}: all {cells} cells ran in {time.monotonic() - started:.0f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
