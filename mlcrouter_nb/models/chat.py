"""Chat templates: messages to the text that the model was trained on."""

import json
from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

import jinja2
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ..protocol.errors import ArgumentError, RequestError
from ..protocol.openai import ChatMessage
from .gguf import read_metadata


class ChatTemplate:
    """A Jinja template as models ship it, run in a sandbox with the names that Hugging Face defines.

    Source: https://huggingface.co/docs/transformers/chat_templating_writing"""

    def __init__(self, source: str, *, bos_token: str = "", eos_token: str = "") -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = lambda value, indent=None: json.dumps(
            value, ensure_ascii=False, indent=indent
        )
        environment.globals.update(
            raise_exception=_refuse, strftime_now=lambda form: datetime.now().strftime(form)
        )
        self._tokens = {"bos_token": bos_token, "eos_token": eos_token}
        self._knows_developer = "developer" in source
        try:
            self._template = environment.from_string(source)
        except jinja2.TemplateError as error:
            raise ArgumentError(f"The model's chat template cannot be read: {error}.") from error

    @classmethod
    def from_file(cls, path: Path | str) -> "ChatTemplate | None":
        """The template of a .gguf file; None where the model has none (it is no chat model)."""
        metadata = read_metadata(path)
        source = metadata.get("tokenizer.chat_template")
        if not source:
            return None
        texts = metadata.get("tokenizer.ggml.tokens", [])

        def text_of(key: str) -> str:
            id = metadata.get(f"tokenizer.ggml.{key}_token_id")
            return texts[id] if id is not None and id < len(texts) else ""

        return cls(source, bos_token=text_of("bos"), eos_token=text_of("eos"))

    def render(self, messages: Sequence[ChatMessage | dict[str, Any]]) -> str:
        """The prompt of a conversation, up to where the assistant's answer begins.

        Raises `RequestError` (400) where a message holds something other than text, or the template refuses."""
        turns = [self._turn(m if isinstance(m, dict) else m.model_dump(exclude_none=True)) for m in messages]
        try:
            return self._template.render(messages=turns, add_generation_prompt=True, **self._tokens)
        except (jinja2.TemplateError, TypeError, ValueError, KeyError) as error:
            raise RequestError(
                f"The model's chat template refuses these messages: {error}.", param="messages"
            ) from error

    def _turn(self, message: dict[str, Any]) -> dict[str, Any]:
        role = message["role"]
        if role == "developer" and not self._knows_developer:
            role = "system"  # OpenAI's newer name for it
        return {**message, "role": role, "content": _text(message.get("content"))}


def _text(content: Any) -> str:
    """OpenAI's content: text, nothing, or a list of parts of which we take text only."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if any(part.get("type") != "text" or not isinstance(part.get("text"), str) for part in content):
        raise RequestError("This model reads text only; drop the other parts of 'content'.", param="messages")
    return "".join(part["text"] for part in content)


def _refuse(message: str) -> None:
    raise jinja2.TemplateError(message)
