"""The OpenAI HTTP server in front of the router."""

import asyncio
import errno
import json
from collections.abc import Sequence
from typing import Any

from ..protocol.errors import ArgumentError, EngineError, RequestError
from ..protocol.openai import parse_object
from ..telemetry.prometheus import CONTENT_TYPE, metrics_page
from .access import Access, preflight
from .chunks import Chunk
from .http_server import HttpServer
from .problems import problem
from .reply import HttpRequest, Reply
from .router import Router
from .sinks import AnswerSink

SECRET = ("authorization", "cookie")  # policies and engines never see them
OPEN = ("/health", "/ready")  # probes carry no key
ROUTES = {
    "/v1/completions": "POST", "/v1/chat/completions": "POST", "/v1/models": "GET", "/metrics": "GET",
    "/health": "GET", "/ready": "GET",
}  # fmt: skip


class EventSink:
    """Chunks as server-sent events."""

    def __init__(self, reply: Reply) -> None:
        self._reply = reply

    def write(self, chunk: Chunk) -> bool:
        return self._reply.event(chunk.payload())

    async def ready(self) -> None:
        await self._reply.ready()


class Gateway:
    """Completions and chat completions, models, health and metrics; `api_key` protects all but the probes.

    `origins` are web pages' origins that may use it besides those of this machine ("*": all)."""

    def __init__(self, router: Router, *, api_key: str | None = None, origins: Sequence[str] = ()) -> None:
        self.router = router
        self.url = ""
        self._api_key, self._origins = api_key, origins
        self._access = Access("127.0.0.1", api_key, origins)
        self._server: HttpServer | None = None

    async def start(self, host: str = "127.0.0.1", port: int = 0) -> str:
        """Listen; answers the server's address, to which OpenAI's clients add `/v1`.

        Raises `ArgumentError` where the port is taken or the host is not this machine's."""
        self._access = Access(host, self._api_key, self._origins)
        server = HttpServer(self._answer)
        try:
            port = await server.start(host, port)
        except OSError as error:
            if error.errno == errno.EADDRINUSE:
                why = f"port {port} is taken; choose another, or 0 for a free one."
            else:
                why = f"cannot listen on {host}, port {port}: {error.strerror or error}."
            raise ArgumentError(why[0].upper() + why[1:]) from error
        self._server = server
        self.url = f"http://{f'[{host}]' if ':' in host else host}:{port}"
        return self.url

    async def stop(self, grace: float = 10.0) -> None:
        """No new requests; those that run get `grace` seconds, then they are ended."""
        if self._server is not None:
            await self._server.stop(grace)
            self._server = None

    async def _answer(self, request: HttpRequest, reply: Reply) -> None:
        try:
            reply.headers += self._access.check(request)
            if request.method == "OPTIONS":
                reply.headers += preflight(request)
                return reply.send(204, b"")
            if request.path not in OPEN:
                self._access.check_key(request)
            await self._route(request, reply)
        except Exception as error:
            status, body = problem(error)
            if reply.streaming:
                reply.event(json.dumps(body, ensure_ascii=False).encode())
                reply.event(b"[DONE]")
                reply.end()
            else:
                if status == 401:
                    reply.headers.append(("WWW-Authenticate", "Bearer"))
                if isinstance(error, EngineError) and error.retry_after.isdecimal():
                    reply.headers.append(("Retry-After", error.retry_after))
                reply.send_json(status, body)

    async def _route(self, request: HttpRequest, reply: Reply) -> None:
        path = request.path.rstrip("/") or "/"
        method = "GET" if path.startswith("/v1/models/") else ROUTES.get(path)
        if method is None:
            raise RequestError(f"There is no {path[:200]} here.", status=404, code="not_found")
        if request.method != method and not (request.method == "HEAD" and method == "GET"):
            reply.headers.append(("Allow", f"{method}, OPTIONS"))
            raise RequestError(f"{path} takes {method}, not {request.method}.", status=405)
        if method == "POST":
            await self._complete(request, reply, chat=path == "/v1/chat/completions")
        elif path == "/metrics":
            reply.send(200, metrics_page(self.router.telemetry), CONTENT_TYPE)
        elif path == "/health":
            reply.send_json(200, {"status": "ok"})
        elif path == "/ready":
            ready = not self.router.draining and any(e.available for e in self.router.endpoints)
            reply.send_json(200 if ready else 503, {"status": "ready" if ready else "not ready"})
        else:
            await self._models(path.removeprefix("/v1/models").strip("/"), reply)

    async def _complete(self, http: HttpRequest, reply: Reply, *, chat: bool) -> None:
        if self._server is not None and self._server.stopping:
            raise RequestError("The server is stopping.", status=503, type="server_error", code="stopping")
        body = parse_object(http.body)
        needed, other = ("messages", "prompt") if chat else ("prompt", "messages")
        if needed not in body:
            raise RequestError(f"'{needed}' is missing.", param=needed)
        body.pop(other, None)
        headers = {name: value for name, value in http.headers.items() if name not in SECRET}
        request = self.router.request(body, headers=headers)
        reply.on_leave = request.leave
        if request.body.get("stream"):
            await self.router.run(request, EventSink(reply))
            reply.event(b"[DONE]")
            reply.end()
        else:
            sink = AnswerSink()
            delivery = await self.router.run(request, sink)
            reply.send_json(200, sink.answer(delivery.total_usage()))

    async def _models(self, wanted: str, reply: Reply) -> None:
        models = await self._known_models()
        if not wanted:
            return reply.send_json(200, {"object": "list", "data": models})
        for model in models:
            if model.get("id") == wanted:
                return reply.send_json(200, model)
        known = ", ".join(str(model.get("id")) for model in models) or "none"
        raise RequestError(
            f"The model '{wanted[:200]}' is not served here; there is: {known}.",
            status=404, param="model", code="model_not_found",
        )  # fmt: skip

    async def _known_models(self) -> list[dict[str, Any]]:
        """Our model, or what the engines that the router is attached to say."""
        if self.router.model is not None:
            return [{"id": self.router.model, "object": "model", "created": 0, "owned_by": "mlcrouter_nb"}]
        endpoints = [endpoint for endpoint in self.router.endpoints if endpoint.available]
        answers = await asyncio.gather(*(e.ask("/v1/models") for e in endpoints), return_exceptions=True)
        models: dict[str, dict[str, Any]] = {}
        for answer in answers:
            if isinstance(answer, BaseException):
                if not isinstance(answer, EngineError):
                    raise answer
                continue
            try:
                for model in json.loads(answer[1])["data"]:
                    models.setdefault(model["id"], model)
            except (ValueError, KeyError, TypeError):
                continue
        return list(models.values())
