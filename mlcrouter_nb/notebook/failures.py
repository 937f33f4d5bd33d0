"""How the errors of a command reach the cell: its status is error, and the user sees a sentence, not our stack."""

import contextlib
from collections.abc import Iterator

from IPython.core.error import UsageError

from ..protocol.errors import ArgumentError, MlcRouterError, RequestError


class Interrupted(KeyboardInterrupt):
    """An interrupt that we have dealt with; shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"Interrupted: {self}"]


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Wrong arguments and refused requests become a `UsageError`; other errors of ours keep their type and lose
    their traceback."""
    try:
        yield
    except MlcRouterError as error:
        if isinstance(error, ArgumentError) or (isinstance(error, RequestError) and error.status < 500):
            raise UsageError(str(error)) from None
        name, text = type(error).__name__, str(error)
        error._render_traceback_ = lambda: [f"\x1b[31m{name}\x1b[39m: {text}"]  # type: ignore[attr-defined]
        raise
