"""A request's prompt as text and as token ids, made only when somebody looks."""

from collections.abc import Callable, Sequence
from typing import Any, Protocol

from ..protocol.errors import RequestError
from ..protocol.openai import ChatMessage

LONG_TEXT = 20_000  # characters, from which encoding would hold up the router's loop


class Encoder(Protocol):
    """What the router needs of a tokenizer: `models.tokenizer.Tokenizer` has it."""

    def encode(self, text: str, *, special: bool = True) -> list[int]: ...
    def decode(self, ids: Sequence[int]) -> str: ...


class Template(Protocol):
    """What the router needs of a chat template: `models.chat.ChatTemplate` has it."""

    def render(self, messages: Sequence[ChatMessage | dict[str, Any]]) -> str: ...


class Prompts:
    """The model's tokenizer (read at its first use) and chat template, either of which may be missing.

    `context_length` is the model's, in tokens; None where nobody knows it."""

    def __init__(
        self, tokenizer: Callable[[], Encoder] | None, chat: Template | None, context_length: int | None
    ) -> None:
        self._make_tokenizer = tokenizer
        self._tokenizer: Encoder | None = None
        self.chat = chat
        self.context_length = context_length

    @property
    def tokenizer(self) -> Encoder | None:
        """None where the router was given none."""
        if self._tokenizer is None and self._make_tokenizer is not None:
            self._tokenizer = self._make_tokenizer()
        return self._tokenizer

    def text(self, body: dict[str, Any]) -> str:
        """The prompt's text: rendered messages, the text itself, or decoded ids."""
        prompt = self._source(body)
        if isinstance(prompt, str):
            return prompt
        return self._needed_tokenizer().decode(prompt)

    def ids(self, body: dict[str, Any]) -> list[int]:
        """The prompt's token ids; raises `RequestError` where it is empty, longer than the context, or several."""
        prompt = self._source(body)
        if isinstance(prompt, str) and len(prompt) >= LONG_TEXT:
            fewest = getattr(self._needed_tokenizer(), "fewest_tokens", lambda _: 0)(prompt)
            self._check_length(fewest, "more than ", body)
        ids = self._needed_tokenizer().encode(prompt) if isinstance(prompt, str) else prompt
        if not ids:
            raise RequestError("The prompt is empty; send at least one token.", param="prompt")
        self._check_length(len(ids), "", body)
        return ids

    def is_long(self, body: dict[str, Any]) -> bool:
        """Whether counting the prompt's tokens takes so long that it is done in a thread."""
        if self._make_tokenizer is None:
            return False
        prompt = body.get("messages", body.get("prompt"))
        texts = prompt if isinstance(prompt, list) else [prompt]
        return sum(len(str(text)) for text in texts if not isinstance(text, int)) >= LONG_TEXT

    def _check_length(self, tokens: int, about: str, body: dict[str, Any]) -> None:
        if self.context_length is not None and tokens >= self.context_length:
            raise RequestError(
                f"The prompt has {about}{tokens} tokens; the model's context is {self.context_length} tokens, "
                "of which at least one is left for the answer.",
                param="messages" if "messages" in body else "prompt",
                code="context_length_exceeded",
            )

    def _source(self, body: dict[str, Any]) -> str | list[int]:
        if "messages" in body:
            if self.chat is None:
                raise RequestError(
                    "This policy needs the chat as one prompt, and the router has no chat template for this model; "
                    "send a completion, or choose a one-engine policy such as round-robin.",
                    status=501, type="server_error", code="no_chat_template",
                )  # fmt: skip
            if body.get("tools"):
                raise RequestError("Tools are not supported by a policy that disaggregates.", param="tools")
            return self.chat.render(body["messages"])
        prompt = body["prompt"]
        if isinstance(prompt, list) and prompt and not isinstance(prompt[0], int):
            if len(prompt) > 1:
                raise RequestError(
                    "This policy takes one prompt per request; send the prompts one by one.", param="prompt"
                )
            prompt = prompt[0]
        return prompt  # type: ignore[no-any-return]

    def _needed_tokenizer(self) -> Encoder:
        tokenizer = self.tokenizer
        if tokenizer is None:
            raise RequestError(
                "This policy looks at the prompt's tokens, and the router has no tokenizer for the engines that it is "
                "attached to; give one with --tokenizer PATH (a tokenizer.json or a .gguf).",
                status=501, type="server_error", code="no_tokenizer",
            )  # fmt: skip
        return tokenizer
