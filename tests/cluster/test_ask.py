"""The request that `ask` makes."""

import pytest

from mlcrouter_nb.cluster.ask import make_body
from mlcrouter_nb.protocol.errors import ArgumentError


@pytest.mark.parametrize(
    ("slip", "meant"), [("max_token", "max_tokens"), ("polcy", "policy"), ("temprature", "temperature")]
)
def test_a_slip_in_a_fields_name_is_told(slip, meant):
    with pytest.raises(ArgumentError, match=f"ask has no '{slip}'. Did you mean '{meant}'?"):
        make_body("Who?", None, False, {slip: 16}, "m")


def test_fields_that_only_engines_know_travel_on():
    body = make_body("Who?", None, False, {"min_p": 0.1, "debug_config": {}, "seed": 1}, "m")
    assert body.model_extra == {"min_p": 0.1, "debug_config": {}}
