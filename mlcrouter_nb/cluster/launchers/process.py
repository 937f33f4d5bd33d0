"""A child process that survives an interrupt of its parent and dies with it.

It runs in a session of its own, so that the terminal's or the kernel's SIGINT does not reach it; it holds the read end
of a pipe whose end of file tells it to exit, so that it goes when the parent goes, however that dies."""

import asyncio
import contextlib
import os
import signal
import subprocess
import threading
import time
import weakref
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import IO

# The write ends of all children's pipes. A fork of this process must not keep them open: the children would outlive us.
_write_ends: "weakref.WeakSet[IO[bytes]]" = weakref.WeakSet()


def _close_in_fork() -> None:
    for pipe in list(_write_ends):
        with contextlib.suppress(OSError, ValueError):  # closed already
            os.close(pipe.fileno())


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_close_in_fork)


class ChildProcess:
    """A running program; `exited` resolves with its exit code, `on_line` gets each line of its stdout.

    Create and use it on `loop`'s thread. Raises `OSError` when the program cannot be started."""

    def __init__(
        self,
        command: Sequence[str],
        *,
        environment: Mapping[str, str],
        log_path: Path,
        on_line: Callable[[bytes], None],
    ) -> None:
        self._loop = asyncio.get_running_loop()
        self._on_line = on_line
        self.exited: asyncio.Future[int] = self._loop.create_future()
        with log_path.open("ab") as log:
            self._process = subprocess.Popen(
                command,
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=log,
                env=dict(environment),
                start_new_session=True,
                close_fds=True,
                bufsize=0,
            )
        self.pid = self._process.pid
        assert self._process.stdin is not None  # PIPE was asked for
        self._stdin: IO[bytes] = self._process.stdin
        _write_ends.add(self._stdin)
        self._reader = threading.Thread(target=self._read, name=f"mlcrouter-child-{self.pid}", daemon=True)
        self._reader.start()

    async def stop(self, grace: float) -> None:
        """SIGTERM, then SIGKILL after `grace` seconds; returns when the process is gone."""
        try:
            if not self.exited.done():
                self._signal(signal.SIGTERM)
                await asyncio.wait({self.exited}, timeout=grace)
        finally:
            self._signal(signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._stdin.close()
        await asyncio.wait({self.exited}, timeout=5.0)

    def terminate(self) -> None:
        """SIGTERM, from any thread; does not wait."""
        self._signal(signal.SIGTERM)

    def kill(self, deadline: float) -> None:
        """Wait until the monotonic time `deadline` for the process to end, then SIGKILL; from any thread."""
        try:
            with contextlib.suppress(subprocess.TimeoutExpired):
                self._process.wait(max(0.0, deadline - time.monotonic()))
        finally:
            self._signal(signal.SIGKILL)
            with contextlib.suppress(OSError):
                self._stdin.close()
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(1.0)

    def _signal(self, number: int) -> None:
        if self._process.poll() is None:
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self.pid, number)

    def _read(self) -> None:
        """The reader thread: lines until the end of stdout, then the exit code."""
        stdout = self._process.stdout
        if stdout is not None:
            with stdout, contextlib.suppress(OSError, ValueError):
                pending = b""
                while chunk := os.read(stdout.fileno(), 65536):
                    *lines, pending = (pending + chunk).split(b"\n")
                    for line in lines:
                        self._tell(self._on_line, line)
        code = self._process.wait()
        self._tell(self._settle, code)

    def _tell(self, callback: Callable[..., None], *args: object) -> None:
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody listens any more
            self._loop.call_soon_threadsafe(callback, *args)

    def _settle(self, code: int) -> None:
        if not self.exited.done():
            self.exited.set_result(code)


def tail(path: Path, lines: int) -> str:
    """The last `lines` lines of a text file; empty when it cannot be read."""
    try:
        with path.open("rb") as file:
            size = file.seek(0, os.SEEK_END)
            file.seek(max(0, size - 65536))
            text = file.read().decode(errors="replace")
    except OSError:
        return ""
    return "\n".join(text.splitlines()[-lines:])


def describe_exit(code: int) -> str:
    """`exit code 3`, or `killed by SIGKILL`."""
    if code >= 0:
        return f"exit code {code}"
    try:
        return f"killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"killed by signal {-code}"


def new_log_path(folder: Path, name: str) -> Path:
    """A log file of its own for an engine; logs older than a week are removed on the way."""
    folder.mkdir(parents=True, exist_ok=True)
    week_ago = time.time() - 7 * 24 * 3600
    for old in folder.glob("*.log"):
        with contextlib.suppress(OSError):
            if old.stat().st_mtime < week_ago:
                old.unlink()
    return folder / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}-{name}.log"
