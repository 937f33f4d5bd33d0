"""How a widget hears its front end while a cell runs."""

from typing import Any

import ipywidgets


def hear_on_subshells(widget: ipywidgets.Widget) -> None:
    """Take the widget's messages on the subshell that the front end chose for them.

    ipykernel (7.4) brings them to the shell that published for the widget last. For widgets made in a cell that is
    the main one, and a running cell would hold up every slider and button until it ends."""
    comm: Any = widget.comm
    if comm is not None:
        comm._reply_subshell_for = lambda data, default: default
