"""One model behind HTTP: requests become jobs, jobs become text and usage."""

import asyncio
import contextlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

from ..models.chat import ChatTemplate
from ..models.tokenizer import LONG_TEXT, Tokenizer
from ..protocol.errors import RequestError
from ..protocol.openai import ChatCompletionRequest, CompletionRequest
from .jobs import Event, Failed, Generation, Job, Tokens
from .sampler import SamplingParams
from .text import TextStream
from .worker import EngineWorker


@dataclass
class Service:
    """What every handler needs. `world` is `(own rank, number of PEs)` of the NVSHMEM world, None without one;
    `temperature` and `top_p` hold for requests that do not say."""

    worker: EngineWorker[Any]
    model: str
    tokenizer: Tokenizer
    chat: ChatTemplate | None
    context_length: int
    vocab_size: int
    eos_ids: tuple[int, ...]
    world: tuple[int, int] | None = None
    temperature: float = 1.0
    top_p: float = 1.0

    def check_model(self, model: str | None) -> None:
        """Raise 404 for another model."""
        if model is not None and model != self.model:
            raise RequestError(
                f"There is no model {model!r} here; this engine serves {self.model!r}.",
                status=404,
                param="model",
                code="model_not_found",
            )

    async def prompt_of(self, body: CompletionRequest | ChatCompletionRequest) -> list[int]:
        """The request's token ids; raises `RequestError` for what this engine cannot do."""
        self.check_model(body.model)
        _refuse_unsupported(body)
        if isinstance(body, ChatCompletionRequest):
            if self.chat is None:
                raise RequestError(f"The model {self.model!r} has no chat template; use /v1/completions.")
            text = self.chat.render(body.messages)
            return self._checked(await self._encode(text, "messages"), "messages")
        prompt: Any = body.prompt
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], list | str):
            if len(prompt) > 1:
                raise RequestError("This engine takes one prompt per request.", param="prompt")
            prompt = prompt[0]
        ids = await self._encode(prompt, "prompt") if isinstance(prompt, str) else list(prompt)
        return self._checked(ids, "prompt")

    async def _encode(self, text: str, param: str) -> list[int]:
        if len(text) >= LONG_TEXT:
            if (fewest := self.tokenizer.fewest_tokens(text)) >= self.context_length:
                raise self._too_long(f"more than {fewest}", param)
            return await asyncio.to_thread(self.tokenizer.encode, text)
        return self.tokenizer.encode(text)

    def _checked(self, ids: list[int], param: str) -> list[int]:
        if not ids:
            raise RequestError(f"'{param}' is empty; give at least one token.", param=param)
        if len(ids) >= self.context_length:
            raise self._too_long(str(len(ids)), param)
        if max(ids) >= self.vocab_size or min(ids) < 0:
            raise RequestError(f"'{param}' holds a token id outside 0 to {self.vocab_size - 1}.", param=param)
        return ids

    def _too_long(self, tokens: str, param: str) -> RequestError:
        return RequestError(
            f"The prompt has {tokens} tokens, and this engine's context is {self.context_length} tokens, "
            "of which the answer needs at least one; shorten the prompt.",
            param=param,
            code="context_length_exceeded",
        )

    def generation(
        self,
        body: CompletionRequest | ChatCompletionRequest,
        prompt: list[int],
        listener: Callable[[Event], None],
        *,
        window_end: int | None = None,
    ) -> Generation:
        """A job for `body`."""
        params = SamplingParams.from_body(
            body, self.vocab_size, temperature=self.temperature, top_p=self.top_p
        )
        return Generation(
            tokens=prompt,
            target=len(prompt),
            prompt_length=len(prompt),
            listener=listener,
            params=params,
            text=TextStream(self.tokenizer.stream_decoder(), params.stop),
            eos_ids=self.eos_ids,
            max_length=self.context_length,
            window_end=window_end,
        )

    @contextlib.asynccontextmanager
    async def running(self, job: Job) -> AsyncIterator[None]:
        """Submit a job, and abort it on whatever way out."""
        self.worker.submit(job)
        try:
            yield
        finally:
            self.worker.abort(job)


class Inbox:
    """The events of one job, read as they come."""

    def __init__(self) -> None:
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self.put = self._events.put_nowait

    async def get(self) -> Event:
        """The next event; raises the error of a job that failed."""
        event = await self._events.get()
        if isinstance(event, Failed):
            raise event.error
        return event

    async def bursts(self) -> AsyncIterator[list[Tokens]]:
        """Tokens of a generation, all at once that have come meanwhile; ends after a finish reason."""
        while True:
            burst = [await self._events.get()]
            while not self._events.empty():
                burst.append(self._events.get_nowait())
            tokens = [event for event in burst if isinstance(event, Tokens)]
            if tokens:
                yield tokens
            if isinstance(last := burst[-1], Failed):
                raise last.error
            if tokens and tokens[-1].finish_reason:
                return


def usage_of(job: Generation) -> dict[str, Any]:
    """OpenAI's usage, and in `extra` what MLC-LLM reports.

    `cached_tokens` are tokens that this engine's prefix cache held; `prefill_tokens` those of the prompt that it
    computed (the others came from the cache or from a peer)."""
    first, last = job.first_token_at or job.arrival, job.last_token_at or job.arrival
    decoded = max(0, job.completion_tokens - 1)
    decode_s = last - first
    return {
        "prompt_tokens": job.prompt_length,
        "completion_tokens": job.completion_tokens,
        "total_tokens": len(job.tokens),
        "prompt_tokens_details": {"cached_tokens": job.cached or 0},
        "extra": {
            "prompt_tokens": job.prompt_length,
            "completion_tokens": job.completion_tokens,
            "prefill_tokens": job.prefilled,
            "decode_tokens": decoded,
            "jump_forward_tokens": 0,
            "prefill_tokens_per_s": job.prefilled / max(first - job.arrival, 1e-9),
            "decode_tokens_per_s": decoded / decode_s if decode_s > 0 else 0.0,
            "end_to_end_latency_s": last - job.arrival,
            "ttft_s": first - job.arrival,
            "inter_token_latency_s": decode_s / decoded if decoded else 0.0,
        },
    }


def _refuse_unsupported(body: CompletionRequest | ChatCompletionRequest) -> None:
    """Raise 400 for fields whose silent neglect would change the answer."""
    extra = body.model_extra or {}
    asked = {
        "n": body.n not in (None, 1),
        "best_of": extra.get("best_of") not in (None, 1),
        "echo": isinstance(body, CompletionRequest) and body.echo,
        "suffix": bool(extra.get("suffix")),
        "logprobs": body.logprobs not in (None, False),
        "top_logprobs": bool(extra.get("top_logprobs") or getattr(body, "top_logprobs", None)),
        "tools": bool(extra.get("tools") or extra.get("functions")),
        "response_format": (extra.get("response_format") or {"type": "text"}) != {"type": "text"},
    }
    for field, is_asked in asked.items():
        if is_asked:
            raise RequestError(
                f"'{field}' is not supported by this engine; leave it out.", param=field, code="unsupported"
            )
