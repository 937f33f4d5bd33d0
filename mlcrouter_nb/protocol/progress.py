"""Progress of anything that takes over a second: downloads, builds, boots."""

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Progress:
    """A stage and how far it is; `done` and `total` are None where that is not known."""

    stage: str
    done: float | None = None
    total: float | None = None
    unit: str = ""

    @property
    def fraction(self) -> float | None:
        """0 to 1, or None."""
        if self.done is None or not self.total:
            return None
        return min(1.0, self.done / self.total)

    def __str__(self) -> str:
        if self.done is None:
            return self.stage
        total = "" if self.total is None else f" of {self.total:.0f}"
        return f"{self.stage}: {self.done:.0f}{total}{' ' + self.unit if self.unit else ''}"


OnProgress = Callable[[Progress], None]


def ignore_progress(progress: Progress) -> None:
    """For callers who do not want to know."""
