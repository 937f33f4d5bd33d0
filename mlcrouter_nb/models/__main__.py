"""`python -m mlcrouter_nb.models [MODEL]`: fetch a model's files and print where they are."""

import sys

from ..protocol.errors import MlcRouterError
from ..protocol.progress import Progress
from .names import DEFAULT_MODEL, resolve


def main(arguments: list[str]) -> int:
    shown = -1

    def show(progress: Progress) -> None:
        nonlocal shown
        tenth = int(10 * (progress.fraction or 0.0))
        if tenth != shown:
            shown = tenth
            print(progress, file=sys.stderr, flush=True)

    try:
        print(resolve(arguments[0] if arguments else DEFAULT_MODEL, show).path)
    except MlcRouterError as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
