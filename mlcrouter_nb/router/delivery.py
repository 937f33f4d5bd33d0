"""From a policy's chunks to what the client gets: one id, text once, usage at the end, and what a resume needs."""

import time
from typing import Any, Protocol

from ..protocol.errors import EngineError, MlcRouterError, RequestError
from ..telemetry import Telemetry
from ..telemetry.traces import join_text
from .call import Call
from .chat import chat_event
from .chunks import Chunk
from .request import Request
from .usage import UsageSum


class Sink(Protocol):
    """Where a request's chunks go."""

    def write(self, chunk: Chunk) -> bool:
        """Take a chunk; False asks to `await ready()` before the next."""

    async def ready(self) -> None:
        """Wait until more may be written."""


class Preempted(MlcRouterError):
    """The engine took the request's KV away; what was sent is kept, and the rest comes from another attempt."""


class Delivery:
    """One request's way to its sink."""

    def __init__(self, request: Request, sink: Sink, telemetry: Telemetry) -> None:
        self.request, self.sink, self.telemetry = request, sink, telemetry
        self.usage = UsageSum()
        self.finish_reason: str | None = None
        self._end_reason = "stop"
        self._trace = request.trace
        # id, created and model of the first event: the same to the end
        self._stamp: dict[str, Any] | None = None
        self._straight: Call | None = None  # the call whose plain chunks go on as they come
        self._texts: list[str | bytes] = []  # as the engines sent them, as in a trace's pieces
        self._ids: list[int] | None = []
        self._ids_before: list[int] | None = []  # this attempt
        self._sources: set[Call] = set()  # calls of this attempt that brought text
        self._finished: set[int] = set()  # indices that have ended
        self._indices: set[int] = set(range(request.body.get("n") or 1))

    def deliver(self, chunk: Chunk) -> bool:
        """Count a chunk and pass it on; False: the sink is full. Raises `Preempted` or `EngineError`."""
        if chunk.plain is not None and chunk.source is self._straight:
            self._trace.times.append(self._mark())
            self._trace.pieces.append(chunk.plain)
            self._texts.append(chunk.plain)
            self.telemetry.touch()
            return self.sink.write(chunk)
        return self._deliver_parsed(chunk)

    def end(self) -> None:
        """The policy is through: close the answer in order, and tell the usage to those who asked."""
        if self._stamp is None:
            raise MlcRouterError("it gave the client nothing; return a stream, or yield chunks.")
        for index in sorted(self._indices - self._finished):  # the policy stopped before the engine did
            self.sink.write(Chunk.of(self._closing(index)))
            self.finish_reason = self.finish_reason or self._end_reason
        total = self.total_usage()
        if self.request.include_usage:
            self.sink.write(Chunk.of({**self._stamp, "choices": [], "usage": total}))

    def finish_with(self, reason: str) -> None:
        """What the answer ends with where no engine is asked to end it."""
        self._end_reason = reason

    def total_usage(self) -> dict[str, Any]:
        """The usage of the whole request."""
        total = self.usage.total(len(self._trace.times), self._trace.prompt_tokens)
        self._trace.prompt_tokens = total["prompt_tokens"]
        self._trace.usage_tokens = total["completion_tokens"]
        self._trace.cached_tokens = self.usage.cached_tokens
        return total

    # Resuming

    @property
    def begun(self) -> bool:
        """Whether the client has got anything."""
        return self._stamp is not None

    def why_not_resumable(self) -> str:
        """Why what was sent cannot be continued; "" if it can."""
        body = self.request.body
        if not self.begun:
            return ""
        if (body.get("n") or 1) > 1:
            return "a request with n > 1 cannot be resumed"
        if body.get("logprobs") or body.get("echo"):
            return "a request with logprobs or echo cannot be resumed"
        if (body.get("response_format") or {}).get("type", "text") != "text" or body.get("tools"):
            return "constrained output cannot be resumed in its middle"
        if len(self._sources) > 1:
            return "the policy has mixed several streams"
        return self.request.why_not_continuable(self._ids is not None)

    def sent(self, tokenizer: Any) -> tuple[str, list[int] | None, int]:
        """What the client has got in all attempts: text, token ids (None: unknown), and their number."""
        text = join_text(self._texts)
        ids = self._ids
        if ids is None or (not ids and text):
            ids = self._ids = tokenizer.encode(text, special=False) if tokenizer is not None else None
        return text, ids, len(ids) if ids is not None else len(self._trace.times)

    def next_leg(self, tokens: int) -> None:
        """Another attempt begins."""
        self.usage.next_leg(tokens)
        self._sources.clear()
        self._ids_before = None if self._ids is None else list(self._ids)

    # The parts of `deliver`

    def _mark(self) -> float:
        """The time now, as a sign of life. Not the loop's: uvloop rounds it to milliseconds."""
        now = self.request.progress = time.monotonic()
        return now

    def _deliver_parsed(self, chunk: Chunk) -> bool:
        event = chunk.event
        if "error" in event:
            raise self._engine_error(chunk)
        usage = event.get("usage")
        if usage:
            self.usage.tell(usage, self.request.guard)
        choices = event.get("choices")
        if not choices:
            return True
        now = self._mark()
        told = choices[0].pop("generated_token_ids", None)  # for us alone
        if usage:
            chunk.event = {key: value for key, value in event.items() if key != "usage"}
        preempted = self._preempted(chunk)
        text = chunk.text
        if preempted and not text:
            self._take_ids(told)
            raise Preempted("The engine preempted the request.")
        counted = self._count(chunk, text, now)
        self._finish(chunk)
        full = not self.sink.write(self._stamped(chunk))
        self._straight = chunk.source if counted and not chunk.edited else None
        if preempted:
            self._take_ids(told)
            raise Preempted("The engine preempted the request.")
        return not full

    def _take_ids(self, told: Any) -> None:
        """What an engine of ours says it has generated in this attempt, when it preempts."""
        if isinstance(told, list) and self._ids_before is not None:
            self._ids = [*self._ids_before, *told]

    def _count(self, chunk: Chunk, text: str, now: float) -> bool:
        """Count the chunk if it is a token's."""
        delta = chunk.choice.get("delta")
        is_token = bool(text) or (chunk.finish_reason is None if delta is None else _says_more(delta))
        if not is_token:
            return False
        trace = self._trace
        trace.times.append(now)
        trace.pieces.append(text)
        if len(trace.times) == 1:
            engine = chunk.source.engine if chunk.source is not None else None
            self.telemetry.emit("first_token", request=trace.id, engine=engine)
        else:
            self.telemetry.touch()
        self._texts.append(chunk.engine_text)
        ids = chunk.token_ids
        if ids is None:
            self._ids = None
        elif self._ids is not None:
            self._ids.extend(ids)
        if chunk.source is not None:
            self._sources.add(chunk.source)
        return True

    def _finish(self, chunk: Chunk) -> None:
        for choice in chunk.event["choices"]:
            index = choice.get("index", 0)
            self._indices.add(index)
            reason = choice.get("finish_reason")
            if reason is not None:
                self._finished.add(index)
                self.finish_reason = reason

    def _preempted(self, chunk: Chunk) -> bool:
        if chunk.finish_reason != "preempt":
            return False
        event = chunk.event
        chunk.event = {**event, "choices": [{**choice, "finish_reason": None} for choice in event["choices"]]}
        return True

    def _stamped(self, chunk: Chunk) -> Chunk:
        """The chunk with the id that the answer began with, in the form that the client speaks."""
        event = chunk.event
        first = self._stamp is None
        if self._stamp is None:
            kind = "chat.completion.chunk" if self.request.chat else "text_completion"
            self._stamp = {
                "id": event.get("id") or self.request.id, "object": kind,
                "created": event.get("created") or int(self._trace.arrival),
                "model": event.get("model") or self.request.body.get("model") or "",
            }  # fmt: skip
        if self.request.chat and "delta" not in event["choices"][0]:
            chunk.event = {**chat_event(event, first), **self._stamp}
        elif event.get("id") != self._stamp["id"]:
            chunk.event = {**event, **self._stamp}
        return chunk

    def _closing(self, index: int) -> dict[str, Any]:
        content: dict[str, Any] = {"delta": {}} if self.request.chat else {"text": ""}
        choice = {"index": index, **content, "logprobs": None, "finish_reason": self._end_reason}
        return {**(self._stamp or {}), "choices": [choice]}

    def _engine_error(self, chunk: Chunk) -> Exception:
        error = chunk.event["error"]
        message = error.get("message") if isinstance(error, dict) else error
        code = error.get("code") if isinstance(error, dict) else None
        name = chunk.source.engine if chunk.source is not None else ""
        if isinstance(code, int) and 400 <= code < 500:
            return RequestError(str(message), status=code)
        return EngineError(f"{name} reported: {message}", engine=name, status=500)


def _says_more(delta: dict[str, Any]) -> bool:
    """Whether a chat delta without text is a token's: a tool call, a thought."""
    return any(value for key, value in delta.items() if key not in ("role", "content"))
