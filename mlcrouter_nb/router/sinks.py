"""Where a request's chunks go: a queue that somebody iterates, or one answer that is put together."""

import asyncio
from collections import deque
from typing import Any

from .chunks import Chunk

HIGH = 64  # chunks that wait for their reader before the engine is slowed down


class QueueSink:
    """Chunks for a reader in another task."""

    def __init__(self) -> None:
        self._chunks: deque[Chunk] = deque()
        self._loop = asyncio.get_running_loop()
        self._reader: asyncio.Future[None] | None = None
        self._writer: asyncio.Future[None] | None = None
        self.closed = False

    def write(self, chunk: Chunk) -> bool:
        self._chunks.append(chunk)
        _wake(self._reader)
        return len(self._chunks) < HIGH

    async def ready(self) -> None:
        while len(self._chunks) >= HIGH:
            self._writer = self._loop.create_future()
            await self._writer

    def close(self) -> None:
        """No more chunks will come."""
        self.closed = True
        _wake(self._reader)

    async def read(self) -> Chunk | None:
        """The next chunk; None at the end."""
        while not self._chunks:
            if self.closed:
                return None
            self._reader = self._loop.create_future()
            await self._reader
        chunk = self._chunks.popleft()
        if len(self._chunks) < HIGH // 2:
            _wake(self._writer)
        return chunk


class AnswerSink:
    """Puts the chunks of a stream together as one answer, as OpenAI's API gives it without `stream`."""

    def __init__(self) -> None:
        self._head: dict[str, Any] = {}
        self._choices: dict[int, dict[str, Any]] = {}

    def write(self, chunk: Chunk) -> bool:
        event = chunk.event
        if not self._head:
            self._head = {key: value for key, value in event.items() if key not in ("choices", "usage")}
        for choice in event.get("choices") or ():
            index = choice.get("index", 0)
            whole = self._choices.setdefault(index, {"index": index})
            for key, value in choice.items():
                if key != "index":
                    _merge(whole, key, value)
        return True

    async def ready(self) -> None:
        """An answer is never full."""

    def answer(self, usage: dict[str, Any]) -> dict[str, Any]:
        """The whole answer."""
        choices = [self._choices[index] for index in sorted(self._choices)]
        head = dict(self._head)
        if head.get("object") == "chat.completion.chunk":
            head["object"] = "chat.completion"
            for choice in choices:
                message = {"role": "assistant", "content": None, **choice.pop("delta", {})}
                if message["content"] is None and not message.get("tool_calls"):
                    message["content"] = ""
                choice["message"] = message
        return {**head, "choices": choices, "usage": usage}


def _merge(whole: dict[str, Any], key: str, value: Any) -> None:
    """Texts and lists grow, objects merge, tool calls are kept apart by their index, anything else is replaced."""
    old = whole.get(key)
    if old is None or value is None:
        whole[key] = value if old is None else old
    elif key in ("role", "id", "type", "finish_reason"):
        whole[key] = value
    elif isinstance(old, str) and isinstance(value, str):
        whole[key] = old + value
    elif key == "tool_calls":
        whole[key] = _merged_by_index(old, value)
    elif isinstance(old, list) and isinstance(value, list):
        whole[key] = old + value
    elif isinstance(old, dict) and isinstance(value, dict):
        whole[key] = merged = dict(old)
        for inner, part in value.items():
            _merge(merged, inner, part)
    else:
        whole[key] = value


def _merged_by_index(old: list[dict[str, Any]], new: list[dict[str, Any]]) -> list[dict[str, Any]]:
    by_index = {part.get("index", place): dict(part) for place, part in enumerate(old)}
    for part in new:
        target = by_index.setdefault(part.get("index", 0), {})
        for key, value in part.items():
            if key == "index":
                target[key] = value
            else:
                _merge(target, key, value)
    return [by_index[index] for index in sorted(by_index)]


def _wake(waiter: "asyncio.Future[None] | None") -> None:
    if waiter is not None and not waiter.done():
        waiter.set_result(None)
