"""The drop-in for `mlc_llm.router.Router`: boots engines, and turns completions into MicroServing calls."""

import contextlib
import sys
from collections.abc import AsyncGenerator
from typing import Any

import aiohttp

from ..cluster import Cluster
from ..cluster.ask import chunks_of
from ..cluster.bridge import iterate
from ..cluster.launchers.base import Engine
from ..cluster.roles import roles_for
from ..protocol.errors import ArgumentError
from ..router.prompts import Encoder
from ..router.router import Router as ClusterRouter
from ..router.sinks import AnswerSink
from ..telemetry import Event
from .calls import payload_of, post_json, post_stream
from .openai_api_protocol import CompletionResponse, DebugConfig
from .rerun import Resumption

MODES = ("disagg", "round-robin")


class Router:
    """Boots an engine at each `hosts[i]:ports[i]` (default one, at 127.0.0.1:8080) and routes requests to them.

    Override `translate_request` for a pattern of your own; `send_prepare_receive`, `send_remote_send` and
    `send_start_generate` make the calls, over your own aiohttp session. In disagg, engine 0 is for prefill.
    Raises `ArgumentError` for lists of different lengths, another mode, or a balance factor beyond 0 to 1."""

    def __init__(
        self,
        model: str,
        model_lib: str | None = None,
        hosts: list[str] | None = None,
        ports: list[int] | None = None,
        num_gpus: list[int] | None = None,
        enable_prefix_cache: bool = False,
        router_mode: str = "disagg",
        pd_balance_factor: float = 0.0,
    ) -> None:
        self.hosts = ["127.0.0.1"] if hosts is None else list(hosts)
        self.ports = [8080] if ports is None else list(ports)
        num_gpus = [1] if num_gpus is None else list(num_gpus)
        self.num_servers = len(self.hosts)
        if not self.num_servers == len(self.ports) == len(num_gpus) > 0:
            raise ArgumentError(
                f"hosts, ports and num_gpus have {self.num_servers}, {len(self.ports)} and {len(num_gpus)} entries: "
                "give one for each engine in each."
            )
        self.router_mode = router_mode
        self.pd_balance_factor = pd_balance_factor
        _check(router_mode, pd_balance_factor)
        self.headers = {"Content-Type": "application/json"}
        self.num_running_requests = [0] * self.num_servers
        self.cluster = Cluster(
            model,
            roles=roles_for(self.num_servers, disaggregated=router_mode == "disagg"),
            endpoint_hosts=self.hosts,
            endpoint_ports=self.ports,
            endpoint_num_gpus=num_gpus,
            prefix_cache=enable_prefix_cache,
            serve=False,
        )
        self.device_id_starts = self.cluster.options.device_id_starts
        self.cluster.start_blocking()
        self.cluster.telemetry.subscribe(_LoadCounter(self))
        self.server_urls = [engine.url for engine in self.cluster.engines]
        self.ports = [int(url.rpartition(":")[2]) for url in self.server_urls]
        self.servers = [Server(engine, self.cluster) for engine in self.cluster.engines]
        self.tokenizer = _tokenizer(self.cluster)

    def terminate(self) -> None:
        """Stop the engines."""
        self.cluster.down_blocking()

    async def handle_completion(self, request: Any, request_id: str) -> AsyncGenerator[Any, Any]:
        """The responses to a completion request; runs `translate_request` again when that yields None.

        What was sent before is then part of the prompt, so that the client gets no token twice."""
        if isinstance(request.prompt, str):
            request.prompt = self.tokenizer.encode(request.prompt)
        if request.debug_config is None:
            request.debug_config = _debug_config(request)
        run = Resumption(request, request_id, self.tokenizer)
        while True:
            preempted = False
            async with contextlib.aclosing(self.translate_request(run.request, run.id)) as responses:
                async for response in responses:
                    preempted = response is None
                    if preempted:
                        break
                    yield run.pass_on(response)
            if not preempted:
                return
            if not run.again():
                yield run.closing()
                return

    async def translate_request(self, request: Any, request_id: str) -> AsyncGenerator[Any, Any]:
        """The pattern: one engine by turns in round-robin, prefill on engine 0 and decode on another in disagg.

        Yields responses, or None to be run again."""
        _check(self.router_mode, self.pd_balance_factor)
        if self.router_mode == "disagg" and self.num_servers < 2:
            raise ArgumentError(
                "router_mode disagg needs two engines or more, and there is one: give more hosts and ports, or use "
                "router_mode='round-robin'."
            )
        body = {key: value for key, value in payload_of(request).items() if value is not None}
        body |= {"stream": bool(request.stream), "user": request_id}
        router, thread = self.cluster.router, self.cluster.loop_thread
        if not request.stream:
            yield await thread.run(self._answer(router, body))
            return
        async with contextlib.aclosing(iterate(thread, self._chunks(router, body))) as responses:
            async for response in responses:
                yield response

    async def send_prepare_receive(
        self, session: aiohttp.ClientSession, request: Any, server_url: str
    ) -> tuple[str, int]:
        """Step 1: the decode engine reserves KV; returns where it goes, and how long a prefix is there already."""
        answer = await post_json(session, f"{server_url}/microserving/prep_recv", request, self.headers)
        return answer["kv_append_metadata"], answer["prefix_matched_length"]

    async def send_remote_send(self, session: aiohttp.ClientSession, request: Any, server_url: str) -> None:
        """Step 2: the prefill engine computes the window's KV; returns once it has arrived."""
        await post_json(session, f"{server_url}/microserving/remote_send", request, self.headers)

    async def send_start_generate(
        self, session: aiohttp.ClientSession, request: Any, server_url: str
    ) -> AsyncGenerator[CompletionResponse, Any]:
        """Step 3: the decode engine generates; yields its responses."""
        url = f"{server_url}/microserving/start_generate"
        async with contextlib.aclosing(post_stream(session, url, request, self.headers)) as responses:
            async for response in responses:
                yield response

    async def _chunks(
        self, router: ClusterRouter, body: dict[str, Any]
    ) -> AsyncGenerator[CompletionResponse, None]:
        async with contextlib.aclosing(chunks_of(router, body, self._policy(router))) as chunks:
            async for chunk in chunks:
                yield CompletionResponse.model_validate(chunk.event)

    async def _answer(self, router: ClusterRouter, body: dict[str, Any]) -> CompletionResponse:
        sink = AnswerSink()
        delivery = await router.run(router.request(body, policy=self._policy(router)), sink)
        return CompletionResponse.model_validate(sink.answer(delivery.total_usage()))

    def _policy(self, router: ClusterRouter) -> str:
        """The policy for the mode as it is now: scripts change `router_mode` and `pd_balance_factor` as they like."""
        if self.router_mode == "disagg":
            policy = router.book.get("disagg")
            if policy.values["pd_balance_factor"] != self.pd_balance_factor:
                policy.set(pd_balance_factor=self.pd_balance_factor)
        return self.router_mode


