"""Tokens to text while they come: whole characters only, and no part of a stop string."""

from collections.abc import Sequence

from ..models.tokenizer import StreamDecoder


class TextStream:
    """The text of one generation. Text is given out together with the tokens that it stands for, never by halves."""

    def __init__(self, decoder: StreamDecoder, stop: Sequence[str] = ()) -> None:
        self._decoder = decoder
        self._stop = stop
        self._held = ""  # may be the beginning of a stop string
        self._ids: list[int] = []
        self._ready: list[str] = []
        self._ready_ids: list[int] = []
        self._half = ""  # tokens that end within a character
        self._half_ids: list[int] = []

    def push(self, id: int) -> bool:
        """Add a token; True when a stop string is complete: text from it on is dropped."""
        self._half_ids.append(id)
        self._half += self._decoder.push(id)
        if self._decoder.pending:
            return False
        self._join()
        cut = min((at for at in map(self._held.find, self._stop) if at >= 0), default=-1)
        if cut >= 0:
            self._held = self._held[:cut]
            self._release(len(self._held))
            return True
        self._release(len(self._held) - self._unsafe())
        return False

    def take(self) -> tuple[str, list[int]]:
        """The text that may be shown since the last call, and the tokens that are shown to the end by it."""
        text, ids = "".join(self._ready), self._ready_ids
        self._ready, self._ready_ids = [], []
        return text, ids

    def end(self) -> None:
        """No stop string came: what was held back for one may be shown, half a character as U+FFFD."""
        self._half += self._decoder.flush()
        self._join()
        self._release(len(self._held))

    def interrupt(self) -> None:
        """The generation goes on elsewhere, from the tokens that were given out: keep half a character back."""
        self._release(len(self._held))

    def _join(self) -> None:
        self._held += self._half
        self._ids += self._half_ids
        self._half, self._half_ids = "", []

    def _release(self, length: int) -> None:
        self._ready.append(self._held[:length])
        self._held = self._held[length:]
        if not self._held:
            self._ready_ids += self._ids
            self._ids = []

    def _unsafe(self) -> int:
        """Length of the longest end of the held text that begins a stop string."""
        longest = max(map(len, self._stop), default=1) - 1
        for length in range(min(longest, len(self._held)), 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stop):
                return length
        return 0
