"""Running a request again after a preemption, so that the client gets no token twice and loses none."""

from typing import Any

from ..protocol.errors import EngineError
from ..router.prompts import Encoder
from .openai_api_protocol import CompletionResponse, CompletionResponseChoice

MOST_RUNS = 16


class Resumption:
    """What one request's client has got so far, and the request that gets the rest.

    `request` is ours or MLC-LLM's; its prompt is token ids. `id` is what engines know the current run by."""

    def __init__(self, request: Any, request_id: str, tokenizer: Encoder) -> None:
        self.request, self.id = request, request_id
        self._first, self._first_id = request, request_id
        self._tokenizer = tokenizer
        self._texts: list[str] = []
        self._ids: list[int] | None = []
        self._sent = 0  # tokens, by earlier runs
        self._runs = 1

    def pass_on(self, response: CompletionResponse) -> CompletionResponse:
        """Note what a response brings; its id and its usage become those of the whole request."""
        for choice in response.choices:
            if choice.text:
                self._texts.append(choice.text)
                ids = (choice.model_extra or {}).get("token_ids")
                self._ids = None if ids is None or self._ids is None else [*self._ids, *ids]
        response.id = self._first_id
        usage = response.usage
        if usage is not None and self._sent:
            usage.prompt_tokens -= self._sent
            usage.completion_tokens += self._sent
        return response

    def again(self) -> bool:
        """Make the request that gets the rest; False where there is none.

        Raises `EngineError` where what was sent cannot be continued, or after too many runs."""
        if self._runs == MOST_RUNS:
            raise EngineError(f"The request was run {MOST_RUNS} times and did not end.", status=503)
        self.id = f"{self._first_id}-{self._runs}"
        self._runs += 1
        if not self._texts:
            return True
        if (self._first.n or 1) > 1 or self._first.logprobs or self._first.echo:
            raise EngineError(
                "A preempted request with n > 1, logprobs or echo cannot be resumed.", status=503
            )
        ids = (
            self._ids
            if self._ids is not None
            else self._tokenizer.encode("".join(self._texts), special=False)
        )
        self._sent = len(ids)
        update: dict[str, Any] = {"prompt": [*self._first.prompt, *ids]}
        if self._first.max_tokens is not None:
            update["max_tokens"] = self._first.max_tokens - len(ids)
            if update["max_tokens"] <= 0:
                return False
        self.request = self._first.model_copy(update=update)
        return True

    def closing(self) -> CompletionResponse:
        """The end of an answer whose last token was sent before the preemption."""
        return CompletionResponse(
            id=self._first_id, choices=[CompletionResponseChoice(finish_reason="length")]
        )
