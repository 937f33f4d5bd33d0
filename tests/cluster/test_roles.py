"""Roles: which engines there are."""

import pytest

from mlcrouter_nb.cluster.roles import parse_roles, roles_for
from mlcrouter_nb.protocol.errors import ArgumentError


@pytest.mark.parametrize(
    ("roles", "names"),
    [
        ("1P2D", ["P0", "D1", "D2"]),
        ("2P3D", ["P0", "P1", "D2", "D3", "D4"]),
        ("1p1d", ["P0", "D1"]),
        ("3", ["E0", "E1", "E2"]),
        (1, ["E0"]),
    ],
)
def test_names(roles: str | int, names: list[str]) -> None:
    assert [slot.name for slot in parse_roles(roles)] == names


def test_roles() -> None:
    assert [slot.role for slot in parse_roles("1P1D")] == ["prefill", "decode"]
    assert [slot.role for slot in parse_roles("2")] == [None, None]


@pytest.mark.parametrize(
    "roles", ["0P1D", "1P0D", "0", "-1", "1P", "twelve", "", "1P2D3", "P1D1", "1.5", "99", "40P40D"]
)
def test_what_cannot_be_is_named(roles: str) -> None:
    with pytest.raises(ArgumentError, match=f"roles '{roles}'"):
        parse_roles(roles)


def test_endpoints_listed_without_roles() -> None:
    assert roles_for(3, disaggregated=True) == "1P2D"
    assert roles_for(1, disaggregated=True) == "1"
    assert roles_for(3, disaggregated=False) == "3"
