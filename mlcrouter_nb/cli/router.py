"""`mlcrouter-nb router`: make a cluster of what the arguments say, run it until a signal comes, stop it."""

import argparse
import os
import sys
import threading
from pathlib import Path
from typing import NoReturn

from ..cluster import Cluster
from ..cluster.signals import interrupt_on_signals
from ..protocol.errors import ArgumentError
from ..router.policy import Policy, PolicyBook
from .progress import ProgressLines

STREAM_GRACE = 10.0  # seconds that running streams get after SIGINT or SIGTERM


def run(options: argparse.Namespace) -> int:
    """Boot, serve until a signal comes, stop."""
    cluster = make_cluster(options)
    progress = ProgressLines()
    with interrupt_on_signals():
        try:
            cluster.start_blocking(progress)
        except KeyboardInterrupt:
            _tell("Stopped while booting.")
            return 0
        progress(cluster.status())
        print(cluster.url, flush=True)
        try:
            code = _watch(cluster)
        except KeyboardInterrupt:
            code = 0
            _tell(_stopping(cluster.status().in_flight))
        try:
            cluster.down_blocking(grace=STREAM_GRACE)
        except KeyboardInterrupt:
            _leave()
        _tell("Stopped.")
    return code


def make_cluster(options: argparse.Namespace) -> Cluster:
    book = PolicyBook()
    policy = _policy(options, book)
    roles = options.roles
    listed = (
        options.endpoint_hosts or options.endpoint_ports or options.endpoint_num_gpus or options.endpoint_urls
    )
    if roles is None and not listed and policy == "round-robin":
        roles = "2"
    parameters = {} if options.pd_balance_factor is None else {"pd_balance_factor": options.pd_balance_factor}
    return Cluster(
        options.model,
        roles=roles,
        engine=options.engine,
        endpoint_urls=options.endpoint_urls or (),
        endpoint_hosts=options.endpoint_hosts,
        endpoint_ports=options.endpoint_ports,
        endpoint_num_gpus=options.endpoint_num_gpus,
        host=options.router_host,
        port=options.router_port,
        policy=policy,
        parameters=parameters,
        book=book,
        prefix_cache=options.enable_prefix_cache,
        tokenizer=options.tokenizer,
        api_key=_api_key(options.api_key_file),
    )


def _policy(options: argparse.Namespace, book: PolicyBook) -> str | Policy | None:
    """The policy that --policy or --router-mode names; a file is compiled and put in the book."""
    if options.policy and options.router_mode and options.policy != options.router_mode:
        raise ArgumentError(
            f"--policy {options.policy} and --router-mode {options.router_mode} differ: give one of them."
        )
    chosen: str | None = options.policy or options.router_mode
    if chosen is None or chosen in book.names():
        return chosen
    path = Path(chosen).expanduser()
    if path.suffix != ".py":
        book.get(chosen)  # raises, and lists what there is
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"The policy file {path} cannot be read: {error}.") from error
    return book.define(book.compile(path.stem.replace("_", "-"), source, str(path), str(path)))


def _api_key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        key = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"The key file {path} cannot be read: {error}.") from error
    if not key:
        raise ArgumentError(f"The key file {path} is empty: write the key into it.")
    return key


def _watch(cluster: Cluster) -> int:
    """Wait for a KeyboardInterrupt; returns 1 when all engines have ended by themselves."""
    idle = threading.Event()
    told: set[str] = set()
    while True:
        idle.wait(0.5)
        engines = cluster.status().engines
        for engine in engines:
            if engine.state == "failed" and engine.name not in told:
                told.add(engine.name)
                _tell(f"{engine.name} {engine.detail}")
        if cluster.options.kind != "attach" and all(engine.state == "failed" for engine in engines):
            _tell("mlcrouter-nb: all engines have ended.")
            return 1


def _stopping(in_flight: int) -> str:
    if not in_flight:
        return "Stopping."
    running = "1 running request gets" if in_flight == 1 else f"{in_flight} running requests get"
    return f"Stopping: {running} {STREAM_GRACE:g} s."


def _tell(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _leave() -> NoReturn:
    """A second signal while stopping: leave at once; engines end with our end of their pipes."""
    _tell("Leaving at once.")
    os._exit(1)
