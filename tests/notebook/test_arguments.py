"""Lines of magics."""

import pytest
from IPython.core.error import UsageError

from mlcrouter_nb.notebook.arguments import HelpShown, Parser, join_pairs, read_pairs, split
from mlcrouter_nb.router.parameters import choice, slider, switch

PARAMETERS = {"f": slider(0.0, 1.0), "mode": choice(["1", "fast"]), "on": switch(False)}


@pytest.mark.parametrize(
    ("line", "values"),
    [
        ("f=0.3", {"f": 0.3}),
        ("f = 0.3  on=yes", {"f": 0.3, "on": True}),
        ("on=False", {"on": False}),
        ("mode=1", {"mode": "1"}),
        ("mode='fast'", {"mode": "fast"}),
        ("other=abc", {"other": "abc"}),
    ],
)
def test_pairs_become_values_of_their_parameters(line: str, values: dict[str, object]) -> None:
    assert read_pairs(split(join_pairs(line)), PARAMETERS) == values


@pytest.mark.parametrize("line", ["f", "=3", "f=", "3=f"])
def test_what_is_no_pair_is_refused(line: str) -> None:
    with pytest.raises(UsageError, match="name=value"):
        read_pairs(split(line), PARAMETERS)


def test_an_open_quote_is_a_usage_error() -> None:
    with pytest.raises(UsageError, match="cannot be split"):
        split("mode='fast")


def test_errors_name_the_magic_and_the_nearest_option() -> None:
    parser = Parser("%%ask", "Ask.")
    parser.add_argument("--seed", type=int)
    with pytest.raises(UsageError, match=r"%%ask: .*Did you mean '--seed'\?"):
        parser.parse(["--sed", "3"])
    with pytest.raises(UsageError, match="--seed"):
        parser.parse(["--seed", "x"])
    with pytest.raises(HelpShown, match="usage: %%ask"):
        parser.parse(["--help"])
