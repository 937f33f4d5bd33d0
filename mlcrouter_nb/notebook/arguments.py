"""Parsing the line of a magic: argparse that raises instead of exiting, and `name=value` pairs."""

import argparse
import ast
import re
import shlex
from collections.abc import Mapping, Sequence
from difflib import get_close_matches
from typing import Any, NoReturn

from IPython.core.error import UsageError

from ..router.parameters import Choice, Parameter, Switch

WORDS = {"true": True, "on": True, "yes": True, "false": False, "off": False, "no": False}


class HelpShown(Exception):
    """`--help` was given; the message is the text."""


class _Help(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> NoReturn:
        raise HelpShown(parser.format_help())


class Parser(argparse.ArgumentParser):
    """An argument parser for a magic: errors are `UsageError`s, `--help` raises `HelpShown`."""

    def __init__(self, magic: str, description: str, **options: Any) -> None:
        # argparse formats `prog` and would take our percent signs for its own.
        super().__init__(
            magic.replace("%", "~"), description=description, add_help=False, allow_abbrev=False, **options
        )
        self.magic = magic
        self.add_argument("--help", "-h", action=_Help, nargs=0, help="show this")

    def error(self, message: str) -> NoReturn:
        unknown = re.match(r"unrecognized arguments: (\S+)", message)
        hint = did_you_mean(unknown[1], self.options()) if unknown else ""
        if unknown and not unknown[1].startswith("-") and self._takes_texts:
            hint = " A text of several words needs quotes."
        raise UsageError(f"{self.magic}: {message.rstrip('.')}.{hint} See {self.magic} --help.")

    @property
    def _takes_texts(self) -> bool:
        return any(action.metavar == "TEXT" for action in self._actions)

    def format_help(self) -> str:
        return super().format_help().replace(self.prog, self.magic).rstrip()

    def options(self) -> list[str]:
        """The long options."""
        return [option for option in self._option_string_actions if option.startswith("--")]

    def parse(self, words: Sequence[str]) -> argparse.Namespace:
        """Parse words; options may stand anywhere among them."""
        try:
            return self.parse_intermixed_args(list(words))
        except TypeError:  # a parser with a remainder cannot intermix
            return self.parse_args(list(words))


def split(line: str) -> list[str]:
    """The words of a line, as a shell splits them."""
    try:
        return shlex.split(line)
    except ValueError as error:
        raise UsageError(f"{line!r} cannot be split into words: {error}.") from None


def did_you_mean(word: str, known: Sequence[str]) -> str:
    """` Did you mean 'x'?`, or nothing."""
    close = get_close_matches(word, known, 1, 0.7)
    return f" Did you mean '{close[0]}'?" if close else ""


def join_pairs(line: str) -> str:
    """`f = 0.3` written with blanks around the sign, as one word."""
    return re.sub(r"(\w)\s*=\s*", r"\1=", line)


def read_pairs(words: Sequence[str], parameters: Mapping[str, Parameter]) -> dict[str, Any]:
    """`name=value` words as values of these parameters; unknown names are left for the policy to refuse."""
    values = {}
    for word in words:
        name, sign, text = word.partition("=")
        if not sign or not name.isidentifier() or not text:
            raise UsageError(f"{word!r} is not understood: write name=value.")
        values[name] = read_value(text, parameters.get(name))
    return values


def read_value(text: str, parameter: Parameter | None) -> Any:
    """A value as its parameter spells it: an option's text, on or off, else a Python literal, else the text itself."""
    if isinstance(parameter, Choice):
        for option in parameter.options:
            if str(option) == text:
                return option
    if isinstance(parameter, Switch) and text.lower() in WORDS:
        return WORDS[text.lower()]
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text
