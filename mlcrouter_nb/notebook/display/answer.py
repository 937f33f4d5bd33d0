"""An answer that streams into its cell: redrawn in a notebook, as deltas in a terminal."""

import time
from html import escape

from ...telemetry import RequestTrace
from .place import Place, in_notebook
from .theme import ERROR, FONT, INK, MUTED

FAST, SLOW = (
    1 / 15,
    1 / 4,
)  # seconds between two drawings; long texts are redrawn less often, as each sends all of it
LONG = 8_000  # characters


class AnswerDisplay:
    """`add` is called with pieces of text, `draw` from the thread that shows them.

    With `whole` a terminal gets the answer once it is complete, since something else is typed there meanwhile."""

    def __init__(self, *, whole: bool = False) -> None:
        self.text = ""
        self._whole = whole
        self._place = Place() if in_notebook() else None
        self._shown = 0
        self._next = 0.0

    def add(self, piece: str) -> None:
        """More text; only one thread may add."""
        self.text += piece

    def draw(self, trace: RequestTrace | None) -> None:
        """Show what has come, at most 15 times a second."""
        now = time.monotonic()
        if now < self._next:
            return
        if self._place is None:
            if not self._whole:
                self._print()
            self._next = now + FAST
            return
        text = self.text
        route = trace.route if trace is not None else ""
        self._place.draw(f"{text} ...", answer_html(text, route or "waiting", running=True))
        self._next = now + (FAST if len(text) < LONG else SLOW)

    def end(self, summary: str, error: str = "") -> None:
        """Show all of it and the line below: always the last state."""
        if self._place is None:
            if self._whole:
                print()  # the prompt that waits has a line of its own
            self._print()
            print(("\n" if self.text and not self.text.endswith("\n") else "") + f"[{summary}]", flush=True)
            if error:
                print(error, flush=True)
            return
        text = "\n".join(part for part in (self.text, f"[{summary}]", error) if part)
        self._place.draw(text, answer_html(self.text, summary, error=error))

    def _print(self) -> None:
        text = self.text
        if len(text) > self._shown:
            print(text[self._shown :], end="", flush=True)
            self._shown = len(text)


def answer_html(text: str, line: str, *, running: bool = False, error: str = "") -> str:
    """The answer, escaped, and a muted line below."""
    cursor = '<span aria-hidden="true">▍</span>' if running else ""
    failure = (
        f'<pre style="color:{ERROR};background:none;white-space:pre-wrap;margin:4px 0">{escape(error)}</pre>'
    )
    return (
        f'<div style="font-family:{FONT};color:{INK};font-size:14px;line-height:1.5;max-width:52em">'
        f'<div style="white-space:pre-wrap;overflow-wrap:anywhere">{escape(text)}{cursor}</div>'
        f'<div style="color:{MUTED};font-size:12px;margin-top:4px">{escape(line)}</div>{failure if error else ""}</div>'
    )
