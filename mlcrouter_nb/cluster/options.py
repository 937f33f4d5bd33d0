"""What a cluster is made of, checked before anything starts."""

import os
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..protocol.errors import ArgumentError
from ..router.policy import Policy
from .launchers.attach import check_url
from .launchers.base import EngineSpec, World
from .launchers.mlc import refuse
from .roles import Slot, parse_roles, roles_for

DEFAULT_MODEL = "smollm2-135m"
DEFAULT_ROLES = "1P2D"
ONE_ENGINE_POLICIES = ("round-robin", "least-loaded")
KINDS = ("cpu", "mlc", "attach")


@dataclass(frozen=True)
class Options:
    """A cluster's arguments; two clusters with equal options are the same to `up`."""

    model: str
    kind: str
    slots: tuple[Slot, ...]
    hosts: tuple[str, ...]
    ports: tuple[int, ...]
    workers: tuple[int, ...]
    endpoint_urls: tuple[str, ...]
    host: str
    port: int
    prefix_cache: bool
    tokenizer: str | None
    api_key: str | None
    serve: bool

    @property
    def device_id_starts(self) -> list[int]:
        """The first worker of each engine in the NVSHMEM world, and last how many there are in all."""
        starts = [0]
        for workers in self.workers:
            starts.append(starts[-1] + workers)
        return starts

    @property
    def disaggregated(self) -> bool:
        """Whether the engines have roles."""
        return self.slots[0].role is not None

    def specs(self) -> list[EngineSpec]:
        """One spec for each engine, in the order of `server_urls`."""
        urls = self.endpoint_urls or (None,) * len(self.slots)
        return [
            EngineSpec(slot.name, slot.role, rank, host, port, url)
            for slot, rank, host, port, url in zip(
                self.slots, self.device_id_starts, self.hosts, self.ports, urls, strict=False
            )
        ]

    def new_world(self) -> World:
        """A world that no other cluster shares."""
        return World(tuple(secrets.randbelow(2**31) for _ in range(16)), self.device_id_starts[-1])


def make_options(
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
    policy: str | None = None,
    prefix_cache: bool = True,
    tokenizer: str | None = None,
    api_key: str | None = None,
    serve: bool = True,
) -> Options:
    """Check the arguments of a cluster and fill in what was left out; raises `ArgumentError`."""
    listed = _listed(endpoint_urls, endpoint_hosts, endpoint_ports, endpoint_num_gpus)
    if roles is None:
        roles = (
            roles_for(listed, disaggregated=policy not in ONE_ENGINE_POLICIES) if listed else DEFAULT_ROLES
        )
    slots = tuple(parse_roles(roles))
    if listed and listed != len(slots):
        raise ArgumentError(f"roles {roles!r} are {len(slots)} engines, but {listed} endpoints are listed.")
    kind = _kind(engine, model, endpoint_urls)
    count = len(slots)
    ports = tuple(endpoint_ports or (0,) * count)
    for number in (port, *ports):
        if not 0 <= number <= 65535:
            raise ArgumentError(
                f"port {number} does not exist: choose one from 1 to 65535, or 0 for any free one."
            )
    taken = [number for number in ports if number and ports.count(number) > 1]
    if taken and len(set(endpoint_hosts or ())) < 2:
        raise ArgumentError(f"port {taken[0]} is listed twice; each endpoint needs its own.")
    workers = tuple(endpoint_num_gpus or (1,) * count)
    if min(workers) < 1:
        raise ArgumentError(f"An endpoint needs one GPU at least, not {min(workers)}.")
    return Options(
        model=model,
        kind=kind,
        slots=slots,
        hosts=tuple(endpoint_hosts or ("127.0.0.1",) * count),
        ports=ports,
        workers=workers,
        endpoint_urls=tuple(check_url(url) for url in endpoint_urls),
        host=host,
        port=port,
        prefix_cache=prefix_cache,
        tokenizer=tokenizer,
        api_key=api_key or os.environ.get("MLCROUTER_API_KEY") or None,
        serve=serve,
    )


def _listed(
    urls: Sequence[str], hosts: Sequence[str] | None, ports: Sequence[int] | None, gpus: Sequence[int] | None
) -> int:
    """How many endpoints the lists name; they must agree."""
    lists = {
        "endpoint URLs": urls,
        "endpoint hosts": hosts,
        "endpoint ports": ports,
        "endpoint GPU counts": gpus,
    }
    lengths = {name: len(values) for name, values in lists.items() if values}
    if len(set(lengths.values())) > 1:
        text = ", ".join(f"{count} {name}" for name, count in lengths.items())
        raise ArgumentError(
            f"The endpoint lists differ in length ({text}): give one entry for each engine in each."
        )
    return next(iter(lengths.values()), 0)


def _kind(engine: str | None, model: str, urls: Sequence[str]) -> str:
    """The engine kind: the argument, else MLCROUTER_ENGINE, else what the model and this machine allow."""
    chosen = engine or ("attach" if urls else os.environ.get("MLCROUTER_ENGINE") or _guess_kind(model))
    if chosen not in KINDS:
        raise ArgumentError(f"engine {chosen!r} is unknown: choose one of {', '.join(KINDS)}.")
    if chosen == "attach" and not urls:
        raise ArgumentError(
            "engine attach needs the engines' addresses: --endpoint-urls http://127.0.0.1:8080 ..."
        )
    if chosen != "attach" and urls:
        raise ArgumentError(
            f"endpoint URLs name engines that run already; engine {chosen} starts its own: use attach."
        )
    if chosen == "mlc":
        raise refuse()
    return chosen


def _guess_kind(model: str) -> str:
    import importlib.util

    built_for_mlc = (Path(model).expanduser() / "mlc-chat-config.json").is_file()
    return "mlc" if built_for_mlc and importlib.util.find_spec("mlc_llm") is not None else "cpu"


def check_policy(policy: Policy, parameters: Mapping[str, Any], options: Options) -> None:
    """Raises `ArgumentError` for a policy that these engines cannot run, or a parameter that it has not."""
    for name, value in parameters.items():
        if name not in policy.parameters:
            has = ", ".join(policy.parameters) or "none"
            raise ArgumentError(f"policy '{policy.name}' has no parameter '{name}'; it has: {has}.")
        policy.parameters[name].check(name, value)
    if policy.name == "disagg" and policy.origin == "built-in" and len(options.slots) < 2:
        raise ArgumentError(
            "The policy disagg needs a prefill and a decode engine, and there is one engine: use roles 1P1D or more, "
            "or the policy round-robin."
        )


def check_port_is_free(host: str, port: int) -> None:
    """Raises `ArgumentError` when something listens there already, or the host is not this machine's."""
    import socket

    try:
        family, kind, protocol, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, protocol) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            probe.listen(1)
    except OSError as error:
        reason = error.strerror or str(error)
        if port == 0:
            raise ArgumentError(
                f"Cannot listen on {host} ({reason}): name an address of this machine."
            ) from error
        raise ArgumentError(
            f"Port {port} on {host} cannot be used ({reason}): choose another one, or 0 for any free one."
        ) from error
