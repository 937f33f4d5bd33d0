"""The command `mlcrouter-nb`: `router` boots engines and routes to them, `serve` is one engine."""

import sys
from collections.abc import Sequence

from ..protocol.errors import ArgumentError, MlcRouterError
from .arguments import make_parser

__all__ = ["main", "make_parser"]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["serve"]:
            from ..engine.program import main as serve

            return serve(arguments[1:], prog="mlcrouter-nb serve")
        options = make_parser().parse_args(arguments)
        from .router import run

        return run(options)
    except ArgumentError as error:
        print(f"mlcrouter-nb: {error}", file=sys.stderr)
        return 2
    except MlcRouterError as error:
        print(f"mlcrouter-nb: {error}", file=sys.stderr)
        return 1
