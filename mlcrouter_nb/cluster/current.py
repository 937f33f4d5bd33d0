"""The clusters of this process: which one `mlcrouter_nb.cluster()` means, and that none outlives the interpreter."""

import atexit
import contextlib
import os
from typing import TYPE_CHECKING

from ..protocol.errors import MlcRouterError

if TYPE_CHECKING:
    from .cluster import Cluster

_running: list["Cluster"] = []


def find() -> "Cluster | None":
    """The cluster that was started last and still runs, or boots."""
    return next((cluster for cluster in reversed(_running) if not cluster.stopping), None)


def get() -> "Cluster":
    """The cluster that was started last and still runs; raises `MlcRouterError` where there is none."""
    cluster = find()
    if cluster is None:
        raise MlcRouterError("No cluster is running: start one with %route up or await mlcrouter_nb.up().")
    return cluster


def add(cluster: "Cluster") -> None:
    """Remember a cluster from the moment it starts to boot."""
    if cluster not in _running:
        _running.append(cluster)


def discard(cluster: "Cluster") -> None:
    """Forget a cluster that has stopped."""
    if cluster in _running:
        _running.remove(cluster)


def _stop_all(process: int = os.getpid()) -> None:
    if os.getpid() != process:  # a fork of the process that owns the engines
        return
    for cluster in list(_running):
        with contextlib.suppress(Exception):
            cluster.down_blocking()


atexit.register(_stop_all)
