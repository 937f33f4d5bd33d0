"""A stand-in engine on raw sockets: it does as its script says, faults included, and records what it was told.

Its "model" continues a prompt of n tokens by the words `t{n} t{n+1} ...`, so that a request that is resumed gives the
same text as one that is not, if and only if no token is lost or repeated."""

import asyncio
import json
from collections import deque
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from typing import Any

from mlcrouter_nb.protocol.microserving import encode_kv_metadata


class WordTokenizer:
    """Words are tokens."""

    def __init__(self) -> None:
        self.words: list[str] = []

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        ids = []
        for word in text.split():
            if word not in self.words:
                self.words.append(word)
            ids.append(self.words.index(word))
        return ids

    def decode(self, ids: list[int]) -> str:
        return " ".join(self.words[i] for i in ids)


class PlainTemplate:
    """A chat template: roles and contents in a row."""

    def render(self, messages: list[Any]) -> str:
        return " ".join(f"{m['role']}: {m['content']}" for m in messages) + " assistant:"


@dataclass
class Plan:
    """How one call goes; the default is well."""

    status: int = 200
    body: bytes | None = None  # instead of the right answer
    wait: float = 0.0  # seconds before the answer
    silent: bool = False  # never answers
    close: bool = False  # closes the connection instead of answering
    token_s: float = 0.0
    die_after: int | None = None  # breaks the connection after so many tokens
    silent_after: int | None = None
    preempt_after: int | None = None
    tells_generated: bool = False  # a preemption says which tokens there were, as our engine does
    error_after: int | None = None  # an error event in mid-stream
    end_after: int | None = None  # ends the HTTP answer properly, without finish_reason and [DONE]
    cut: int = 0  # writes the answer's body in pieces of so many bytes
    newline: str = "\n"
    comments: bool = False
    retry_after: str = ""
    token_ids: bool = False
    tokens: int | None = None


