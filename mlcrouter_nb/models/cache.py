"""The user's cache folder: weights, compiled kernels, logs; and a lock between processes."""

import fcntl
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ..protocol.errors import ArgumentError, MlcRouterError


def cache_dir() -> Path:
    """`MLCROUTER_CACHE`, else `$XDG_CACHE_HOME/mlcrouter_nb`, else the platform's place; made on demand."""
    if chosen := os.environ.get("MLCROUTER_CACHE"):
        path = Path(chosen).expanduser().absolute()
    elif xdg := os.environ.get("XDG_CACHE_HOME"):
        path = Path(xdg) / "mlcrouter_nb"
    elif sys.platform == "darwin":
        path = Path.home() / "Library" / "Caches" / "mlcrouter_nb"
    else:
        path = Path.home() / ".cache" / "mlcrouter_nb"
    return _made(path)


def log_dir() -> Path:
    """Where engines write their logs."""
    return _made(cache_dir() / "logs")


def _made(path: Path) -> Path:
    try:
        path.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ArgumentError(
            f"The cache folder {path} cannot be made ({error}); set MLCROUTER_CACHE."
        ) from error
    return path


@contextmanager
def exclusive(path: Path, deadline_s: float = 1800.0) -> Iterator[None]:
    """Hold `path` as a lock between processes; the system gives it back when its holder dies.

    Raises `MlcRouterError` when another process keeps it for longer than the deadline."""
    give_up = time.monotonic() + deadline_s
    with path.open("w") as file:
        while True:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
            except BlockingIOError:
                if time.monotonic() > give_up:
                    raise MlcRouterError(f"Another process has held {path} for {deadline_s:.0f} s.") from None
                time.sleep(0.1)
        yield
