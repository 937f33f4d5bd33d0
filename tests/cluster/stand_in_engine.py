"""A program that starts, fails and ends as an engine may; it answers MicroServing with the words of a nursery rhyme.

Run as `python stand_in_engine.py MODE MODEL [engine arguments]`; the mode is
ok, exits (at start), silent (never ready), deaf (to SIGTERM), dies (once ready), preempts (ends each first stream)."""

import argparse
import asyncio
import json
import os
import signal
import sys
import threading
import time

from aiohttp import web

RHYME = ["Humpty", "Dumpty", "sat", "on", "a", "wall", "and", "had", "a", "great", "fall"]
FIRST_WORD = 10_000  # token ids from here on are words of the rhyme


def watch_stdin() -> None:
    while os.read(0, 4096):
        pass
    os._exit(0)


def tell(**event: object) -> None:
    print(json.dumps(event), flush=True)


class Engine:
    """Counts its calls and keeps the ids that prep_recv reserved."""

    def __init__(self, mode: str) -> None:
        self.mode = mode
        self.calls: list[list[object]] = []
        self.reserved: set[str] = set()
        self.streams = 0

    def app(self) -> web.Application:
        app = web.Application()
        app.router.add_get("/calls", self.list_calls)
        app.router.add_get("/metrics", self.metrics)
        app.router.add_get("/v1/models", self.models)
        app.router.add_post("/v1/completions", self.generate)
        app.router.add_post("/microserving/prep_recv", self.prep_recv)
        app.router.add_post("/microserving/remote_send", self.remote_send)
        app.router.add_post("/microserving/start_generate", self.generate)
        app.router.add_post("/microserving/abort", self.abort)
        return app

    async def list_calls(self, request: web.Request) -> web.Response:
        return web.json_response(self.calls)

    async def metrics(self, request: web.Request) -> web.Response:
        used = len(self.reserved)
        return web.Response(
            text="# TYPE mlcrouter_engine_kv_pages_total gauge\n"
            f"mlcrouter_engine_kv_pages_total 100\nmlcrouter_engine_kv_pages_free {100 - used}\n"
            f"mlcrouter_engine_kv_pages_cached 0\nmlcrouter_engine_prefill_tokens_total {len(self.calls)}\n"
            'mlcrouter_engine_decode_tokens_total 0\nmlcrouter_engine_put_bytes_total{peer="1"} 5\n'
        )

    async def models(self, request: web.Request) -> web.Response:
        return web.json_response({"object": "list", "data": [{"id": "stand-in", "object": "model"}]})

    async def prep_recv(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(["prep_recv", body["user"], body["end"]])
        self.reserved.add(body["user"])
        return web.json_response({"kv_append_metadata": "opaque", "prefix_matched_length": 0})

    async def remote_send(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.calls.append(["remote_send", body["user"], body["begin"], body["end"], body["recv_rank"]])
        return web.json_response({})

    async def abort(self, request: web.Request) -> web.Response:
        body = await request.json()
        self.reserved.discard(body["user"])
        return web.json_response({})

    def words(self, prompt: object, count: int) -> list[str]:
        """The next words of the rhyme after those that the prompt's token ids already name."""
        done = sum(id >= FIRST_WORD for id in prompt) if isinstance(prompt, list) else 0
        return RHYME[done : done + count]

    async def generate(self, request: web.Request) -> web.StreamResponse:
        body = await request.json()
        self.calls.append([request.path.rpartition("/")[2], body.get("user"), body.get("begin")])
        self.reserved.discard(body.get("user") or "")
        self.streams += 1
        preempt = self.mode == "preempts" and self.streams == 1
        words = self.words(body["prompt"], 2 if preempt else body.get("max_tokens") or 5)
        reason = "preempt" if preempt else "length"
        usage = {"prompt_tokens": 4, "completion_tokens": len(words), "total_tokens": 4 + len(words)}
        head = {"id": body.get("user") or "x", "object": "text_completion", "created": 1, "model": "stand-in"}
        if not body.get("stream"):
            choice = {
                "index": 0,
                "text": "".join(word + " " for word in words),
                "finish_reason": reason,
                "logprobs": None,
            }
            return web.json_response({**head, "choices": [choice], "usage": usage})
        answer = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
        await answer.prepare(request)
        for i, word in enumerate(words):
            last = i == len(words) - 1
            choice = {
                "index": 0,
                "text": word + " ",
                "token_ids": [FIRST_WORD + RHYME.index(word)],
                "finish_reason": reason if last else None,
                "logprobs": None,
            }
            await answer.write(b"data: " + json.dumps({**head, "choices": [choice]}).encode() + b"\n\n")
            await asyncio.sleep(0.02)
        if (body.get("stream_options") or {}).get("include_usage"):
            await answer.write(
                b"data: " + json.dumps({**head, "choices": [], "usage": usage}).encode() + b"\n\n"
            )
        await answer.write(b"data: [DONE]\n\n")
        return answer


async def serve(mode: str, host: str, port: int) -> None:
    stop = asyncio.Event()
    loop = asyncio.get_running_loop()
    if mode != "deaf":
        loop.add_signal_handler(signal.SIGTERM, stop.set)
    runner = web.AppRunner(Engine(mode).app(), shutdown_timeout=0.5)
    await runner.setup()
    site = web.TCPSite(runner, host, port)
    await site.start()
    port = site._server.sockets[0].getsockname()[1]
    url = f"http://{host}:{port}"
    print("not JSON: some library says hello", flush=True)
    tell(event="ready", url=url, port=port, kernels="none", kv_pages=100, page_size=16, context_length=512)
    print("ready", file=sys.stderr, flush=True)
    if mode == "dies":
        await asyncio.sleep(0.5)
        print("out of cheese", file=sys.stderr, flush=True)
        os._exit(7)
    await stop.wait()
    await runner.cleanup()


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("mode")
    parser.add_argument("model")
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--port", type=int, default=0)
    parser.add_argument("--exit-on-stdin-eof", action="store_true")
    arguments, _ = parser.parse_known_args()
    if arguments.exit_on_stdin_eof:
        threading.Thread(target=watch_stdin, daemon=True).start()
    if arguments.mode == "deaf":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
    tell(event="progress", stage="building kernels", done=3, total=10)
    if arguments.mode == "exits":
        print("no such instruction: vpdpbusd", file=sys.stderr)
        sys.exit(3)
    if arguments.mode == "silent":
        time.sleep(600)
    asyncio.run(serve(arguments.mode, arguments.host, arguments.port))


if __name__ == "__main__":
    main()
