"""Asking the router from Python: the body, the handle of a running request, the answer."""

import json
import time
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from typing import Any

from ..protocol.errors import ArgumentError
from ..protocol.openai import KNOWN, ChatCompletionRequest, CompletionRequest, misspelt, parse_body
from ..router.chunks import Chunk
from ..router.router import Router
from ..telemetry import RequestTrace
from .job import Job
from .loop_thread import TICK, LoopThread
from .tracebacks import ShortTraceback

DEFAULT_MAX_TOKENS = 128
ASK_FIELDS = ("policy", "chat", "on_text")  # of ask, stream and submit themselves


class Answer(str):
    """The text of an answer, with what became of its request.

    `trace` has route and times, `usage` OpenAI's token counts, `finish_reason` why it ended."""

    trace: RequestTrace | None
    usage: dict[str, Any] | None
    finish_reason: str | None

    def __new__(
        cls,
        text: str,
        *,
        trace: RequestTrace | None = None,
        usage: dict[str, Any] | None = None,
        finish_reason: str | None = None,
    ) -> "Answer":
        answer = super().__new__(cls, text)
        answer.trace, answer.usage, answer.finish_reason = trace, usage, finish_reason
        return answer


class Submission:
    """A request under way: cancel it, wait for it, or await it, from any thread and any loop."""

    def __init__(
        self,
        thread: LoopThread,
        router: Router,
        body: CompletionRequest | ChatCompletionRequest,
        policy: str | None,
        on_text: Callable[[str], None] | None,
    ) -> None:
        self.trace: RequestTrace | None = None
        self._thread = thread
        self._job: Job[Answer] = thread.submit(self._run(router, body, policy, on_text))

    @property
    def done(self) -> bool:
        """Whether the request has ended, in whatever way."""
        return self._job.future.done()

    def cancel(self) -> None:
        """End the request; its KV is freed on all engines. Does nothing once it has ended."""
        self._job.cancel()

    def wait(self, timeout: float | None = None) -> bool:
        """Block until the request has ended, `timeout` seconds at most; answers whether it has."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while not self._job.wait(
            TICK if deadline is None else min(TICK, max(0.0, deadline - time.monotonic()))
        ):
            if deadline is not None and time.monotonic() >= deadline:
                return False
        return True

    def result(self, timeout: float | None = None) -> Answer:
        """The answer; raises what failed, `asyncio.CancelledError` after `cancel`, or `TimeoutError`."""
        if not self.wait(timeout):
            raise TimeoutError("The request is still running.")
        with ShortTraceback():
            return self._job.future.result()

    def __await__(self) -> Generator[Any, None, Answer]:
        return self._thread.join(self._job).__await__()

    async def _run(
        self,
        router: Router,
        body: CompletionRequest | ChatCompletionRequest,
        policy: str | None,
        on_text: Callable[[str], None] | None,
    ) -> Answer:
        texts: list[str] = []
        async with router.stream(body, policy=policy) as chunks:
            self.trace = chunks.trace
            async for chunk in chunks:
                if text := chunk.text:
                    texts.append(text)
                    if on_text is not None:
                        on_text(text)
        return Answer(
            "".join(texts), trace=self.trace, usage=chunks.usage, finish_reason=chunks.finish_reason
        )


async def chunks_of(
    router: Router, body: CompletionRequest | ChatCompletionRequest | dict[str, Any], policy: str | None
) -> AsyncGenerator[Chunk, None]:
    """The chunks of a request, which begins when the first is asked for; runs on the router's loop."""
    async with router.stream(body, policy=policy) as chunks:
        async for chunk in chunks:
            yield chunk


def make_body(
    prompt: str | Sequence[int] | None,
    messages: Sequence[Mapping[str, Any]] | None,
    chat: bool,
    fields: Mapping[str, Any],
    model: str,
) -> CompletionRequest | ChatCompletionRequest:
    """The OpenAI request of an `ask`; raises `RequestError` for a field that cannot be, `ArgumentError` for no prompt."""
    if (prompt is None) == (messages is None):
        raise ArgumentError("Give either a prompt or messages=[...].")
    if fields.get("n") not in (None, 1):
        raise ArgumentError("ask gives one answer; for n > 1 use the OpenAI endpoint (cluster.url).")
    slip = misspelt(fields, (*KNOWN, *ASK_FIELDS))
    if slip is not None:
        raise ArgumentError(f"ask has no '{slip[0]}'. Did you mean '{slip[1]}'?")
    given = {key: value for key, value in fields.items() if value is not None}
    body: dict[str, Any] = {
        "model": model,
        "max_tokens": DEFAULT_MAX_TOKENS,
        **given,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    is_text = isinstance(prompt, str)
    kind: type[CompletionRequest] | type[ChatCompletionRequest]
    if messages is not None or (chat and is_text):
        kind = ChatCompletionRequest
        body["messages"] = list(messages) if messages is not None else [{"role": "user", "content": prompt}]
    else:
        kind = CompletionRequest
        body["prompt"] = prompt if is_text else list(prompt or ())
    try:
        text = json.dumps(body)
    except (TypeError, ValueError) as error:
        raise ArgumentError(f"A field of the request cannot be sent as JSON: {error}.") from error
    return parse_body(kind, text.encode())
