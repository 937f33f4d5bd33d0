"""Errors of ours reach the user's line without our stack."""

from types import TracebackType

from ..protocol.errors import MlcRouterError


class ShortTraceback:
    """`with ShortTraceback(): ...`: an error of ours that leaves it shows the callers' frames only, and its cause."""

    def __enter__(self) -> None:
        pass

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if isinstance(error, MlcRouterError):
            error.__traceback__ = None  # Python goes on from here when it raises the error again
