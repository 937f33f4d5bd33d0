"""A cluster as people hold it: started, asked, steered, looked at and stopped from any thread and any event loop."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import Any, Self

from ..protocol.errors import ArgumentError, MlcRouterError
from ..router.chunks import Chunk
from ..router.policy import Policy, PolicyBook
from ..router.router import Router
from ..telemetry import Snapshot, Telemetry
from . import current
from .ask import Answer, Submission, chunks_of, make_body
from .bridge import in_thread, iterate
from .launchers.base import Engine
from .loop_thread import LoopThread, NoAnswer
from .options import DEFAULT_MODEL, check_policy, make_options
from .parameters import LiveParameters
from .service import Service
from .tracebacks import ShortTraceback

STOP_PATIENCE = 15.0  # how long whoever interrupts a boot waits for the engines to be gone
TURN_PATIENCE = 1.5  # a loop that does not turn for so long is blocked, and cannot stop its engines itself
STREAM_GRACE = 2.0  # what running requests get when their cluster is stopped


class Cluster:
    """Boots engines and serves them; `async with Cluster(...) as cluster`, or `await cluster.start()` and `.down()`.

    `roles` is xPyD or a number of engines without roles (default 1P2D); `engine` is cpu or attach (with
    `endpoint_urls`); `port` 0 takes any free one; `policy` is a built-in's name, or one in `book`.
    Raises `ArgumentError` for what cannot be."""

    def __init__(
        self,
        model: str = DEFAULT_MODEL,
        *,
        roles: str | int | None = None,
        engine: str | None = None,
        endpoint_urls: Sequence[str] = (),
        endpoint_hosts: Sequence[str] | None = None,
        endpoint_ports: Sequence[int] | None = None,
        endpoint_num_gpus: Sequence[int] | None = None,
        host: str = "127.0.0.1",
        port: int = 0,
        policy: str | Policy | None = None,
        parameters: Mapping[str, Any] | None = None,
        book: PolicyBook | None = None,
        prefix_cache: bool = True,
        tokenizer: str | None = None,
        api_key: str | None = None,
        serve: bool = True,
    ) -> None:
        self.asked_policy = policy.name if isinstance(policy, Policy) else policy
        self.options = make_options(
            model,
            roles=roles,
            engine=engine,
            endpoint_urls=endpoint_urls,
            endpoint_hosts=endpoint_hosts,
            endpoint_ports=endpoint_ports,
            endpoint_num_gpus=endpoint_num_gpus,
            host=host,
            port=port,
            policy=self.asked_policy,
            prefix_cache=prefix_cache,
            tokenizer=tokenizer,
            api_key=api_key,
            serve=serve,
        )
        self.book = book or PolicyBook()
        self.telemetry = Telemetry()
        first = policy or ("disagg" if self.options.disaggregated else "round-robin")
        self._first_policy = first if isinstance(first, Policy) else self.book.get(first)
        self._first_parameters = dict(parameters or {})
        check_policy(self._first_policy, self._first_parameters, self.options)
        self._service = Service(self.options, self.telemetry, self.book)
        self._thread: LoopThread | None = None
        self._booted: Future[None] = Future()
        self._booted.set_running_or_notify_cancel()

    # Starting and stopping

    async def start(self) -> Self:
        """Boot; returns when all engines answer and the endpoint is open. A failure leaves nothing running."""
        thread = self._begin()
        try:
            await thread.run(
                self._service.start(self._first_policy, self._first_parameters), patience=STOP_PATIENCE
            )
        except BaseException:
            self._forget()
            raise
        self._settle()
        return self

    def start_blocking(self, on_progress: Callable[[Snapshot], None] | None = None) -> Self:
        """`start` for a thread that may block; `on_progress` gets a snapshot when there is news.

        A KeyboardInterrupt stops everything."""
        thread = self._begin()
        seen = -1

        def look() -> None:
            nonlocal seen
            if on_progress is not None and self.telemetry.version != seen:
                seen = self.telemetry.version
                on_progress(self.telemetry.snapshot())

        try:
            boot = self._service.start(self._first_policy, self._first_parameters)
            thread.call(boot, patience=STOP_PATIENCE, on_tick=look)
        except BaseException:
            self._forget()
            raise
        self._settle()
        return self

    async def ready(self) -> None:
        """Wait for a boot that somebody else began; raises `MlcRouterError` if it fails."""
        await asyncio.wrap_future(self._booted)
        self._running()

    async def down(self, grace: float = STREAM_GRACE) -> None:
        """Stop: no new requests, `grace` seconds for those in flight, then engines and endpoint end. Idempotent.

        Where a policy blocks the router's loop, the engines are ended without it."""
        thread = self._thread
        if thread is not None and thread.inside:
            await self._service.stop(grace)
            self._forget()
        else:
            await in_thread(functools.partial(self.down_blocking, grace))

    def down_blocking(self, grace: float = STREAM_GRACE) -> None:
        """`down` for a thread that may block."""
        thread = self._thread
        if thread is not None and thread.alive:
            try:
                if not thread.turns(TURN_PATIENCE):
                    raise NoAnswer
                thread.call(self._service.stop(grace), timeout=grace + STOP_PATIENCE)
            except NoAnswer:
                self._service.kill()
                thread.end_with(thread.submit(self._service.stop(0.0)), timeout=1.0)
        self._forget()

    async def __aenter__(self) -> Self:
        """Start it; one that runs already is only taken over: leaving stops it either way."""
        if self._thread is None or self.stopping:
            return await self.start()
        await self.ready()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.down()

    # Asking

    async def ask(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat: bool | None = None,
        policy: str | None = None,
        **fields: Any,
    ) -> Answer:
        """The whole answer: text, with `.trace`, `.usage` and `.finish_reason`.

        `chat` renders the model's template around the prompt (default: where it has one); `fields` are OpenAI's
        (`max_tokens`, `temperature`, `seed`, ...). Raises `RequestError` for a field that cannot be."""
        with ShortTraceback():
            return await self.submit(prompt, messages=messages, chat=chat, policy=policy, **fields)

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat: bool | None = None,
        policy: str | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Chunk, None]:
        """Chunks as they come (`chunk.text`, `.finish_reason`, `.usage`); leaving the iteration ends the request."""
        with ShortTraceback():
            router, thread = self._running()
            body = make_body(prompt, messages, self._chat(chat), fields, self._service.model_name)
        return iterate(thread, chunks_of(router, body, policy))

    def submit(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        on_text: Callable[[str], None] | None = None,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat: bool | None = None,
        policy: str | None = None,
        **fields: Any,
    ) -> Submission:
        """Start a request from any thread and return its handle; `on_text` is called on the router's loop."""
        with ShortTraceback():
            router, thread = self._running()
            body = make_body(prompt, messages, self._chat(chat), fields, self._service.model_name)
        return Submission(thread, router, body, policy, on_text)

    # Steering

    def use(self, policy: str | Policy, **parameters: Any) -> None:
        """Make a policy active, with values for its parameters; the next request sees it."""
        with ShortTraceback():
            self._steer(lambda router: router.use(policy, **parameters))

    def set(self, **parameters: Any) -> None:
        """Set parameters of the active policy; the next request sees them."""
        with ShortTraceback():
            self._steer(lambda router: router.set(**parameters))

    @property
    def params(self) -> LiveParameters:
        """The active policy's parameters as attributes, to read and to set."""
        return LiveParameters(self)

    # Looking

    def status(self) -> Snapshot:
        """Engines, load, policy and address, at this moment."""
        return self.telemetry.snapshot()

    @property
    def url(self) -> str:
        """The OpenAI endpoint's base URL, ending in /v1; empty while there is none."""
        return self._service.url

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The launched engines, in the order of `server_urls`."""
        return tuple(self._service.engines)

    @property
    def loop_thread(self) -> LoopThread:
        """The thread that the router's loop runs in; raises `MlcRouterError` while the cluster does not run."""
        return self._running()[1]

    @property
    def router(self) -> Router:
        """The router, for use on its own loop; raises `MlcRouterError` while the cluster does not run."""
        return self._running()[0]

    @property
    def service(self) -> Service:
        """What runs on the router's loop."""
        return self._service

    @property
    def stopping(self) -> bool:
        """Whether it is stopping or has stopped."""
        return self._service.stopping

    @property
    def dead(self) -> bool:
        """Whether all engines that it has started have ended by themselves."""
        engines = self._service.engines
        return (
            self._booted.done()
            and bool(engines)
            and all(engine.exited is not None and engine.exited.done() for engine in engines)
        )

    def logs(self, engine: str, lines: int = 50) -> str:
        """The last lines of an engine's log; raises `ArgumentError` for an unknown name."""
        for candidate in self._service.engines:
            if candidate.spec.name == engine:
                if candidate.log_path is None:
                    raise ArgumentError(f"Engine {engine} was started elsewhere; its log is there.")
                return candidate.log_tail(lines)
        names = ", ".join(slot.name for slot in self.options.slots)
        raise ArgumentError(f"There is no engine {engine!r}; there are {names}.")

    def panel(self) -> Any:
        """The live panel, a widget."""
        from ..notebook.panel import open_panel

        return open_panel(self)

    def describe(self) -> str:
        """`smollm2-135m: P0 D1 D2, ready, http://127.0.0.1:41234/v1`."""
        names = " ".join(slot.name for slot in self.options.slots)
        parts = [f"{self.options.model}: {names}", self.telemetry.snapshot().state, self.url]
        return ", ".join(part for part in parts if part)

    def __repr__(self) -> str:
        return f"<Cluster {self.describe()}>"

    # Changing a running cluster: not in this version

    def add(self, role: str = "decode") -> None:
        """Add an engine to the running cluster."""
        raise MlcRouterError(_NOT_YET.format("add an engine"))

    def drain(self, engine: str) -> None:
        """Let an engine finish its requests and take no more."""
        raise MlcRouterError(_NOT_YET.format("drain an engine"))

    def remove(self, engine: str) -> None:
        """Take an engine out of the running cluster."""
        raise MlcRouterError(_NOT_YET.format("remove an engine"))

    # Inside

    def _begin(self) -> LoopThread:
        if self._thread is not None:
            raise MlcRouterError("This cluster has been started before; make a new one with Cluster(...).")
        self._thread = LoopThread()
        current.add(self)
        return self._thread

    def _forget(self) -> None:
        current.discard(self)
        if self._thread is not None:
            self._thread.stop()
        self._settle()

    def _settle(self) -> None:
        """The boot is over, in whatever way."""
        with contextlib.suppress(InvalidStateError):
            self._booted.set_result(None)

    def _running(self) -> tuple[Router, LoopThread]:
        router, thread = self._service.router, self._thread
        if router is None or thread is None or not thread.alive or self._service.stopping:
            raise MlcRouterError(
                "This cluster is not running: start one with %route up or await mlcrouter_nb.up()."
            )
        return router, thread

    def _chat(self, chat: bool | None) -> bool:
        model = self._service.model
        return (model is not None and model.chat is not None) if chat is None else chat

    def _steer(self, change: Callable[[Router], object]) -> None:
        router, thread = self._running()

        async def on_loop() -> None:
            change(router)

        if thread.inside:
            change(router)
        else:
            thread.call(on_loop(), timeout=5.0)


_NOT_YET = (
    "This version cannot {} while the cluster runs: stop it with %route down and start one with other roles."
)
