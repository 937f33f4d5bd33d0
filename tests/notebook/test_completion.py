"""Completion."""

from collections.abc import Callable

import pytest
from IPython.core.completer import provisionalcompleter
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

Run = Callable[[str], ExecutionResult]


@pytest.fixture
def complete(shell: InteractiveShell) -> Callable[[str], list[str]]:
    """What is offered at the end of a cell's text."""

    def offers(text: str) -> list[str]:
        with provisionalcompleter():
            return [completion.text for completion in shell.Completer.completions(text, len(text))]

    return offers


@pytest.mark.parametrize(
    ("text", "offered"),
    [
        ("%route u", ["up", "use", "undo"]),
        ("cluster = %route u", ["up", "use", "undo"]),
        ("%route use d", ["disagg"]),
        ("%route show r", ["round-robin"]),
        ("%route use disagg pd", ["pd_balance_factor="]),
        ("%route up --ro", ["--roles"]),
        ("%route up --engine a", ["attach"]),
        ("%%ask --max", ["--max-tokens"]),
        ("%%ask --policy le", ["least-loaded"]),
        ("%%route d", ["disagg"]),
        ("x = 1\n%route pa", ["panel"]),
    ],
)
def test_words_are_offered(complete: Callable[[str], list[str]], text: str, offered: list[str]) -> None:
    assert set(offered) <= set(complete(text))


def test_the_body_of_a_cell_is_left_to_others(complete: Callable[[str], list[str]]) -> None:
    assert "--max-tokens" not in complete("%%ask\n--max")
    assert "up" not in complete("%%ask\nroute u")


def test_engines_and_parameters_of_what_runs(
    complete: Callable[[str], list[str]], run: Run, paced_engines: Callable[..., list[str]]
) -> None:
    run(f"%route up --roles 1P1D --endpoint-urls {' '.join(paced_engines(2))}")
    assert "D1" in complete("%route logs ")
    assert "pd_balance_factor=" in complete("%route set pd")
