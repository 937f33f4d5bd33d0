"""The drop-in for `mlc_llm.interface.router.serve`: an OpenAI endpoint in front of a `Router`."""

import sys
import threading
from collections.abc import AsyncGenerator
from typing import Any

from ..cluster.options import check_port_is_free
from ..cluster.signals import interrupt_on_signals
from ..protocol.errors import ArgumentError
from ..router.chunks import Chunk
from ..router.namespace import Namespace
from ..router.policy import Policy
from ..router.request import CHAT_ONLY, Request
from .openai_api_protocol import CompletionRequest
from .router import Router


def serve(
    model: str,
    model_lib: str | None,
    router_host: str,
    router_port: int,
    endpoint_hosts: list[str],
    endpoint_ports: list[int],
    endpoint_num_gpus: list[int],
    enable_prefix_cache: bool,
    router_mode: str = "round-robin",
    pd_balance_factor: float = 0.0,
    router_type: type[Router] = Router,
) -> None:
    """Boot the engines, serve `http://router_host:router_port/v1` until interrupted, then stop everything.

    Raises `ArgumentError` for a taken port, and what `router_type` raises."""
    check_port_is_free(router_host, router_port)
    with interrupt_on_signals():
        router = router_type(
            model=model,
            model_lib=model_lib,
            hosts=endpoint_hosts,
            ports=endpoint_ports,
            num_gpus=endpoint_num_gpus,
            enable_prefix_cache=enable_prefix_cache,
            router_mode=router_mode,
            pd_balance_factor=pd_balance_factor,
        )
        try:
            open_endpoint(router, router_host, router_port)
            print(router.cluster.url, flush=True)
            threading.Event().wait()
        except KeyboardInterrupt:
            pass
        finally:
            router.cluster.down_blocking(grace=10.0)


def open_endpoint(router: Router, host: str, port: int) -> None:
    """Serve a booted router at `http://host:port/v1`; blocks until the port is open."""
    cluster = router.cluster
    if type(router) is Router:
        if router.router_mode == "disagg":
            if router.num_servers < 2:
                raise ArgumentError(
                    "router_mode disagg needs two engines or more: give more endpoint_hosts and ports."
                )
            cluster.use("disagg", pd_balance_factor=router.pd_balance_factor)
        else:
            cluster.use(router.router_mode)
    else:
        cluster.use(policy_of(router))
        cluster.router.model = None  # MLC's router takes any name
    cluster.loop_thread.call(cluster.service.listen(host, port), timeout=10.0)


def policy_of(router: Router) -> Policy:
    """A policy that hands each request to `router.handle_completion`."""

    async def route(request: Request, engines: Any) -> AsyncGenerator[Chunk, None]:
        fields = {key: value for key, value in request.body.items() if key not in CHAT_ONLY}
        fields |= {"prompt": list(request.prompt), "max_tokens": request.max_tokens, "stream": True}
        fields |= {"stream_options": {"include_usage": True}}
        completion = CompletionRequest.model_validate(fields)
        async for response in router.handle_completion(completion, request.guard.user):
            event = response.model_dump()
            if event["usage"] is None:
                del event["usage"]
            yield Chunk.of(event)

    kind = type(router)
    return Policy(
        name=kind.__name__,
        origin=f"{kind.__module__}.{kind.__qualname__}",
        source="",
        doc=kind.__doc__ or "",
        parameters={},
        filename=getattr(sys.modules.get(kind.__module__), "__file__", None) or "",
        namespace=Namespace(kind.__name__),
        route=route,
    )
