"""Policy errors that show the user's own line."""

import linecache
from types import CodeType, FrameType, TracebackType
from typing import Any

from ..protocol.errors import PolicyError


def remember(filename: str, source: str) -> None:
    """Let tracebacks show the lines of a source that is no file."""
    linecache.cache[filename] = (len(source), None, source.splitlines(keepends=True), filename)


def policy_error(policy: str, origin: str, filename: str, line: int | None, problem: str) -> PolicyError:
    """`policy 'x', cell [7], line 3: problem`, and the line itself below."""
    text = linecache.getline(filename, line).strip() if line else ""
    where = f"policy '{policy}'" + (f", {origin}" if origin else "") + (f", line {line}" if line else "")
    message = f"{where}: {problem}" + (f"\n    {text}" if text else "")
    return PolicyError(message, policy=policy, line=line, source_line=text)


def describe(error: BaseException) -> str:
    """`ValueError: what it says`, as the last line of a traceback."""
    text = str(error)
    return f"{type(error).__name__}: {text}" if text else type(error).__name__


def line_in_traceback(traceback: TracebackType | None, filename: str) -> int | None:
    """The innermost line of the file that an exception passed through."""
    line = None
    while traceback is not None:
        if traceback.tb_frame.f_code.co_filename == filename:
            line = traceback.tb_lineno
        traceback = traceback.tb_next
    return line


def line_where_suspended(awaitable: Any, filename: str) -> int | None:
    """The innermost line of the file in which a coroutine or generator waits."""
    line = None
    while awaitable is not None:
        frame: FrameType | None = getattr(awaitable, "cr_frame", None) or getattr(awaitable, "ag_frame", None)
        code: CodeType | None = frame.f_code if frame is not None else None
        if frame is not None and code is not None and code.co_filename == filename:
            line = frame.f_lineno
        awaitable = getattr(awaitable, "cr_await", None) or getattr(awaitable, "ag_await", None)
    return line
