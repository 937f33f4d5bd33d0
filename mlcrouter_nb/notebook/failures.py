"""How the errors of a command reach the cell: its status is error, and the user sees a sentence, not our stack."""

import contextlib
from collections.abc import Iterator

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell

from ..protocol.errors import ArgumentError, MlcRouterError, RequestError


class Interrupted(KeyboardInterrupt):
    """An interrupt that we have dealt with; shown as one line."""

    def _render_traceback_(self) -> list[str]:
        return [f"Interrupted: {self}"]


@contextlib.contextmanager
def reporting() -> Iterator[None]:
    """Wrong arguments and refused requests become a `UsageError`; other errors of ours keep their type and lose
    their traceback. Notes on an error (`add_note`) are shown below it."""
    try:
        yield
    except MlcRouterError as error:
        text = "\n".join([str(error), *getattr(error, "__notes__", ())])
        if isinstance(error, ArgumentError) or (isinstance(error, RequestError) and error.status < 500):
            raise UsageError(text) from None
        name = in_red(type(error).__name__)
        error._render_traceback_ = lambda: [f"{name}: {text}"]  # type: ignore[attr-defined]
        raise


def in_red(text: str) -> str:
    """The text in red, unless the shell is to show no colours."""
    colours = getattr(InteractiveShell._instance, "colors", "")
    return text if colours.lower() == "nocolor" else f"\x1b[31m{text}\x1b[39m"
