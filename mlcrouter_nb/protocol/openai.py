"""OpenAI's completion and chat completion requests.

Fields that we do not know are kept and travel on (`model_extra`).
Source: https://platform.openai.com/docs/api-reference/completions and .../chat"""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from .errors import RequestError

TokenIds = list[Annotated[int, Field(ge=0)]]


class StreamOptions(BaseModel):
    """What a stream carries besides text."""

    model_config = ConfigDict(extra="allow")
    include_usage: bool = False


class _Sampling(BaseModel):
    """The fields that completions and chat completions share."""

    model_config = ConfigDict(extra="allow", protected_namespaces=())

    model: str | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1)] | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    n: Annotated[int, Field(ge=1, le=128)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    logit_bias: dict[str, float] | None = None
    ignore_eos: bool = False
    stream: bool = False
    stream_options: StreamOptions | None = None
    user: str | None = None

    @property
    def stop_strings(self) -> list[str]:
        """`stop` as a list; empty strings stop nothing."""
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return [text for text in stop if text]

    @property
    def include_usage(self) -> bool:
        """Whether the stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage


class CompletionRequest(_Sampling):
    """The body of `POST /v1/completions`; `prompt` is text, token ids, or a list of either."""

    prompt: str | TokenIds | list[str] | list[TokenIds]
    echo: bool = False
    logprobs: int | bool | None = None


class ChatMessage(BaseModel):
    """One turn of a chat; `content` is text or OpenAI's list of parts."""

    model_config = ConfigDict(extra="allow")
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[dict[str, Any]] | None = None


class ChatCompletionRequest(_Sampling):
    """The body of `POST /v1/chat/completions`."""

    messages: Annotated[list[ChatMessage], Field(min_length=1)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None


# Fields of OpenAI's and of engines that we do not look at, but know.
TRAVELLING = frozenset(
    {"tools", "tool_choice", "response_format", "repetition_penalty", "min_p", "min_tokens"}
)
KNOWN = TRAVELLING.union(CompletionRequest.model_fields, ChatCompletionRequest.model_fields)


def misspelt(fields: Iterable[str], known: Iterable[str] = KNOWN) -> tuple[str, str] | None:
    """The first field that is unknown and close to a known one, with that one; others may be an engine's own."""
    for field in fields:
        close = [] if field in known else get_close_matches(field.lower(), known, 1, 0.85)
        if close:
            return field, close[0]
    return None


Body = TypeVar("Body", bound=BaseModel)


def parse_body(kind: type[Body], body: bytes) -> Body:
    """Validate a JSON body.

    Raises `RequestError` (400) whose message names the field and what is wrong with it."""
    try:
        return kind.model_validate_json(body)
    except ValidationError as error:
        raise _refusal(error) from error


def parse_object(body: bytes) -> dict[str, Any]:
    """A JSON object, whatever it holds; raises `RequestError` (400) where it is none, or text in it is no Unicode."""
    try:
        value = json.loads(body)
        if b"\\u" in body:
            json.dumps(value, ensure_ascii=False).encode()  # a lone surrogate cannot be sent on
    except RecursionError as error:
        raise RequestError("The body is no JSON that can be read: it is nested too deeply.") from error
    except ValueError as error:
        raise RequestError(f"The body is no JSON: {error}.") from error
    if not isinstance(value, dict):
        raise RequestError("The body must be a JSON object.")
    return value


def check_body(kind: type[Body], body: dict[str, Any]) -> Body:
    """Validate a body that is a dict already; raises `RequestError` as `parse_body` does."""
    try:
        return kind.model_validate(body)
    except ValidationError as error:
        raise _refusal(error) from error


def _refusal(error: ValidationError) -> RequestError:
    first = error.errors()[0]
    param = str(first["loc"][0]) if first["loc"] else None
    where = f"'{param}': " if param else "The body: "
    return RequestError(f"{where}{first['msg']}.", param=param)