class Server:
    """One engine, as MLC's `PopenServer` is used: `url`, `pid`, `terminate()`."""

    def __init__(self, engine: Engine, cluster: Cluster) -> None:
        self.url = engine.url
        self.pid: int | None = getattr(engine, "pid", None)
        self._engine, self._cluster = engine, cluster

    def terminate(self) -> None:
        """Stop this engine."""
        if not self._cluster.stopping:
            self._cluster.loop_thread.call(self._engine.stop(2.0), timeout=15.0)


class _LoadCounter:
    """Adds the load that the cluster's own router puts on engines to `num_running_requests`.

    It adds differences, since an overridden `translate_request` may count its own requests in the same list."""

    def __init__(self, router: Router) -> None:
        self._router = router
        self._places = {engine.spec.name: i for i, engine in enumerate(router.cluster.engines)}
        self._seen = [0] * len(self._places)

    def __call__(self, event: Event) -> None:
        place = self._places.get(event.engine or "")
        if place is not None and "in_flight" in event.data:
            now = int(event.data["in_flight"])
            self._router.num_running_requests[place] += now - self._seen[place]
            self._seen[place] = now


def _check(router_mode: str, pd_balance_factor: float) -> None:
    if router_mode not in MODES:
        raise ArgumentError(f"router_mode {router_mode!r} is unknown: choose one of {', '.join(MODES)}.")
    if not 0.0 <= pd_balance_factor <= 1.0:
        raise ArgumentError(f"pd_balance_factor is {pd_balance_factor}; it must lie between 0 and 1.")


def _tokenizer(cluster: Cluster) -> Encoder:
    model = cluster.service.model
    if model is None or model.tokenizer is None:
        raise ArgumentError("The model's tokenizer is not known.")
    return model.tokenizer


def _debug_config(request: Any) -> Any:
    """An empty debug configuration, of MLC-LLM's own class where the request is MLC-LLM's."""
    module = sys.modules.get(type(request).__module__)
    return getattr(module, "DebugConfig", DebugConfig)()
