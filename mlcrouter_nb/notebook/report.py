"""The short lines that commands print."""

from html import escape

from .display.place import Place
from .display.status import policy_line
from .display.theme import FONT, INK, MONO, MUTED
from .session import Session


def show_active(session: Session, remark: str = "") -> None:
    """One line: the active policy, its parameters, where it was written, and a remark."""
    view, cluster = session.view(), session.cluster
    if view is None:
        return
    later = remark + ("" if cluster is not None else "; it holds once the cluster is up")
    line = policy_line(view)
    show_line(f"Active policy: {line}{later}", "Active policy: ", line, later)


def show_line(text: str, before: str = "", code: str = "", after: str = "") -> None:
    """A line of text; in HTML `code` is set in the code font."""
    html = (
        f'<div style="font-family:{FONT};color:{MUTED};font-size:13px">{escape(before)}'
        f'<span style="font-family:{MONO};color:{INK}">{escape(code)}</span>{escape(after)}</div>'
    )
    Place().draw(text, html if code else None)
