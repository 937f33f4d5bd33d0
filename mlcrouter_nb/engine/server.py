"""The engine's HTTP server: OpenAI's endpoints, health and metrics. The MicroServing calls are in `microserving`."""

import logging
import time
from collections.abc import Awaitable, Callable

from aiohttp import web

from ..protocol.errors import MlcRouterError, RequestError, error_body
from ..protocol.openai import ChatCompletionRequest, CompletionRequest, parse_body
from .jobs import Generation, Tokens
from .metrics import CONTENT_TYPE, EngineMetrics
from .microserving import add_microserving
from .responses import DONE, ChatShape, CompletionShape, Shape, event
from .service import Inbox, Service, usage_of

MAX_BODY_BYTES = 64 << 20
_log = logging.getLogger(__name__)
Handler = Callable[[web.Request], Awaitable[web.StreamResponse]]


def make_app(service: Service, metrics: EngineMetrics) -> web.Application:
    """The application; run it with `handler_cancellation=True`, so that a client's leave ends its request."""
    app = web.Application(client_max_size=MAX_BODY_BYTES, middlewares=[errors_in_openais_shape])
    started = int(time.time())

    async def models(request: web.Request) -> web.Response:
        model = {
            "id": service.model,
            "object": "model",
            "created": started,
            "owned_by": "mlcrouter_nb",
            "max_model_len": service.context_length,
        }
        return web.json_response({"object": "list", "data": [model]})

    async def health(request: web.Request) -> web.Response:
        trouble = service.worker.trouble
        return web.json_response(
            {"status": "ok"} if trouble is None else error_body(trouble, type="server_error"),
            status=200 if trouble is None else 503,
        )

    async def show_metrics(request: web.Request) -> web.Response:
        return web.Response(body=metrics.text(), headers={"Content-Type": CONTENT_TYPE})

    async def completions(request: web.Request) -> web.StreamResponse:
        body = parse_body(CompletionRequest, await request.read())
        return await generate(request, service, body, CompletionShape(service.model))

    async def chat_completions(request: web.Request) -> web.StreamResponse:
        body = parse_body(ChatCompletionRequest, await request.read())
        return await generate(request, service, body, ChatShape(service.model))

    app.router.add_get("/v1/models", models)
    app.router.add_get("/health", health)
    app.router.add_get("/metrics", show_metrics)
    app.router.add_post("/v1/completions", completions)
    app.router.add_post("/v1/chat/completions", chat_completions)
    add_microserving(app, service, respond)
    return app


async def generate(
    request: web.Request, service: Service, body: CompletionRequest | ChatCompletionRequest, shape: Shape
) -> web.StreamResponse:
    """Run a completion on this engine alone."""
    inbox = Inbox()
    job = service.generation(body, await service.prompt_of(body), inbox.put)
    async with service.running(job):
        return await respond(request, job, inbox, body, shape)


async def respond(
    request: web.Request,
    job: Generation,
    inbox: Inbox,
    body: CompletionRequest | ChatCompletionRequest,
    shape: Shape,
) -> web.StreamResponse:
    """Answer with what a running generation gives, as a stream or whole."""
    shows_ids = bool((body.model_extra or {}).get("return_token_ids"))
    if body.stream:
        return await _stream(request, job, inbox, body.include_usage, shape, shows_ids)
    tokens = [token async for burst in inbox.bursts() for token in burst]
    text = "".join(token.text for token in tokens)
    ids = [id for token in tokens for id in token.ids] if shows_ids else None
    return web.json_response(shape.whole(text, tokens[-1].finish_reason, ids, usage_of(job)))


async def _stream(
    request: web.Request, job: Generation, inbox: Inbox, include_usage: bool, shape: Shape, shows_ids: bool
) -> web.StreamResponse:
    headers = {"Content-Type": "text/event-stream; charset=utf-8", "Cache-Control": "no-cache"}
    response = web.StreamResponse(headers=headers)
    opened = False
    given: list[int] = []
    try:
        async for burst in inbox.bursts():
            given += [id for token in burst for id in token.ids]
            data = b"".join(_chunk(shape, token, shows_ids, given) for token in burst)
            if not opened and data:  # an error before the first token is an answer with a status of its own
                opened = True
                await response.prepare(request)
                data = b"".join(map(event, shape.opening())) + data
            if data:
                await response.write(data)
    except MlcRouterError as error:
        if not opened:
            raise
        await response.write(event(_body_of(error)) + DONE)
    else:
        await response.write((event(shape.usage_chunk(usage_of(job))) if include_usage else b"") + DONE)
    await response.write_eof()
    return response


def _chunk(shape: Shape, token: Tokens, shows_ids: bool, given: list[int]) -> bytes:
    if not (token.text or token.finish_reason or (shows_ids and token.ids)):
        return b""  # a special token: it has no text
    chunk = shape.chunk(token.text, token.finish_reason, token.ids if shows_ids else None)
    if token.finish_reason == "preempt":  # so that it goes on as it began: text may be cut into other tokens
        chunk["choices"][0]["generated_token_ids"] = given
    return event(chunk)


@web.middleware
async def errors_in_openais_shape(request: web.Request, handler: Handler) -> web.StreamResponse:
    """Every error is JSON in OpenAI's shape; none shows a traceback."""
    try:
        return await handler(request)
    except MlcRouterError as error:
        status = error.status if isinstance(error, RequestError) else 500
        return web.json_response(_body_of(error), status=status)
    except web.HTTPException as error:
        return web.json_response(error_body(f"{request.path}: {error.reason}."), status=error.status)
    except TimeoutError:
        return web.json_response(error_body("The engine is too busy.", type="server_error"), status=503)
    except ConnectionError:
        raise  # the client has left: nobody reads an answer
    except Exception:
        _log.exception("%s failed", request.path)
        return web.json_response(
            error_body("The engine failed; see its log.", type="server_error"), status=500
        )


def _body_of(error: MlcRouterError) -> dict[str, object]:
    return error.body() if isinstance(error, RequestError) else error_body(str(error), type="server_error")
