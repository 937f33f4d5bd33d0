"""A running cluster: engines, the router on its loop, the OpenAI endpoint."""

import asyncio
import contextlib
import functools
from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from concurrent.futures import Future, InvalidStateError
from types import TracebackType
from typing import Any, Self

from ..protocol.errors import ArgumentError, MlcRouterError
from ..router.endpoint import Endpoint
from ..router.gateway import Gateway
from ..router.policy import Policy, PolicyBook
from ..router.router import Router
from ..telemetry import Snapshot, Telemetry
from . import current
from .ask import Answer, Submission, make_body
from .boot import TERM_GRACE, boot, death_of, stop_all
from .launchers.base import Engine, Launcher
from .loop_thread import LoopThread
from .model import Model, find_model, make_launcher
from .options import DEFAULT_MODEL, Options, check_port_is_free, make_options
from .parameters import LiveParameters
from .watcher import Watcher

STOP_PATIENCE = 15.0  # how long whoever interrupts a boot waits for the engines to be gone


class Cluster:
    """Boots engines and serves them; `async with Cluster(...) as cluster`, or `await cluster.start()` and `.down()`.

    `roles` is xPyD or a number of engines without roles (default 1P2D); `engine` is cpu or attach (with
    `endpoint_urls`); `port` 0 takes any free one; `policy` is a built-in's name, or one in `book`.
    All methods work from any thread and any event loop. Raises `ArgumentError` for what cannot be."""

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
        self.options: Options = make_options(
            model,
            roles=roles,
            engine=engine,
            endpoint_urls=endpoint_urls,
            endpoint_hosts=endpoint_hosts,
            endpoint_ports=endpoint_ports,
            endpoint_num_gpus=endpoint_num_gpus,
            host=host,
            port=port,
            policy=policy.name if isinstance(policy, Policy) else policy,
            prefix_cache=prefix_cache,
            tokenizer=tokenizer,
            api_key=api_key,
            serve=serve,
        )
        self.book = book or PolicyBook()
        self.telemetry = Telemetry()
        self._first_policy = policy or ("disagg" if self.options.disaggregated else "round-robin")
        self._first_parameters = dict(parameters or {})
        self._engines: list[Engine] = []
        self._launcher: Launcher | None = None
        self._model: Model | None = None
        self._router: Router | None = None
        self._gateway: Gateway | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._thread: LoopThread | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._url = ""
        self._booted: Future[None] = Future()
        self._booted.set_running_or_notify_cancel()
        self._check_policy()

    # Starting and stopping

    async def start(self) -> Self:
        """Boot; returns when all engines answer and the endpoint is open. A failure leaves nothing running."""
        thread = self._begin()
        try:
            await thread.run(self._start(), patience=STOP_PATIENCE)
        except BaseException:
            self._forget()
            raise
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
            thread.call(self._start(), patience=STOP_PATIENCE, on_tick=look)
        except BaseException:
            self._forget()
            raise
        return self

    async def down(self, grace: float = 2.0) -> None:
        """Stop: no new requests, `grace` seconds for those in flight, then engines and endpoint end. Idempotent."""
        thread = self._thread
        if thread is not None and thread.alive:
            await thread.run(self._stop(grace), patience=STOP_PATIENCE)
        self._forget()

    def down_blocking(self, grace: float = 2.0) -> None:
        """`down` for a thread that may block."""
        thread = self._thread
        if thread is not None and thread.alive:
            thread.call(self._stop(grace), timeout=grace + STOP_PATIENCE)
        self._forget()

    async def __aenter__(self) -> Self:
        return await self.start()

    async def __aexit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        await self.down()

    @property
    def arguments(self) -> tuple[Any, ...]:
        """What two calls of `up` have in common when they mean the same cluster."""
        policy = self._first_policy
        return self.options, policy if isinstance(policy, str) else policy.name, self._first_parameters

    @property
    def stopping(self) -> bool:
        """Whether it is stopping or has stopped."""
        return self._stopping is not None

    async def ready(self) -> None:
        """Wait for a boot that somebody else began; raises `MlcRouterError` if it fails."""
        await asyncio.wrap_future(self._booted)
        self._running()

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
        submission = self.submit(prompt, messages=messages, chat=chat, policy=policy, **fields)
        return await submission

    def stream(
        self,
        prompt: str | Sequence[int] | None = None,
        *,
        messages: Sequence[Mapping[str, Any]] | None = None,
        chat: bool | None = None,
        policy: str | None = None,
        **fields: Any,
    ) -> AsyncGenerator[Any, None]:
        """Chunks as they come (`chunk.text`, `.finish_reason`, `.usage`); leaving the iteration ends the request."""
        router, thread = self._running()
        body = make_body(prompt, messages, self._chat(chat, messages), fields, self._model_name)
        return thread.iterate(router.stream(body, policy=policy))

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
        router, thread = self._running()
        body = make_body(prompt, messages, self._chat(chat, messages), fields, self._model_name)
        return Submission(thread, router, body, policy, on_text)

    # Steering

    def use(self, policy: str | Policy, **parameters: Any) -> None:
        """Make a policy active, with values for its parameters; the next request sees it."""
        self._steer(lambda router: router.use(policy, **parameters))

    def set(self, **parameters: Any) -> None:
        """Set parameters of the active policy; the next request sees them."""
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
        return self._url

    @property
    def engines(self) -> tuple[Engine, ...]:
        """The launched engines, in the order of `server_urls`."""
        return tuple(self._engines)

    @property
    def router(self) -> Router:
        """The router; use it on its own loop only. Raises `MlcRouterError` while the cluster does not run."""
        return self._running()[0]

    def logs(self, engine: str, lines: int = 50) -> str:
        """The last lines of an engine's log; raises `ArgumentError` for an unknown name."""
        for candidate in self._engines:
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

    def describe(self) -> str:
        """`smollm2-135m: P0 D1 D2, ready, http://127.0.0.1:41234/v1`."""
        names = " ".join(slot.name for slot in self.options.slots)
        parts = [f"{self.options.model}: {names}", self.telemetry.snapshot().state, self._url]
        return ", ".join(part for part in parts if part)

    def __repr__(self) -> str:
        return f"<Cluster {self.describe()}>"

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
        self._settle_boot()

    def _settle_boot(self) -> None:
        with contextlib.suppress(InvalidStateError):
            self._booted.set_result(None)

    def _running(self) -> tuple[Router, LoopThread]:
        if (
            self._router is None
            or self._thread is None
            or not self._thread.alive
            or self._stopping is not None
        ):
            raise MlcRouterError(
                "This cluster is not running: start one with %route up or await mlcrouter_nb.up()."
            )
        return self._router, self._thread

    @property
    def _model_name(self) -> str:
        """What requests of `ask` say in their `model` field."""
        return (self._model.id if self._model is not None else None) or self.options.model

    def _chat(self, chat: bool | None, messages: object) -> bool:
        if chat is None:
            return messages is not None or (self._model is not None and self._model.chat is not None)
        return chat

    def _steer(self, change: Callable[[Router], object]) -> None:
        router, thread = self._running()

        async def on_loop() -> None:
            change(router)

        if thread.inside:
            change(router)
        else:
            thread.call(on_loop(), timeout=10.0)

    def _check_policy(self) -> None:
        """A wrong first policy or parameter is found before anything boots."""
        policy = self._first_policy
        chosen = policy if isinstance(policy, Policy) else self.book.get(policy)
        for name, value in self._first_parameters.items():
            if name not in chosen.parameters:
                has = ", ".join(chosen.parameters) or "none"
                raise ArgumentError(f"policy '{chosen.name}' has no parameter '{name}'; it has: {has}.")
            chosen.parameters[name].check(name, value)
        if chosen.name == "disagg" and chosen.origin == "built-in" and len(self.options.slots) < 2:
            raise ArgumentError(
                "The policy disagg needs a prefill and a decode engine, and there is one engine: use roles 1P1D or "
                "more, or the policy round-robin."
            )

    async def _start(self) -> None:
        options = self.options
        self.telemetry.emit("cluster_state", state="booting", kind=options.kind, model=options.model, url="")
        try:
            if options.serve:
                check_port_is_free(options.host, options.port)
            if options.kind != "attach":
                for host, port in zip(options.hosts, options.ports, strict=True):
                    check_port_is_free(host, port)
            self._model = await find_model(options, self.telemetry)
            self._launcher = make_launcher(options, self._model)
            await boot(self._launcher, options.specs(), self.telemetry, self._engines)
            await self._open()
        except BaseException:
            await self._stop(0.0)
            raise

    async def _open(self) -> None:
        """Router, watcher and endpoint, on top of engines that answer."""
        options, model = self.options, self._model
        endpoints = [
            Endpoint(
                engine.spec.name,
                engine.url,
                engine.spec.role,
                kind=options.kind,
                rank=engine.spec.rank,
                model=self._model_name,
            )
            for engine in self._engines
        ]
        self._router = Router(
            endpoints,
            telemetry=self.telemetry,
            book=self.book,
            tokenizer=model.tokenizer if model is not None else None,
            chat=model.chat if model is not None else None,
            model=model.id if model is not None else None,
            context_length=self._context_length(),
        )
        self._router.use(self._first_policy, **self._first_parameters)
        for engine in self._engines:
            if engine.exited is not None:
                engine.exited.add_done_callback(functools.partial(self._on_exit, engine))
        self._watcher = asyncio.create_task(Watcher(self.telemetry, self._engines).run())
        if options.serve:
            self._gateway = Gateway(self._router, api_key=options.api_key)
            try:
                root = await self._gateway.start(options.host, options.port)
            except OSError as error:
                raise ArgumentError(
                    f"Port {options.port} on {options.host} cannot be used ({error.strerror}): choose another one."
                ) from error
            self._url = root.removesuffix("/v1") + "/v1"
        self.telemetry.emit("cluster_state", state="ready", url=self._url)
        self._settle_boot()

    def _context_length(self) -> int | None:
        lengths = [
            engine.facts["context_length"] for engine in self._engines if engine.facts.get("context_length")
        ]
        return min(lengths, default=None)

    def _on_exit(self, engine: Engine, exited: asyncio.Future[int]) -> None:
        if self._stopping is None:
            code = exited.result()
            self.telemetry.emit(
                "engine_state", engine=engine.spec.name, state="failed", detail=death_of(engine, code)
            )

    async def _stop(self, grace: float) -> None:
        """Stop once, however many ask and whoever of them is cancelled."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop_once(grace))
        await asyncio.shield(self._stopping)

    async def _stop_once(self, grace: float) -> None:
        self.telemetry.emit("cluster_state", state="stopping", url="")
        self._url = ""
        try:
            if self._gateway is not None:
                await self._gateway.stop(grace=grace)
            if self._watcher is not None:
                self._watcher.cancel()
                with contextlib.suppress(asyncio.CancelledError, Exception):
                    await self._watcher
            if self._router is not None:
                await self._router.close()
        finally:
            if self._launcher is not None:
                await stop_all(self._launcher, self._engines, self.telemetry, TERM_GRACE)
            self.telemetry.emit("cluster_state", state="stopped", url="")


_NOT_YET = (
    "This version cannot {} while the cluster runs: stop it with %route down and start one with other roles."
)
