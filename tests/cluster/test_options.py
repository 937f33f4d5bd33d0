"""A cluster's arguments are checked before anything starts."""

import socket

import pytest

from mlcrouter_nb.cluster.options import check_port_is_free, make_options
from mlcrouter_nb.protocol.errors import ArgumentError

A, B = "http://127.0.0.1:9001", "http://127.0.0.1:9002"


@pytest.fixture(autouse=True)
def clean_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("MLCROUTER_ENGINE", raising=False)
    monkeypatch.delenv("MLCROUTER_API_KEY", raising=False)


def test_the_default() -> None:
    options = make_options()
    assert (options.model, options.kind) == ("smollm2-135m", "cpu")
    assert [spec.name for spec in options.specs()] == ["P0", "D1", "D2"]
    assert [spec.rank for spec in options.specs()] == [0, 1, 2]
    assert options == make_options(roles="1P2D"), "the same cluster"
    assert options != make_options(roles="1P1D")


def test_gpus_place_the_engines_in_the_world() -> None:
    options = make_options(endpoint_hosts=["127.0.0.1"] * 2, endpoint_ports=[1, 2], endpoint_num_gpus=[2, 3])
    assert options.device_id_starts == [0, 2, 5]
    assert [(spec.name, spec.rank, spec.port) for spec in options.specs()] == [("P0", 0, 1), ("D1", 2, 2)]
    assert options.new_world().npes == 5
    assert options.new_world().uid != options.new_world().uid


def test_attached_engines() -> None:
    options = make_options(endpoint_urls=[A + "/v1/", B])
    assert options.kind == "attach"
    assert [(spec.name, spec.url) for spec in options.specs()] == [("P0", A), ("D1", B)]
    assert make_options(endpoint_urls=[A]).slots[0].name == "E0"
    assert make_options(endpoint_urls=[A, B], policy="round-robin").slots[1].name == "E1"
    assert make_options(endpoint_urls=[A, B], roles="2").slots[1].name == "E1"


def test_the_engine_kind_comes_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MLCROUTER_ENGINE", "toaster")
    with pytest.raises(ArgumentError, match="toaster"):
        make_options()
    assert make_options(engine="cpu").kind == "cpu"


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        ({"roles": "0P1D"}, "roles '0P1D'"),
        ({"engine": "abacus"}, "abacus"),
        ({"engine": "attach"}, "--endpoint-urls"),
        ({"engine": "cpu", "endpoint_urls": [A]}, "use attach"),
        ({"engine": "mlc"}, "MLC-LLM"),
        ({"endpoint_urls": [A, B], "roles": "1P2D"}, "2 endpoints are listed"),
        ({"endpoint_urls": ["localhost:80"]}, "not an address"),
        ({"endpoint_urls": ["http://127.0.0.1:99999"]}, "not an address"),
        ({"endpoint_hosts": ["127.0.0.1"], "endpoint_ports": [1, 2]}, "differ in length"),
        ({"endpoint_hosts": ["127.0.0.1"] * 2, "endpoint_ports": [80, 80]}, "listed twice"),
        ({"port": 70000}, "70000"),
        ({"endpoint_num_gpus": [0, 1]}, "one GPU at least"),
    ],
)
def test_what_cannot_be_is_a_sentence(arguments: dict, said: str) -> None:
    with pytest.raises(ArgumentError, match=said):
        make_options(**arguments)


def test_a_taken_port_is_named() -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ArgumentError, match=str(port)):
            check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", port)
    check_port_is_free("127.0.0.1", 0)


def test_a_foreign_host_is_named() -> None:
    with pytest.raises(ArgumentError, match=r"192\.0\.2\.1"):
        check_port_is_free("192.0.2.1", 8000)


@pytest.mark.parametrize("host", ["192.0.2.1", "nohost.invalid"])
def test_a_host_that_is_not_this_machine_is_found_with_any_port(host: str) -> None:
    with pytest.raises(ArgumentError, match=f"Cannot listen on {host}"):
        check_port_is_free(host, 0)
