"""Completion on the lines of `%route`, `%%route` and `%%ask`."""

import re
from collections.abc import Callable, Iterable

from IPython.core.completer import CompletionContext, SimpleCompletion, SimpleMatcherResult, context_matcher

from .asking import ASK
from .commands import COMMANDS
from .session import Session
from .words import SUBCOMMANDS

_LINE = re.compile(r"^\s*(?:[\w\s,.\[\]'\"]+=\s*)?%route\s(?P<rest>.*)$")
_CELL = re.compile(r"^%%(?P<magic>route|ask)\s(?P<rest>.*)$")


class Completer:
    """`matcher` goes into `shell.Completer.custom_matchers`."""

    def __init__(self, session: Session) -> None:
        self.session = session

        @context_matcher(identifier="mlcrouter_nb")
        def matcher(context: CompletionContext) -> SimpleMatcherResult:
            line = context.text_until_cursor
            words = self.words(line, first=context.cursor_line == 0)
            if words is None:
                return {"completions": [], "suppress": False}
            fragment = re.search(r"\S*$", line).group()  # type: ignore[union-attr]
            found = [SimpleCompletion(word, type="magic") for word in words if word.startswith(fragment)]
            return {"completions": found, "matched_fragment": fragment, "suppress": bool(found)}

        self.matcher: Callable[[CompletionContext], SimpleMatcherResult] = matcher

    def words(self, line: str, *, first: bool) -> list[str] | None:
        """What may stand at the end of this line; None where the line is none of ours."""
        if match := _LINE.match(line):
            return self._route(match["rest"])
        if first and (match := _CELL.match(line)):
            if match["magic"] == "ask":
                return self._ask(match["rest"])
            return self.session.book.names()
        return None

    def _route(self, rest: str) -> list[str]:
        done = rest.split()[: None if rest.endswith(" ") else -1]
        if not done:
            return list(SUBCOMMANDS)
        word = done[0]
        if word not in COMMANDS:
            return []
        options = [option for option in COMMANDS[word][0].options() if option not in done]
        return [*self._operands(word, done), *options]

    def _operands(self, word: str, done: list[str]) -> Iterable[str]:
        last = done[-1]
        if last == "--engine":
            return ["cpu", "mlc", "attach"]
        if last == "--roles":
            return ["1P1D", "1P2D", "2P2D", "1", "2"]
        if last == "--policy" or (word in ("use", "show") and len(done) == 1):
            return self.session.book.names()
        if word == "use" and done[1] in self.session.book.names():
            return [f"{name}=" for name in self.session.book.get(done[1]).parameters]
        if word == "set" and (active := self.session.active) is not None:
            return [f"{name}=" for name in active.parameters]
        if word == "logs" and (cluster := self.session.cluster) is not None:
            return [engine.name for engine in cluster.status().engines]
        if word == "up" and len(done) == 1:
            return ["smollm2-135m"]
        return []

    def _ask(self, rest: str) -> list[str]:
        done = rest.split()[: None if rest.endswith(" ") else -1]
        if done and done[-1] == "--policy":
            return self.session.book.names()
        return [option for option in ASK.options() if option not in done]
