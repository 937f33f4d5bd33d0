"""The wire format of MicroServing."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcrouter_nb.protocol.errors import RequestError
from mlcrouter_nb.protocol.microserving import decode_kv_metadata, encode_kv_metadata, kv_window_end

segments = st.lists(st.tuples(st.integers(0, 1 << 40), st.integers(0, 1 << 20)), max_size=8)


@given(segments)
def test_metadata_survives_the_wire(pairs: list[tuple[int, int]]) -> None:
    wire = encode_kv_metadata([len(pairs), *(number for pair in pairs for number in pair)])
    assert decode_kv_metadata(wire) == pairs


def test_metadata_has_the_reference_form() -> None:
    raw = base64.b64decode(encode_kv_metadata([2, 16, 16, 0, 2]))
    assert raw == (13).to_bytes(8, "little") + b"[2,16,16,0,2]"


@pytest.mark.parametrize(
    "wire",
    [
        "",
        "????",
        base64.b64encode(b"[0]").decode(),
        encode_kv_metadata([2, 0, 1]),
        encode_kv_metadata([1, 0, -1]),
    ],
)
def test_what_is_no_metadata_is_refused(wire: str) -> None:
    with pytest.raises(RequestError, match="kv_append_metadata"):
        decode_kv_metadata(wire)


@given(st.text())
def test_no_text_crashes_the_decoder(wire: str) -> None:
    try:
        decode_kv_metadata(wire)
    except RequestError:
        pass


@pytest.mark.parametrize(("factor", "end"), [(0, -1), (1e-6, -1), (0.1, 90), (0.5, 50), (1, 0)])
def test_balance_factor_sets_the_window(factor: float, end: int) -> None:
    assert kv_window_end(100, factor) == end


@pytest.mark.parametrize("factor", [-0.1, 1.2, float("nan")])
def test_balance_factor_out_of_range_is_named(factor: float) -> None:
    with pytest.raises(RequestError, match=str(factor)):
        kv_window_end(100, factor)
