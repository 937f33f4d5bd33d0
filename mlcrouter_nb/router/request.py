"""A request on its way through a policy."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from typing import Any

from ..protocol.errors import RequestError
from ..protocol.microserving import kv_window_end
from ..protocol.openai import ChatCompletionRequest, CompletionRequest
from ..telemetry import RequestTrace
from .attributes import REQUEST
from .guard import Guard
from .policy import Policy
from .prompts import Prompts

FIELDS = frozenset(CompletionRequest.model_fields) | frozenset(ChatCompletionRequest.model_fields)
CHAT_ONLY = frozenset(
    ("messages", "max_completion_tokens", "tools", "tool_choice", "parallel_tool_calls", "top_logprobs")
)


class Request:
    """One completion or chat completion, as policies see it.

    `id` is the router's own; `headers` have lower-case names; `arrival` is Unix time; `chat` says which of the two it
    is. OpenAI's other fields are attributes too (`request.temperature`), None where the client sent none."""

    def __init__(
        self, id: str, body: dict[str, Any], headers: Mapping[str, str], policy: Policy, prompts: Prompts
    ) -> None:
        self.id = id
        self.body = body
        self.headers = headers
        self.chat = "messages" in body
        self.policy, self.values = policy, policy.values
        self.trace = RequestTrace(id, policy.name)
        self.guard = Guard(id)
        self.progress = 0.0  # monotonic time of the last sign of life
        self.attempt = 0
        self.left = False
        self._prompts = prompts
        self._ids: list[int] | None = None
        self._problem: RequestError | None = None  # that the prompt has, for whoever looks at it
        self._sent_text = ""  # by earlier attempts
        self._sent_ids: list[int] | None = None
        self._sent_tokens = 0

    # What policies look at

    @property
    def prompt(self) -> list[int]:
        """The prompt's token ids; a chat is rendered with the model's template. Computed when first looked at.

        After a preemption, what was already sent is part of it."""
        if self._problem is not None:
            raise self._problem
        if self._ids is None:
            ids = self._prompts.ids(self.body)
            if self._sent_ids:
                ids = [*ids, *self._sent_ids]
            self._ids = ids
            if not self._sent_tokens:
                self.trace.prompt_tokens = len(ids)
        return self._ids

    @property
    def text(self) -> str:
        """The prompt's text, and what was already sent."""
        return self._prompts.text(self.body) + self._sent_text

    @property
    def max_tokens(self) -> int | None:
        """Tokens that may still be generated; None: up to the end of the context."""
        limit = self.body.get("max_completion_tokens") or self.body.get("max_tokens")
        return None if limit is None else int(limit) - self._sent_tokens

    @property
    def arrival(self) -> float:
        """When it came, Unix time."""
        return self.trace.arrival

    @property
    def session(self) -> str | None:
        """What the client says its session is: the header `x-session-id`, else the field `user`."""
        return self.headers.get("x-session-id") or self.body.get("user")

    def kv_window_end(self, pd_balance_factor: float) -> int:
        """Where the prefill engine's part ends: -1 (all but the last token) for 0, else `int((1 - f) * len(prompt))`."""
        return kv_window_end(len(self.prompt), pd_balance_factor)

    def __getattr__(self, name: str) -> Any:
        body = self.__dict__.get("body", {})
        if name in body:
            return body[name]
        if name in FIELDS:
            return None
        raise AttributeError(f"a request has no '{name}'.", name=name, obj=self)

    def __dir__(self) -> list[str]:
        """What policies look at, without the router's own means."""
        return sorted({*REQUEST, *self.body})

    # What the router does with it

    async def prepare(self) -> None:
        """Count a long prompt's tokens in a thread, so that no policy holds up everybody's streams by looking at it."""
        if not self._prompts.is_long(self.body):
            return
        try:
            self._ids = await asyncio.to_thread(self._prompts.ids, self.body)
        except RequestError as error:
            self._problem = error
        else:
            self.trace.prompt_tokens = len(self._ids)

    @property
    def known_length(self) -> int:
        """Prompt tokens if they are counted, else an estimate that looks at no tokenizer: four characters each."""
        if self._ids is not None:
            return len(self._ids)
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and prompt and isinstance(prompt[0], int):
            return len(prompt)
        size = (
            len(prompt)
            if isinstance(prompt, str)
            else sum(len(str(m)) for m in self.body.get("messages", ()))
        )
        return size // 4 + 1

    @property
    def include_usage(self) -> bool:
        """Whether the client asked for a usage chunk."""
        return bool((self.body.get("stream_options") or {}).get("include_usage"))

    def microserving_fields(self, kind: str) -> dict[str, Any]:
        """The body that the three MicroServing calls share."""
        if self.chat and self.body.get("logprobs"):
            raise RequestError(
                "logprobs of a chat are not supported by a policy that disaggregates.", param="logprobs"
            )
        fields = self._fields(self.prompt)
        fields["debug_config"] = (
            self.body.get("debug_config") or {}
        )  # MLC's engine wants one that is not null
        return fields

    def complete_fields(self) -> tuple[str, dict[str, Any]]:
        """Path and body of the one-engine call; nothing but the id and the way of streaming is ours."""
        if self._sent_tokens:
            prompt: str | list[int] = self.prompt if self._sent_ids is not None else self.text
            return "/v1/completions", self._fields(prompt)
        fields = self.body | self._ours()
        return ("/v1/chat/completions" if self.chat else "/v1/completions"), fields

    def why_not_continuable(self, ids_known: bool) -> str:
        """Why no prompt can be made of the request's and what was sent; "" if it can."""
        if self.chat and self._prompts.chat is None:
            return "the router has no chat template for this model"
        prompt = self.body.get("prompt")
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int) and len(prompt) > 1:
            return "it has several prompts"
        if isinstance(prompt, list) and not ids_known and self._prompts.tokenizer is None:
            return "a prompt of token ids needs a tokenizer for that (--tokenizer PATH)"
        return ""

    def resume(self, text: str, ids: list[int] | None, tokens: int) -> None:
        """Go on after what the client has got: its text, its token ids if they are known, and their number."""
        self._sent_text, self._sent_ids, self._sent_tokens = text, ids, tokens
        self._ids = None

    def next_attempt(self) -> None:
        """A new guard and a new id for engines; the old guard has been released."""
        self.attempt += 1
        self.trace.resumed = self.attempt
        self.guard = Guard(f"{self.id}-{self.attempt}")
        if self.left:
            self.guard.release()

    def leave(self) -> None:
        """The client is gone: give everything back now, whatever the policy does with its cancellation."""
        self.left = True
        self.guard.release()

    def _fields(self, prompt: str | list[int]) -> dict[str, Any]:
        fields = {key: value for key, value in self.body.items() if key not in CHAT_ONLY}
        if self.chat:
            fields.pop("logprobs", None)
        if self.max_tokens is not None:
            fields["max_tokens"] = self.max_tokens
        if self._sent_tokens:
            fields["echo"] = False
        return fields | {"prompt": prompt} | self._ours()

    def _ours(self) -> dict[str, Any]:
        options = (self.body.get("stream_options") or {}) | {"include_usage": True}
        return {"user": self.guard.user, "stream": True, "stream_options": options}

    def __repr__(self) -> str:
        return f"<request {self.id}>"
