"""Engines that speak MicroServing and tell a rhyme at a set pace: for tests of the notebook that need no model.

Run as `python paced_engines.py COUNT [TOKENS_PER_S]`; prints one URL per line and ends when its stdin closes."""

import asyncio
import json
import os
import sys
import threading

from aiohttp import web

TEXT = (
    "The tide comes in twice a day because the Moon pulls on the sea as the Earth turns under it, and so the old "
    "fisherman learned to read the water before he read the clock, <b>tied his boat</b> long, and slept. "
)
RHYME = TEXT.split(" ")


class Engine:
    """Counts what runs; `log` keeps the verbs that were called."""

    def __init__(self, pace: float) -> None:
        self.pace = pace
        self.running = 0
        self.aborted = 0
        self.log: list[str] = []
        self.last: dict[str, object] = {}  # the body of the last generation

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/state", self.state)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/v1/chat/completions", self.generate)
        app.router.add_post("/microserving/prep_recv", self.prep_recv)
        app.router.add_post("/microserving/remote_send", self.remote_send)
        app.router.add_post("/microserving/start_generate", self.generate)
        return app

    async def state(self, request: web.Request) -> web.Response:
        return web.json_response(
            {"running": self.running, "aborted": self.aborted, "log": self.log, "last": self.last}
        )

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "paced", "object": "model"}]})

    async def prep_recv(self, request: web.Request) -> web.Response:
        self.log.append("prep_recv")
        return web.json_response({"kv_append_metadata": "opaque", "prefix_matched_length": 0})

    async def remote_send(self, request: web.Request) -> web.Response:
        self.log.append("remote_send")
        await asyncio.sleep(2 / self.pace)
        return web.json_response({})

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = self.last = await request.json()
        self.log.append(request.path.rpartition("/")[2])
        chat = "messages" in body
        count = body.get("max_tokens") or 32
        head = {"id": body.get("user") or "x", "created": 1, "model": "paced"}
        head["object"] = "chat.completion.chunk" if chat else "text_completion"
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        self.running += 1
        try:
            for i in range(count):
                text = RHYME[i % len(RHYME)] + " "
                choice = {"index": 0, "finish_reason": "length" if i == count - 1 else None}
                choice |= {"delta": {"content": text}} if chat else {"text": text, "logprobs": None}
                await answer.write(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")
                await asyncio.sleep(1 / self.pace)
            usage = {"prompt_tokens": 9, "completion_tokens": count, "total_tokens": 9 + count}
            if (body.get("stream_options") or {}).get("include_usage"):
                await answer.write(
                    b"data: " + json.dumps({**head, "choices": [], "usage": usage}).encode() + b"\n\n"
                )
            await answer.write(b"data: [DONE]\n\n")
        except (ConnectionError, asyncio.CancelledError):
            self.aborted += 1
            raise
        finally:
            self.running -= 1
        return answer


async def serve(count: int, pace: float) -> None:
    for _ in range(count):
        runner = web.AppRunner(Engine(pace).app(), handler_cancellation=True)
        await runner.setup()
        site = web.TCPSite(runner, "127.0.0.1", 0)
        await site.start()
        print(f"http://127.0.0.1:{runner.addresses[0][1]}", flush=True)
    await asyncio.Event().wait()


def end_with_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


if __name__ == "__main__":
    threading.Thread(target=end_with_stdin, daemon=True).start()
    asyncio.run(serve(int(sys.argv[1]), float(sys.argv[2]) if len(sys.argv) > 2 else 50.0))