@dataclass
class ScriptedEngine:
    """`plans[path]` holds the plans of the next calls; `calls` what came; `reserved` the KV that nobody has freed."""

    name: str = "engine"
    matched: int = 0
    plans: dict[str, deque[Plan]] = field(default_factory=dict)
    calls: list[tuple[str, dict[str, Any]]] = field(default_factory=list)
    headers: list[dict[str, str]] = field(default_factory=list)
    reserved: set[str] = field(default_factory=set)
    transfers: dict[str, "asyncio.Task[None]"] = field(default_factory=dict)
    open: int = 0  # answers under way
    connections: int = 0
    default: Plan = field(default_factory=Plan)
    url: str = ""

    def plan(self, path: str, **how: Any) -> None:
        """The next call of `path` goes so."""
        self.plans.setdefault(path, deque()).append(Plan(**how))

    def told(self, path: str) -> list[dict[str, Any]]:
        """The bodies of the calls of a path."""
        return [body for called, body in self.calls if called == path]

    @asynccontextmanager
    async def serve(self):
        tasks: set[asyncio.Task[None]] = set()
        server = await asyncio.start_server(lambda r, w: self._connection(r, w, tasks), "127.0.0.1", 0)
        self.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        try:
            yield self
        finally:
            server.close()
            for task in list(tasks):
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _connection(self, reader, writer, tasks) -> None:
        task = asyncio.current_task()
        tasks.add(task)
        self.connections += 1
        try:
            while True:
                head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
                method, path, _ = head[0].split(" ")
                headers = {
                    k.lower(): v.strip() for k, _, v in (line.partition(":") for line in head[1:] if line)
                }
                body = await reader.readexactly(int(headers.get("content-length", 0)))
                self.headers.append(headers)
                self.calls.append((path, json.loads(body) if body else {}))
                await self._answer(reader, writer, method, path, json.loads(body) if body else {})
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass
        finally:
            tasks.discard(task)
            self.connections -= 1
            writer.transport.abort()

    async def _answer(self, reader, writer, method: str, path: str, body: dict[str, Any]) -> None:
        plans = self.plans.get(path)
        plan = plans.popleft() if plans else self.default
        if method == "GET":
            models = {"object": "list", "data": [{"id": "their-model", "object": "model"}]}
            return self._json(writer, 200, models)
        user = body.get("user")
        if path == "/microserving/abort":
            self.reserved.discard(user)
            if user in self.transfers:
                self.transfers[user].cancel()
            return self._json(writer, 200, {})
        self.open += 1
        work = asyncio.ensure_future(self._work(writer, path, body, plan))
        if path in ("/microserving/prep_recv", "/microserving/remote_send"):
            self.transfers[user] = work
        left = asyncio.ensure_future(
            reader.read(1)
        )  # the router sends one request at a time: only its leave comes
        try:
            await asyncio.wait({work, left}, return_when=asyncio.FIRST_COMPLETED)
            if work.cancelled():
                self._json(writer, 409, {"error": {"message": "The request was aborted."}})
            elif work.done():
                work.result()
            else:
                raise ConnectionError("left")
        finally:
            self.open -= 1
            self.transfers.pop(user, None)
            for part in (work, left):
                part.cancel()
            await asyncio.gather(work, left, return_exceptions=True)
            if path in ("/microserving/start_generate",):
                self.reserved.discard(user)
        return None

    async def _work(self, writer, path: str, body: dict[str, Any], plan: Plan) -> None:
        if path == "/microserving/prep_recv":
            self.reserved.add(body["user"])
        if plan.wait:
            await asyncio.sleep(plan.wait)
        if plan.silent:
            await asyncio.sleep(3600)
        if plan.close:
            raise ConnectionError("scripted")
        if plan.status != 200 or plan.body is not None:
            if plan.status != 200:
                self.reserved.discard(body.get("user"))
            return self._raw(
                writer, plan.status, plan.body or b'{"error": {"message": "scripted"}}', plan.retry_after
            )
        if path == "/microserving/prep_recv":
            end = body["end"] if body["end"] >= 0 else len(body["prompt"]) + body["end"]
            window = max(end - self.matched, 0)
            segments = [1, self.matched, window] if window else [0]
            answer = {
                "kv_append_metadata": encode_kv_metadata(segments),
                "prefix_matched_length": self.matched,
            }
            return self._json(writer, 200, answer)
        if path == "/microserving/remote_send":
            return self._json(writer, 200, {})
        return await self._stream(writer, path, body, plan)

    async def _stream(self, writer, path: str, body: dict[str, Any], plan: Plan) -> None:
        chat = path.endswith("chat/completions")
        prompt = " ".join(m["content"] for m in body["messages"]) if chat else body["prompt"]
        length = len(prompt.split()) if isinstance(prompt, str) else len(prompt)
        count = plan.tokens or body.get("max_completion_tokens") or body.get("max_tokens") or 8
        id = body["user"] if "microserving" in path else f"cmpl-{self.name}"
        wire = Events(writer, plan, chat, {"id": id, "created": 7, "model": body.get("model") or "m"})
        wire.begin()
        if chat:
            await wire.choice({"role": "assistant", "content": ""})
        for i in range(count):
            if i == plan.die_after:
                raise ConnectionError("scripted")
            if i == plan.silent_after:
                await asyncio.sleep(3600)
            if i == plan.error_after:
                await wire.send({"error": {"message": "scripted", "code": 500}})
                return await wire.end()
            if i == plan.preempt_after:
                told = {"generated_token_ids": [length + j for j in range(i)]} if plan.tells_generated else {}
                await wire.choice({"content": ""} if chat else {"text": ""}, "preempt", **told)
                return await wire.end()
            if i == plan.end_after:
                return await wire.end(done=False)
            await asyncio.sleep(plan.token_s)
            await wire.text(f"t{length + i} ", token_id=length + i)
        await wire.text("", "length")
        usage = {"prompt_tokens": length, "completion_tokens": count, "total_tokens": length + count}
        await wire.send({"choices": [], "usage": usage})
        return await wire.end()

    def _json(self, writer, status: int, value: Any) -> None:
        self._raw(writer, status, json.dumps(value).encode())

    @staticmethod
    def _raw(writer, status: int, body: bytes, retry_after: str = "") -> None:
        head = (
            f"HTTP/1.1 {status} Scripted\r\nContent-Type: application/json\r\nContent-Length: {len(body)}\r\n"
        )
        if retry_after:
            head += f"Retry-After: {retry_after}\r\n"
        writer.write(f"{head}\r\n".encode() + body)


class Events:
    """An answer's event stream, in the dialect of a plan."""

    def __init__(self, writer, plan: Plan, chat: bool, head: dict[str, Any]) -> None:
        self.writer, self.plan, self.chat = writer, plan, chat
        self.head = head | {"object": "chat.completion.chunk" if chat else "text_completion"}

    def begin(self) -> None:
        head = "HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
        self.writer.write(head.encode())

    async def text(self, text: str, reason: str | None = None, token_id: int | None = None) -> None:
        content: dict[str, Any] = {"content": text} if self.chat else {"text": text}
        ids = {"token_ids": [token_id]} if self.plan.token_ids and token_id is not None else {}
        await self.choice(content, reason, **ids)

    async def choice(self, content: dict[str, Any], reason: str | None = None, **more: Any) -> None:
        content = {"delta": content} if self.chat else content
        await self.send(
            {"choices": [{"index": 0, **content, "logprobs": None, "finish_reason": reason, **more}]}
        )

    async def send(self, event: dict[str, Any]) -> None:
        await self._write(json.dumps({**self.head, **event}))

    async def end(self, done: bool = True) -> None:
        if done:
            await self._write("[DONE]")
        self.writer.write(b"0\r\n\r\n")

    async def _write(self, data: str) -> None:
        newline, cut = self.plan.newline, self.plan.cut
        comment = f": ping{newline}" if self.plan.comments else ""
        event = f"{comment}data: {data}{newline * 2}".encode()
        for begin in range(0, len(event), cut or len(event)):
            piece = event[begin : begin + (cut or len(event))]
            self.writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await self.writer.drain()
            if cut:
                await asyncio.sleep(0)
