"""`%%route NAME`: a cell that is a policy."""

import re

from IPython.core.error import UsageError

from .words import RESERVED, SUBCOMMANDS

# IPython refuses a cell magic without a body before the magic sees it.
_LONE = re.compile(r"\A\s*%%(?P<magic>route|ask)[ \t]+(?P<word>[^\s#]+)[ \t]*\n?\s*\Z")


def lone_cell_magic(lines: list[str]) -> list[str]:
    """An input transformer for cells with nothing below the first line.

    `%%route NAME` becomes `%route use NAME`; `%%route --help` and `%%ask --help` get a blank body."""
    match = _LONE.match("".join(lines))
    if match is None:
        return lines
    if match["word"] in ("--help", "-h"):
        return [f"%%{match['magic']} {match['word']}\n", "\n"]
    if match["magic"] == "route" and not match["word"].startswith("-"):
        return [f"%route use {match['word']}\n"]
    return lines


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
