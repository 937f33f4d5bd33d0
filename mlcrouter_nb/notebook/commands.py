"""The subcommands of `%route`: a parser and a function each."""

import argparse
from collections.abc import Callable
from typing import Any

from ..cluster import Cluster
from ..protocol.errors import ArgumentError
from .arguments import Parser, read_pairs
from .boot import down, up
from .display.source import Source
from .display.status import show, table_text
from .policy_cells import check_name
from .report import show_active
from .session import Session
from .words import RESERVED, SUBCOMMANDS

LINES, LINES_OF_EACH = 50, 10  # of a log
Command = tuple[Parser, Callable[[Session, argparse.Namespace], Any]]


def use(session: Session, args: argparse.Namespace) -> None:
    """Make a policy active."""
    policy = session.book.get(check_name(args.name))
    session.use(policy, read_pairs(args.parameters, policy.parameters))
    show_active(session)


def set_parameters(session: Session, args: argparse.Namespace) -> None:
    """Set parameters of the active policy."""
    active = session.active
    session.set(read_pairs(args.parameters, active.parameters if active is not None else {}))
    show_active(session)


def undo(session: Session, args: argparse.Namespace) -> None:
    """Go back one step."""
    session.undo()
    if session.view() is None:
        print("No policy is chosen any more.")
    show_active(session)


def list_policies(session: Session, args: argparse.Namespace) -> None:
    """Name, parameters, origin and first line of each policy; the active one is marked."""
    active = session.active
    rows: list[tuple[str, ...]] = []
    for name in session.book.names():
        policy = session.book.get(name)
        values = ", ".join(f"{key}={value}" for key, value in policy.values.items())
        mark = "*" if active is not None and active.name == name else ""
        rows.append((mark, name, values, policy.origin, policy.doc.partition("\n")[0]))
    print(table_text(("", "policy", "parameters", "from", ""), rows, numbers=range(0)))


def show_source(session: Session, args: argparse.Namespace) -> None:
    """A policy's source."""
    policy = session.book.get(args.name) if args.name else session.active
    if policy is None:
        raise ArgumentError("no policy is active yet: write %route show NAME; %route list lists them.")
    show(Source(policy))


def logs(session: Session, args: argparse.Namespace) -> None:
    """The end of an engine's log, or of all of them."""
    cluster = session.cluster
    if cluster is None:
        raise ArgumentError("no cluster is running, so there is no log; %route up boots one.")
    if args.engine:
        print(log_text(cluster, args.engine, args.lines or LINES))
        return
    names = [engine.spec.name for engine in cluster.engines if engine.log_path is not None]
    if not names:
        raise ArgumentError("all engines were started elsewhere; their logs are there.")
    print("\n\n".join(f"{name}:\n{log_text(cluster, name, args.lines or LINES_OF_EACH)}" for name in names))


def log_text(cluster: Cluster, engine: str, lines: int) -> str:
    """The end of an engine's log, or that it is empty."""
    text = cluster.logs(engine, lines)
    paths = [each.log_path for each in cluster.engines if each.spec.name == engine]
    return text if text.strip() else f"The log is empty: {paths[0]}"


def panel(session: Session, args: argparse.Namespace) -> None:
    """Show the panel; the same one in every cell that asks."""
    from .panel import Panel

    if session.panel is None or session.panel.closed:
        session.panel = Panel(session)
    show(session.panel)


def help_text(session: Session, args: argparse.Namespace) -> None:
    """List the subcommands."""
    print(OVERVIEW)


def overview() -> str:
    """The magics and the subcommands, a line each."""
    lines = ["%route                the status", "%%route NAME          the cell below is a policy"]
    lines += [f"%route {word:<14} {text}" for word, text in SUBCOMMANDS.items()]
    lines.append("%%ask                 ask the cluster; the answer streams under the cell")
    lines.append("Every one explains itself with --help. %config MlcRouter lists the defaults.")
    lines.append(f"Not there yet: {', '.join(RESERVED)}.")
    return "\n".join(lines)


OVERVIEW = overview()


def _parser(word: str) -> Parser:
    return Parser(f"%route {word}", SUBCOMMANDS[word].partition(":")[0].capitalize() + ".")


def _commands() -> dict[str, Command]:
    parsers = {word: _parser(word) for word in SUBCOMMANDS}
    boot = parsers["up"]
    boot.add_argument("model", nargs="?", help="a name or the path of a .gguf file")
    boot.add_argument("--roles", help="xPyD, or a number of engines without roles")
    boot.add_argument("--engine", metavar="KIND", help="cpu, mlc or attach")
    boot.add_argument(
        "--endpoint-urls", nargs="+", default=[], metavar="URL", help="engines that run already"
    )
    boot.add_argument("--policy", metavar="NAME", help="the policy to begin with")
    boot.add_argument("--host", default="127.0.0.1", help="where the OpenAI endpoint listens")
    boot.add_argument("--port", type=int, default=0, help="its port; 0: any free one")
    boot.add_argument(
        "--tokenizer", metavar="PATH", help="for attached engines and policies that look at the prompt"
    )
    boot.add_argument(
        "--no-prefix-cache", action="store_true", help="engines forget a prompt once it is answered"
    )
    parsers["use"].add_argument("name", help="a policy")
    parsers["show"].add_argument("name", nargs="?", help="a policy (default: the active one)")
    # argparse takes a positional without a default for required.
    parsers["use"].add_argument("parameters", nargs="*", default=[], metavar="parameter=value")
    parsers["set"].add_argument("parameters", nargs="+", metavar="parameter=value")
    parsers["logs"].add_argument("engine", nargs="?", help="for example D1 (default: all)")
    parsers["logs"].add_argument(
        "--lines", type=int, metavar="N", help=f"how many (default: {LINES}, or {LINES_OF_EACH} of each)"
    )
    run = {
        "up": up, "panel": panel, "use": use, "set": set_parameters, "undo": undo, "list": list_policies,
        "show": show_source, "logs": logs, "down": down, "help": help_text,
    }  # fmt: skip
    return {word: (parser, run[word]) for word, parser in parsers.items()}


COMMANDS = _commands()
