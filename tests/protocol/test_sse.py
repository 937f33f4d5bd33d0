import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcrouter_nb.protocol.sse import BOM, Splitter, encode_event


def split(data: bytes, cuts: list[int]) -> list[bytes]:
    """The events of a stream that arrives cut at these places."""
    splitter, events, begin = Splitter(), [], 0
    for cut in [*sorted(cuts), len(data)]:
        events += splitter.feed(data[begin:cut])
        begin = max(begin, cut)
    return events


@pytest.mark.parametrize(
    ("stream", "events"),
    [
        (b"data: a\n\n", [b"a"]),
        (b"data:a\n\ndata:  b\n\n", [b"a", b" b"]),
        (b"data: a\r\n\r\ndata: b\r\n\r\n", [b"a", b"b"]),
        (b"data: a\r\rdata: b\r\r", [b"a", b"b"]),
        (b"data: a\r\n\ndata: b\n\r", [b"a", b"b"]),
        (b": ping\n\ndata: a\n\n", [b"a"]),
        (b": ping\ndata: a\n\n", [b"a"]),
        (b"event: x\nid: 7\ndata: a\nretry: 3\n\n", [b"a"]),
        (b"data: a\ndata: b\n\n", [b"a\nb"]),
        (b"data\n\ndata\ndata\n\ndata:", [b"", b"\n"]),  # the standard's own example
        (b"data: a\n\n\n\n\ndata: b\n\n", [b"a", b"b"]),
        (BOM + b"data: a\n\n", [b"a"]),
        (b"data: no blank line follows\n", []),
        (b"datum: a\n\n", []),
        ("data: ünï\U0001f600\n\n".encode(), ["ünï\U0001f600".encode()]),
    ],
)
def test_the_standard_cut_at_every_byte(stream, events):
    assert split(stream, []) == events
    for cut in range(len(stream) + 1):
        assert split(stream, [cut]) == events, cut
    assert split(stream, list(range(len(stream)))) == events


lines = st.lists(
    st.binary(max_size=12).map(lambda b: b.replace(b"\r", b"").replace(b"\n", b"")), min_size=1, max_size=3
)


@given(
    events=st.lists(lines, max_size=6),
    endings=st.lists(st.sampled_from([b"\n", b"\r", b"\r\n"]), min_size=1, max_size=5),
    spaces=st.booleans(),
    comments=st.booleans(),
    data=st.data(),
)
def test_any_stream_in_any_pieces(events, endings, spaces, comments, data):
    stream, ending = b"", 0

    def line(content: bytes) -> bytes:
        nonlocal ending
        ending += 1
        # A CR and the LF of another line would be one line's end: keep to one kind after a bare CR.
        kind = endings[ending % len(endings)] if b"\r" not in endings else b"\r"
        return content + kind

    for event in events:
        if comments:
            stream += line(b": ping")
        for value in event:
            stream += line(b"data:" + (b" " if spaces or value.startswith(b" ") else b"") + value)
        stream += line(b"")
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert split(stream, cuts) == [b"\n".join(event) for event in events]


@given(st.lists(st.text(max_size=20), max_size=5), st.data())
def test_what_is_encoded_comes_back(texts, data):
    texts = [text.replace("\r", "") for text in texts]
    stream = b"".join(encode_event(text.encode()) for text in texts)
    cuts = data.draw(st.lists(st.integers(0, len(stream)), max_size=8))
    assert split(stream, cuts) == [text.encode() for text in texts]


def test_a_long_line_in_many_pieces_is_not_copied_again_and_again():
    splitter, piece = Splitter(), b"x" * 4096
    assert splitter.feed(b"data: ") == []
    for _ in range(4096):
        splitter.feed(piece)
    assert splitter.feed(b"\n\n") == [piece * 4096]
