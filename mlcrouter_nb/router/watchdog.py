"""Noticing that a policy's code holds up the router's loop, and saying where."""

import sys

from .namespace import Namespace


def blocked(thread_ident: int) -> str | None:
    """Which line of a policy a thread executes at this moment, as a sentence; None where it executes none.

    Looks at the thread's frames only, so any other thread may ask while the router's loop does not answer."""
    frame = sys._current_frames().get(thread_ident)
    while frame is not None:
        if isinstance(frame.f_globals, Namespace):
            return (
                f"policy '{frame.f_globals.policy}', line {frame.f_lineno}, blocks the router: "
                "it runs on without an await that gives way."
            )
        frame = frame.f_back
    return None
