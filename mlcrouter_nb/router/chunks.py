"""Chunks: what an engine streamed, parsed only when somebody looks."""

import json
from typing import TYPE_CHECKING, Any

from ..protocol.errors import EngineError
from ..telemetry.traces import decode_json_text, event_text

if TYPE_CHECKING:
    from .call import Call


class Chunk:
    """One event of a stream; untouched, it goes on as the bytes that came.

    `raw` is the event's JSON, `source` the call that brought it. `plain` is the JSON of the text, without its quotes,
    of an event that is known to hold nothing else, and None of all others."""

    __slots__ = ("_edited", "_event", "_text", "plain", "raw", "source")

    def __init__(self, raw: bytes, source: "Call | None" = None, plain: bytes | None = None) -> None:
        self.raw = raw
        self.source = source
        self.plain = plain
        self._event: dict[str, Any] | None = None
        self._text: str | None = None  # the engine's own text, once another was put in its place
        self._edited = False

    @classmethod
    def of(cls, event: dict[str, Any]) -> "Chunk":
        """A chunk that no engine sent."""
        chunk = cls(b"")
        chunk.event = event
        return chunk

    @property
    def event(self) -> dict[str, Any]:
        """The event as a dict, in OpenAI's form; assign it to change what goes on."""
        if self._event is None:
            try:
                self._event = json.loads(self.raw)
                if not isinstance(self._event, dict):
                    raise ValueError("not an object")
            except ValueError as error:
                name = self.source.engine if self.source is not None else ""
                start = self.raw[:80].decode(errors="replace")
                raise EngineError(
                    f"{name or 'The engine'} sent an event that is no JSON object: {start!r}.",
                    engine=name,
                    status=502,
                ) from error
        return self._event

    @event.setter
    def event(self, event: dict[str, Any]) -> None:
        self._event, self._edited, self.plain = event, True, None

    @property
    def edited(self) -> bool:
        """Whether it goes on otherwise than it came."""
        return self._edited

    @property
    def choice(self) -> dict[str, Any]:
        """The event's only or first choice; empty where it has none (a usage event)."""
        choices = self.event.get("choices")
        return choices[0] if choices else {}

    @property
    def text(self) -> str:
        """The text that this chunk adds; may be set."""
        if self.plain is not None:
            return decode_json_text(self.plain)
        return event_text(self.event)

    @text.setter
    def text(self, text: str) -> None:
        if not isinstance(text, str):
            raise TypeError(f"chunk.text is a str, not a value of type {type(text).__name__}.")
        text.encode()  # raises where it could not be sent: a lone surrogate
        if self._text is None:
            self._text = self.text
        choice = self.choice
        if "delta" in choice:
            choice["delta"]["content"] = text
        elif choice:
            choice["text"] = text
        self._edited, self.plain = True, None

    @property
    def engine_text(self) -> str:
        """The text as the engine sent it, whatever a policy made of it."""
        return self.text if self._text is None else self._text

    @property
    def finish_reason(self) -> str | None:
        """Why the stream ends here: "stop", "length"...; None while it goes on."""
        if self.plain is not None:
            return None
        reason: str | None = self.choice.get("finish_reason")
        return reason

    @property
    def usage(self) -> dict[str, Any] | None:
        """OpenAI's usage object, where this chunk carries it."""
        if self.plain is not None:
            return None
        usage: dict[str, Any] | None = self.event.get("usage")
        return usage

    @property
    def token_ids(self) -> list[int] | None:
        """The ids behind the text, where the engine tells them."""
        ids: list[int] | None = self.choice.get("token_ids")
        return ids

    def payload(self) -> bytes:
        """The event's JSON as it goes on."""
        if not self._edited:
            return self.raw
        return json.dumps(self._event, ensure_ascii=False, separators=(",", ":")).encode()

    def __repr__(self) -> str:
        return f"<chunk {self.payload()[:200].decode(errors='replace')}>"
