"""`%%route NAME`: a cell that is a policy."""

import re

from IPython.core.error import UsageError

from .words import RESERVED, SUBCOMMANDS

# A lone `%%route disagg`: IPython refuses a cell magic without a body before the magic sees it.
_LONE = re.compile(r"\A\s*%%route[ \t]+(?P<name>[^\s#]+)[ \t]*\n?\s*\Z")


def lone_cell_magic(lines: list[str]) -> list[str]:
    """An input transformer: `%%route NAME` with nothing below becomes `%route use NAME`."""
    match = _LONE.match("".join(lines))
    if match is None or match["name"].startswith("-"):
        return lines
    return [f"%route use {match['name']}\n"]


def check_name(name: str) -> str:
    """A policy's name: not a subcommand, no blanks or shell signs; raises `UsageError`."""
    if name in SUBCOMMANDS or name in RESERVED:
        raise UsageError(f"'{name}' is a subcommand of %route; give the policy another name.")
    if not re.fullmatch(r"[A-Za-z_][\w.-]*", name):
        raise UsageError(f"{name!r} is no name for a policy: use letters, digits, '_', '-' and '.'.")
    return name


def is_blank(source: str) -> bool:
    """Whether a cell's body holds nothing but blanks and comments."""
    return all(not line.strip() or line.strip().startswith("#") for line in source.splitlines())
