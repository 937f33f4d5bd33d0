"""Engines and requests as a policy's author sees them with print and dir."""

import pytest

from mlcrouter_nb.router.endpoint import Endpoint
from mlcrouter_nb.router.groups import Engines
from mlcrouter_nb.router.policy import PolicyBook
from mlcrouter_nb.router.prompts import Prompts
from mlcrouter_nb.router.request import Request


@pytest.fixture
def engines() -> Engines:
    names = {"P0": "prefill", "D1": "decode", "D2": "decode"}
    return Engines([Endpoint(name, "http://127.0.0.1:9", role) for name, role in names.items()])


def test_engines_print_as_their_names(engines):
    assert repr(engines) == "<Engines P0 D1 D2>"
    assert repr(engines.decode) == "<decode engines: D1, D2>"
    assert repr(engines.all) == "<engines: P0, D1, D2>"
    assert repr(engines.without(["D1"])) == "<Engines P0 D2>"


def test_an_engine_is_no_attribute(engines):
    with pytest.raises(AttributeError, match=r'engines has no \'D1\'.*engines\["D1"\]'):
        engines.D1  # noqa: B018
    assert engines["D1"].name == "D1"


def test_dir_of_a_request_is_what_policies_look_at():
    body = {"prompt": "a b", "temperature": 0.5, "min_p": 0.1}
    request = Request("r", body, {}, PolicyBook().get("disagg"), Prompts(None, None, None))
    offered = dir(request)
    assert {"prompt", "text", "session", "temperature", "min_p", "kv_window_end"} <= set(offered)
    assert not {"guard", "leave", "complete_fields", "next_attempt", "_ids"} & set(offered)
    assert request.temperature == 0.5
