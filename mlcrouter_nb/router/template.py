"""Which events of a stream are one more plain token, told by their bytes."""

import json
from typing import Any

from ..protocol.errors import EngineError
from .chunks import Chunk

TRIES = 4  # events that are parsed in the hope that they repeat


class Template:
    """The bytes around a stream's text: they stay the same from token to token.

    An event with the known beginning and end, and with no quote between, differs from the one that they were learned
    from by its text alone, so it needs no parsing. Learned from one choice without log-probabilities or token ids."""

    __slots__ = ("_prefix", "_suffix", "_tries")

    def __init__(self) -> None:
        self._prefix = self._suffix = b""
        self._tries = TRIES

    def text(self, raw: bytes) -> bytes | None:
        """The inside of the JSON string that is the event's text; None where this is no plain event."""
        prefix, suffix = self._prefix, self._suffix
        if prefix and raw.startswith(prefix) and raw.endswith(suffix):
            inside = raw[len(prefix) : len(raw) - len(suffix)]
            if inside and b'"' not in inside:
                return inside
        return None

    def learn(self, chunk: Chunk) -> None:
        """Try to take a chunk's bytes as the pattern, a few times at most."""
        if self._tries <= 0:
            return
        self._tries -= 1
        try:
            event = chunk.event
            wanted, key = _with_text(event, "~")
            before, found, rest = chunk.raw.partition(key)
            begin = rest.index(b'"') + 1
            prefix, suffix = before + found + rest[:begin], rest[rest.index(b'"', begin) :]
            if json.loads(prefix + b"~" + suffix) == wanted:  # the proof that only the text was cut out
                self._prefix, self._suffix, self._tries = prefix, suffix, 0
        except (EngineError, ValueError, KeyError, TypeError, AttributeError):
            pass  # whoever looks at the chunk will say what is wrong with it


def _with_text(event: dict[str, Any], text: str) -> tuple[dict[str, Any], bytes]:
    """A plain event with another text, and the key before it; raises `ValueError` for an event that is not plain."""
    [choice] = event["choices"]
    if event.get("usage") or "error" in event or choice.get("finish_reason") is not None:
        raise ValueError("not plain")
    if choice.get("logprobs") or choice.get("token_ids") or choice.get("index", 0) != 0:
        raise ValueError("not plain")
    if "delta" in choice:
        if set(choice["delta"]) - {"role", "content"} or not choice["delta"]["content"]:
            raise ValueError("not plain")
        changed = {**choice, "delta": {**choice["delta"], "content": text}}
        return {**event, "choices": [changed]}, b'"content":'
    if not choice["text"]:
        raise ValueError("not plain")
    return {**event, "choices": [{**choice, "text": text}]}, b'"text":'
