"""`%route`, `%%route` and `%%ask`."""

from collections.abc import Callable
from typing import Any, TypeVar

from IPython.core.error import UsageError
from IPython.core.interactiveshell import InteractiveShell
from IPython.core.magic import Magics, line_cell_magic, magics_class

from ..protocol.errors import MlcRouterError
from .arguments import HelpShown, did_you_mean, join_pairs, split
from .asking import ASK, ask
from .commands import COMMANDS, OVERVIEW
from .display.status import Status, show
from .failures import reporting
from .policy_cells import check_name, is_blank
from .report import show_active
from .session import Session
from .words import RESERVED, SUBCOMMANDS

Magic = TypeVar("Magic", bound=Callable[..., Any])

POLICY_HELP = """\
%%route NAME
policy below: `async def route(request, engines)`, or parameters of an existing policy only, or nothing.

    %%route long_to_disagg
    long_prompt = slider(0, 2048, value=512)

    async def route(request, engines):
        decode = engines.decode.least_loaded()
        if len(request.prompt) < long_prompt:
            return decode.complete(request)
        prefill = engines.prefill.least_loaded()
        kv = await decode.prep_recv(request, end=-1)
        await prefill.remote_send(request, kv)
        return decode.start_generate(request, begin=kv.end)
"""


def explained_by(*texts: str) -> Callable[[Magic], Magic]:
    """Add texts to a magic's docstring, which `%route?` and `%%ask?` show."""

    def explain(magic: Magic) -> Magic:
        magic.__doc__ = "\n\n".join([magic.__doc__ or "", *texts])
        return magic

    return explain


@magics_class
class RouterMagics(Magics):
    """The magics of one shell."""

    def __init__(self, shell: InteractiveShell, session: Session) -> None:
        super().__init__(shell)
        self.session = session

    @line_cell_magic
    @explained_by(OVERVIEW, POLICY_HELP)
    def route(self, line: str, cell: str | None = None) -> Any:
        """`%route` shows the status; `%route help` lists the subcommands; `%%route NAME` makes the cell a policy."""
        with reporting():
            try:
                return self._command(line) if cell is None else self._policy_cell(line, cell)
            except HelpShown as help_text:
                print(help_text)
        return None

    @line_cell_magic
    @explained_by(ASK.format_help())
    def ask(self, line: str, cell: str | None = None) -> None:
        """Ask the cluster and stream the answer under the cell; `%%ask --help` lists the options."""
        with reporting():
            try:
                words = split(line)
                if cell is None and not {"--help", "-h"} & set(words):
                    raise UsageError(
                        "write %%ask, and the question below it; %%ask --help lists the options."
                    )
                ask(self.session, ASK.parse(words), cell or "")
            except HelpShown as help_text:
                print(help_text)

    def _command(self, line: str) -> Any:
        word, _, rest = line.strip().partition(" ")
        if not word:
            cluster = self.session.cluster
            show(Status(cluster.status() if cluster is not None else None, self.session.view()))
            return None
        if word in ("--help", "-h"):
            word, rest = "help", ""
        if word in RESERVED:
            raise UsageError(f"%route {word} is not there yet; %route help lists what is.")
        if word not in COMMANDS:
            raise UsageError(
                f"%route has no subcommand '{word}'.{did_you_mean(word, list(SUBCOMMANDS))} %route help lists them."
            )
        parser, run = COMMANDS[word]
        if word in ("use", "set"):
            rest = join_pairs(rest)
        return run(self.session, parser.parse(split(rest)))

    def _policy_cell(self, line: str, cell: str) -> None:
        words = split(line)
        if words and words[0] in ("--help", "-h"):
            raise HelpShown(POLICY_HELP)
        if len(words) != 1:
            raise UsageError("write %%route NAME, and the policy below it.")
        name = check_name(words[0])
        session, origin = self.session, f"cell [{self._cell_number()}]"
        if is_blank(cell):
            session.use(session.book.get(name), {})
            show_active(session)
            return
        replaced = session.known(name)
        try:
            session.use(session.book.compile(name, cell, origin), {}, define=True)
        except MlcRouterError as error:
            if session.active is not None:
                error.add_note(f"'{session.active.name}' stays active.")
            raise
        built_in = replaced is not None and replaced.origin == "built-in"
        show_active(
            session, f"; replaces the built-in {name}, %route undo brings it back" if built_in else ""
        )

    def _cell_number(self) -> int:
        """The number of the cell that runs; whether `execution_count` is already the next one depends on IPython."""
        history: Any = self.shell.history_manager if self.shell is not None else None
        return len(history.input_hist_raw) - 1 if history is not None else 0
