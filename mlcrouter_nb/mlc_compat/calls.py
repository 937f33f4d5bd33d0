"""The three MicroServing calls over the caller's own aiohttp session."""

import json
from collections.abc import AsyncGenerator, Mapping
from typing import Any

import aiohttp
from pydantic import BaseModel, ValidationError

from ..protocol.errors import EngineError
from ..protocol.sse import DONE, Splitter
from .openai_api_protocol import CompletionResponse


async def post_json(
    session: aiohttp.ClientSession, url: str, request: BaseModel, headers: Mapping[str, str]
) -> dict[str, Any]:
    """POST a request and return the JSON object that comes back; raises `EngineError` for anything else."""
    try:
        async with session.post(url, json=payload_of(request), headers=headers) as response:
            await _check(response, url)
            answer = json.loads(await response.read())
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _failed(url, error) from error
    except ValueError as error:
        raise EngineError(
            f"{url} answered with something that is no JSON.", engine=url, status=502
        ) from error
    if not isinstance(answer, dict):
        raise EngineError(f"{url} answered with JSON that is no object.", engine=url, status=502)
    return answer


async def post_stream(
    session: aiohttp.ClientSession, url: str, request: BaseModel, headers: Mapping[str, str]
) -> AsyncGenerator[CompletionResponse, None]:
    """POST a request and yield each completion that comes back: many if it asks for a stream, else one.

    Raises `EngineError` where the engine refuses, reports an error in mid-stream, or breaks off."""
    try:
        async with session.post(url, json=payload_of(request), headers=headers) as response:
            await _check(response, url)
            if "text/event-stream" not in response.headers.get("Content-Type", ""):
                yield _completion(await response.read(), url)
                return
            events = Splitter()
            async for data in response.content.iter_any():
                for event in events.feed(data):
                    if event == DONE:
                        return
                    yield _completion(event, url)
    except (aiohttp.ClientError, TimeoutError) as error:
        raise _failed(url, error) from error


def payload_of(request: BaseModel) -> dict[str, Any]:
    """A request's body; the model's name stays out of it, for these engines serve one, whatever the client calls it."""
    return {**request.model_dump(), "model": None}


def _completion(data: bytes, url: str) -> CompletionResponse:
    try:
        event = json.loads(data)
        if isinstance(event, dict) and "error" in event:
            error = event["error"]
            message = error.get("message") if isinstance(error, dict) else error
            raise EngineError(f"{url} reported: {message}", engine=url, status=500)
        return CompletionResponse.model_validate(event)
    except (ValueError, ValidationError) as error:
        start = data[:80].decode(errors="replace")
        raise EngineError(
            f"{url} sent something that is no completion: {start!r}.", engine=url, status=502
        ) from error


async def _check(response: aiohttp.ClientResponse, url: str) -> None:
    if response.status != 200:
        text = (await response.read()).decode(errors="replace")
        raise EngineError(
            f"{url} answered {response.status}: {text[:500]}", engine=url, status=response.status
        )


def _failed(url: str, error: BaseException) -> EngineError:
    return EngineError(f"The call to {url} failed: {error or type(error).__name__}.", engine=url)
