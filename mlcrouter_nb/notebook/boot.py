"""`%route up` and `%route down`."""

import argparse
import time
from typing import Any

from ..cluster import Cluster
from ..cluster.functions import find_same
from ..protocol.errors import ArgumentError, BootError, MlcRouterError
from .display.boot import BootDisplay
from .failures import Interrupted
from .report import show_line
from .session import Session


def up(session: Session, args: argparse.Namespace) -> Cluster:
    """Boot a cluster and return it; with the arguments of the running one, return that."""
    session.let_go()
    model, options = boot_options(session, args)
    running = session.cluster
    if running is None or not nothing_asked(args):
        cluster = session.new_cluster(model, **options)
        running = find_same(cluster)
        if running is None:
            start(cluster)
            session.catch_up(cluster)
            return cluster
    wait_for(running)
    return running


def boot_options(session: Session, args: argparse.Namespace) -> tuple[str, dict[str, Any]]:
    """The model and the cluster's options: what the line says, else what `%config MlcRouter` says."""
    config = session.config
    options: dict[str, Any] = {
        "engine": args.engine or (None if args.endpoint_urls else config.engine or None),
        "endpoint_urls": args.endpoint_urls,
        "host": args.host,
        "port": args.port,
        "policy": args.policy,
        "tokenizer": args.tokenizer,
        "prefix_cache": not args.no_prefix_cache,
    }
    if args.roles or not args.endpoint_urls:
        options["roles"] = args.roles or config.roles
    return args.model or config.model, options


def nothing_asked(args: argparse.Namespace) -> bool:
    """Whether the line is a bare `%route up`, which a running cluster of any kind satisfies."""
    plain = COMMAND_DEFAULTS
    return all(getattr(args, name) == value for name, value in plain.items())


COMMAND_DEFAULTS: dict[str, Any] = {
    "model": None, "roles": None, "engine": None, "endpoint_urls": [], "policy": None, "host": "127.0.0.1",
    "port": 0, "tokenizer": None, "no_prefix_cache": False,
}  # fmt: skip


def start(cluster: Cluster) -> Cluster:
    """Boot with progress under the cell; an interrupt or a failure leaves nothing running."""
    display = BootDisplay(title_of(cluster))
    try:
        cluster.start_blocking(display.update)
    except KeyboardInterrupt:
        display.failed("interrupted")
        raise Interrupted("the boot; everything that had started is stopped.") from None
    except MlcRouterError as error:
        display.failed("failed")
        if not isinstance(error, ArgumentError):
            error.add_note("Everything that had started is stopped.")
        raise
    except BaseException:
        display.failed("failed")
        raise
    display.done(cluster.status())
    return cluster


def wait_for(cluster: Cluster) -> None:
    """Show the boot that somebody else began, the panel for instance, until it ends."""
    if cluster.status().state != "booting":
        show_line(f"{title_of(cluster)}: already running")
        return
    display = BootDisplay(title_of(cluster))
    while cluster.status().state == "booting":
        display.update(cluster.status())
        time.sleep(0.1)
    if cluster.status().state != "ready":
        display.failed("failed")
        raise BootError(
            "the boot that had begun elsewhere, in the panel for instance, failed or was stopped."
        )
    display.done(cluster.status())


def title_of(cluster: Cluster) -> str:
    """What boots: `smollm2-135m on cpu`."""
    return f"{cluster.options.model} on {cluster.options.kind}"


def down(session: Session, args: argparse.Namespace) -> None:
    """Stop the cluster; without one all is as asked."""
    cluster = session.cluster
    if cluster is None:
        print("No cluster is running.")
        return
    cluster.down_blocking()
    print("The cluster is stopped.")
