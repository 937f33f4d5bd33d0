"""Where output goes: a place under a cell that can be redrawn, or a terminal that only grows."""

from html import escape
from typing import Any

from IPython.core.interactiveshell import InteractiveShell
from IPython.display import DisplayHandle, display


def in_notebook(shell: InteractiveShell | None = None) -> bool:
    """Whether a kernel serves this shell, so that a display can be updated."""
    return hasattr(shell or InteractiveShell._instance, "kernel")


class Place:
    """One display that is redrawn; it belongs to the cell in whose context it is first drawn."""

    def __init__(self) -> None:
        self._handle: DisplayHandle | None = None
        self._drawn: tuple[str, str] | None = None

    def draw(self, text: str, html: str | None = None) -> None:
        """Replace what is shown; nothing is sent when nothing changed."""
        html = f"<pre>{escape(text)}</pre>" if html is None else html
        if (text, html) == self._drawn:
            return
        self._drawn = (text, html)
        bundle: dict[str, Any] = {"text/plain": text, "text/html": html}
        if self._handle is None:
            self._handle = display(bundle, raw=True, display_id=True)
        else:
            self._handle.update(bundle, raw=True)
