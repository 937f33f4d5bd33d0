"""OpenAI's types under the names and with the fields that `mlc_llm.protocol.openai_api_protocol` gives them."""

from typing import Any

from pydantic import BaseModel, ConfigDict

from ..protocol import openai
from ..protocol.openai import ChatCompletionRequest, ChatMessage, StreamOptions

ChatCompletionMessage = ChatMessage

__all__ = [
    "ChatCompletionMessage",
    "ChatCompletionRequest",
    "CompletionRequest",
    "CompletionResponse",
    "CompletionResponseChoice",
    "CompletionUsage",
    "DebugConfig",
    "StreamOptions",
]


class DebugConfig(BaseModel):
    """MLC's debug options; its engines want one, though it be empty."""

    model_config = ConfigDict(extra="allow")
    ignore_eos: bool = False


class CompletionRequest(openai.CompletionRequest):
    """A completion request; the router turns `prompt` into token ids and sets `debug_config`."""

    n: int | None = 1
    debug_config: DebugConfig | None = None


class CompletionUsage(BaseModel):
    """Token counts; `extra` holds what MLC's engines measured."""

    model_config = ConfigDict(extra="allow")
    prompt_tokens: int = 0
    completion_tokens: int = 0
    total_tokens: int = 0
    extra: dict[str, Any] | None = None


class CompletionResponseChoice(BaseModel):
    """The text that a chunk adds to one choice; `finish_reason` is "preempt" when the engine gave the request up."""

    model_config = ConfigDict(extra="allow")
    index: int = 0
    text: str = ""
    finish_reason: str | None = None
    logprobs: Any = None


class CompletionResponse(BaseModel):
    """A completion, or one chunk of its stream; the usage chunk has no choices."""

    model_config = ConfigDict(extra="allow")
    id: str = ""
    choices: list[CompletionResponseChoice]
    created: int = 0
    model: str | None = None
    object: str = "text_completion"
    usage: CompletionUsage | None = None
