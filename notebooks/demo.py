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
        """Print the text of a display; of one that is redrawn in place what is new, and that once a second at most.

        Text that is not complete yet ends with " ..."."""
        text = content["data"].get("text/plain", "").rstrip()
        display = content.get("transient", {}).get("display_id")
        if not display:
            if text:  # a view of a widget has none
                print(text, flush=True)
            return
        unfinished = text.endswith(" ...")
        body = text.removesuffix(" ...")
        before, when = self.shown.get(display, ("", 0.0))
        if unfinished and (not body or time.monotonic() - when < 1):
            return
        self.shown[display] = (body, time.monotonic())
        grows = unfinished and "\n" not in body  # an answer: its next words go on the same line
        if body.startswith(before):
            print(body[len(before) :], end="" if grows else "\n", flush=True)
        else:  # a list of steps: only the lines that changed
            known = set(before.splitlines())
            print("\n".join(line for line in body.splitlines() if line not in known), flush=True)


def on_cell(cell: Any, cell_index: int) -> None:
    if cell.cell_type == "code" and cell.source.strip():
        print("\n" + "\n".join(f">>> {line}" for line in cell.source.splitlines()), flush=True)


def main(path: Path) -> int:
    """Run the notebook at `path`; 0 if every cell ran, 1 if one failed."""
    notebook = nbformat.read(path, as_version=4)
    client = PrintingClient(
        notebook,
        timeout=280,
        resources={"metadata": {"path": str(path.parent)}},
        on_cell_start=on_cell,
        extra_arguments=["--log-level=ERROR"],  # ipykernel warns of its own TCP ports
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
