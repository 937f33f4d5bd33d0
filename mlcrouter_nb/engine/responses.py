"""The shapes of OpenAI's answers: completions and chat completions, whole and in chunks.

Source: https://platform.openai.com/docs/api-reference/completions and .../chat"""

import json
import time
from dataclasses import dataclass, field
from typing import Any, Protocol
from uuid import uuid4


def event(content: dict[str, Any]) -> bytes:
    """A server-sent event."""
    return b"data: " + json.dumps(content, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


DONE = b"data: [DONE]\n\n"


class Shape(Protocol):
    """How one request's answer looks. `ids` are sent only to who asked for `return_token_ids`."""

    id: str

    def opening(self) -> list[dict[str, Any]]: ...
    def chunk(self, text: str, reason: str | None, ids: list[int] | None) -> dict[str, Any]: ...
    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]: ...
    def whole(
        self, text: str, reason: str | None, ids: list[int] | None, usage: dict[str, Any]
    ) -> dict[str, Any]: ...


@dataclass
class CompletionShape:
    """`/v1/completions` and start_generate."""

    model: str
    id: str = field(default_factory=lambda: f"cmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> list[dict[str, Any]]:
        """Chunks before the first token."""
        return []

    def chunk(self, text: str, reason: str | None, ids: list[int] | None) -> dict[str, Any]:
        """A piece of the stream."""
        return self._answer([self._choice(text, reason, ids)])

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The stream's last chunk, where it was asked for."""
        return {**self._answer([]), "usage": usage}

    def whole(
        self, text: str, reason: str | None, ids: list[int] | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer at once."""
        return {**self._answer([self._choice(text, reason, ids)]), "usage": usage}

    def _choice(self, text: str, reason: str | None, ids: list[int] | None) -> dict[str, Any]:
        choice = {"index": 0, "text": text, "logprobs": None, "finish_reason": reason}
        return choice if ids is None else {**choice, "token_ids": ids}

    def _answer(self, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


@dataclass
class ChatShape:
    """`/v1/chat/completions`."""

    model: str
    id: str = field(default_factory=lambda: f"chatcmpl-{uuid4().hex}")
    created: int = field(default_factory=lambda: int(time.time()))

    def opening(self) -> list[dict[str, Any]]:
        """The role, before the first token."""
        return [self._answer("chat.completion.chunk", [_delta({"role": "assistant", "content": ""}, None)])]

    def chunk(self, text: str, reason: str | None, ids: list[int] | None) -> dict[str, Any]:
        """A piece of the stream."""
        choice = _delta({"content": text} if text or reason is None else {}, reason)
        return self._answer(
            "chat.completion.chunk", [choice if ids is None else {**choice, "token_ids": ids}]
        )

    def usage_chunk(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The stream's last chunk, where it was asked for."""
        return {**self._answer("chat.completion.chunk", []), "usage": usage}

    def whole(
        self, text: str, reason: str | None, ids: list[int] | None, usage: dict[str, Any]
    ) -> dict[str, Any]:
        """The answer at once."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice: dict[str, Any] = {"index": 0, "message": message, "logprobs": None, "finish_reason": reason}
        if ids is not None:
            choice["token_ids"] = ids
        return {**self._answer("chat.completion", [choice]), "usage": usage}

    def _answer(self, object: str, choices: list[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": object,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def _delta(delta: dict[str, Any], reason: str | None) -> dict[str, Any]:
    return {"index": 0, "delta": delta, "logprobs": None, "finish_reason": reason}
