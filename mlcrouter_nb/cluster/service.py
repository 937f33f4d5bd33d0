"""The part of a cluster that lives on the router's loop: engines, router, watcher, endpoint; started and stopped once."""

import asyncio
import contextlib
import functools
from collections.abc import Mapping
from typing import Any

from ..protocol.errors import ArgumentError, MlcRouterError
from ..router.endpoint import Endpoint
from ..router.gateway import Gateway
from ..router.policy import Policy, PolicyBook
from ..router.router import Router
from ..telemetry import Telemetry
from .boot import TERM_GRACE, boot, death_of, kill_all, stop_all
from .launchers.base import Engine, Launcher
from .model import Model, find_model, make_launcher
from .options import Options, check_port_is_free
from .watcher import Watcher


class Service:
    """All methods run on one loop; a failed or cancelled `start` stops what it had started."""

    def __init__(self, options: Options, telemetry: Telemetry, book: PolicyBook) -> None:
        self.options, self.telemetry, self.book = options, telemetry, book
        self.engines: list[Engine] = []
        self.router: Router | None = None
        self.model: Model | None = None
        self.url = ""
        self.launcher: Launcher | None = None
        self._gateway: Gateway | None = None
        self._watcher: asyncio.Task[None] | None = None
        self._booting: asyncio.Task[None] | None = None
        self._stopping: asyncio.Task[None] | None = None
        self._killed = False

    @property
    def stopping(self) -> bool:
        """Whether it is stopping or has stopped."""
        return self._stopping is not None or self._killed

    async def start(self, policy: str | Policy, parameters: Mapping[str, Any]) -> None:
        """Boot the engines and open the endpoint; raises `ArgumentError`, `BootError`."""
        self._booting = asyncio.create_task(self._boot(policy, parameters))
        try:
            await self._booting
        except BaseException:
            stopped_by_others = self.stopping
            await self.stop(0.0)
            task = asyncio.current_task()
            if stopped_by_others and not (task is not None and task.cancelling()):
                raise MlcRouterError("The cluster was stopped while it booted.") from None
            raise

    async def _boot(self, policy: str | Policy, parameters: Mapping[str, Any]) -> None:
        options = self.options
        self.telemetry.emit("cluster_state", state="booting", kind=options.kind, model=options.model, url="")
        self._check_ports()
        self.model = await find_model(options, self.telemetry)
        self.launcher = make_launcher(options, self.model)
        await boot(self.launcher, options.specs(), self.telemetry, self.engines)
        self.router = self._make_router(self.model)
        self.router.use(policy, **parameters)
        for engine in self.engines:
            if engine.exited is not None:
                engine.exited.add_done_callback(functools.partial(self._on_exit, engine))
        self._watcher = asyncio.create_task(Watcher(self.telemetry, self.engines).run())
        if options.serve:
            await self.listen(options.host, options.port)
        self.telemetry.emit("cluster_state", state="ready", url=self.url)

    async def listen(self, host: str, port: int) -> None:
        """Open the OpenAI endpoint; raises `ArgumentError` for a taken port."""
        if self.router is None or self._gateway is not None:
            raise ArgumentError("The OpenAI endpoint can be opened once, on a running cluster.")
        self._gateway = Gateway(self.router, api_key=self.options.api_key)
        self.url = await self._gateway.start(host, port) + "/v1"
        self.telemetry.emit("cluster_state", url=self.url)

    async def stop(self, grace: float) -> None:
        """Stop once, however many ask and whoever of them is cancelled."""
        if self._stopping is None:
            self._stopping = asyncio.create_task(self._stop(grace))
        await asyncio.shield(self._stopping)

    def kill(self) -> None:
        """`stop` from another thread, for when the loop does not turn: ends the engines, and says so."""
        self._killed = True
        self.url = ""
        if self.launcher is not None:
            kill_all(self.launcher, self.engines, self.telemetry, TERM_GRACE)
        self.telemetry.emit("cluster_state", state="stopped", url="")

    def _check_ports(self) -> None:
        """A taken port is found before anything boots."""
        options = self.options
        if options.serve:
            check_port_is_free(options.host, options.port)
        if options.kind != "attach":
            for host, port in zip(options.hosts, options.ports, strict=True):
                check_port_is_free(host, port)

    def _make_router(self, model: Model) -> Router:
        tokenizer = model.tokenizer
        lengths = [
            int(engine.facts["context_length"]) for engine in self.engines if "context_length" in engine.facts
        ]
        return Router(
            [self._endpoint(engine) for engine in self.engines],
            telemetry=self.telemetry,
            book=self.book,
            tokenizer=None if tokenizer is None else lambda: tokenizer,
            chat=model.chat,
            model=model.id,
            context_length=min(lengths, default=None),
        )

    def _endpoint(self, engine: Engine) -> Endpoint:
        spec = engine.spec
        return Endpoint(
            spec.name, engine.url, spec.role, kind=self.options.kind, rank=spec.rank, model=self.model_name
        )

    @property
    def model_name(self) -> str:
        """What requests of ours say in their `model` field."""
        return (self.model.id if self.model is not None else None) or self.options.model

    def _on_exit(self, engine: Engine, exited: asyncio.Future[int]) -> None:
        """An engine ended by itself: choose it no more, and say what its log said."""
        if self.stopping:
            return
        name = engine.spec.name
        if self.launcher is not None:
            self.launcher.clean_up([engine])
        for endpoint in self.router.endpoints if self.router is not None else ():
            if endpoint.name == name:
                endpoint.available = False
        self.telemetry.emit(
            "engine_state", engine=name, state="failed", detail=death_of(engine, exited.result())
        )

    async def _stop(self, grace: float) -> None:
        self.telemetry.emit("cluster_state", state="stopping", url="")
        self.url = ""
        if self._booting is not None and not self._booting.done():
            self._booting.cancel()
            await asyncio.wait({self._booting})
        try:
            await self._let_go(grace)
        finally:
            if self.launcher is not None:
                await stop_all(self.launcher, self.engines, self.telemetry, TERM_GRACE)
            self.telemetry.emit("cluster_state", state="stopped")

    async def _let_go(self, grace: float) -> None:
        """No new requests; those that run get `grace` seconds."""
        if self.router is None:
            return
        if self._gateway is not None:
            await asyncio.gather(self.router.drain(grace), self._gateway.stop(grace))
        else:
            await self.router.drain(grace)
        if self._watcher is not None:
            self._watcher.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._watcher
        await self.router.close()
