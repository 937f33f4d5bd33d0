import codecs

import pytest

from mlcrouter_nb.engine.text import TextStream


class Pieces:
    """A decoder whose ids are indices into a list of byte strings."""

    def __init__(self, *pieces: bytes) -> None:
        self.pieces = pieces
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, id: int) -> str:
        return self._utf8.decode(self.pieces[id])

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


def play(stream: TextStream, count: int) -> list[tuple[str, list[int]]]:
    taken = []
    for id in range(count):
        stopped = stream.push(id)
        taken.append(stream.take())
        if stopped:
            break
    else:
        stream.end()
        taken.append(stream.take())
    return taken


def test_characters_are_never_cut() -> None:
    smile = "🙂".encode()
    stream = TextStream(Pieces(b"a", b" " + smile[:2], smile[2:], b"b"))
    assert play(stream, 4) == [("a", [0]), ("", []), (" 🙂", [1, 2]), ("b", [3]), ("", [])]
    assert play(TextStream(Pieces(b"a", smile[:2])), 2)[-1] == ("\ufffd", [1])


@pytest.mark.parametrize(
    ("pieces", "stop", "shown"),
    [
        ((b"Hello", b" wor", b"ld", b"!"), ["world"], "Hello "),
        ((b"Hello", b" wor", b"d"), ["world"], "Hello word"),
        ((b"aa", b"aab"), ["aab"], "aa"),
        ((b"x\n", b"\ny"), ["\n\n"], "x"),
        ((b"one two three",), ["three", "two"], "one "),
        ((b"abab", b"abc"), ["abc"], "abab"),
        ((b"end",), [], "end"),
        ((b"EN", b"D"), ["END"], ""),
        ((b"caf\xc3", b"\xa9 x"), ["é"], "caf"),
    ],
)
def test_no_part_of_a_stop_string_is_shown(pieces: tuple[bytes, ...], stop: list[str], shown: str) -> None:
    taken = play(TextStream(Pieces(*pieces), stop), len(pieces))
    assert "".join(text for text, _ in taken) == shown
    assert all(shown.startswith("".join(text for text, _ in taken[: i + 1])) for i in range(len(taken)))


def test_tokens_are_given_out_with_the_last_of_their_text() -> None:
    stream = TextStream(Pieces(b"ab", b"cd", b"xy"), ["bcX"])
    assert play(stream, 3) == [("a", []), ("bcd", [0, 1]), ("xy", [2]), ("", [])]


def test_an_interruption_keeps_half_a_character_back() -> None:
    stream = TextStream(Pieces(b"a", b"b", b"\xf0\x9f"), ["bz"])
    for id in range(3):
        stream.push(id)
    stream.interrupt()
    assert stream.take() == ("ab", [0, 1])
