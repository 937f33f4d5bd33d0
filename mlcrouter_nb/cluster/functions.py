"""The public functions: `up`, and shortcuts to the running cluster."""

from collections.abc import AsyncGenerator, Sequence
from typing import Any

from ..protocol.errors import ArgumentError
from ..router.chunks import Chunk
from ..router.policy import Policy
from . import current
from .ask import Answer
from .cluster import Cluster
from .options import DEFAULT_MODEL
from .starting import Starting
from .tracebacks import ShortTraceback


def up(
    model: str = DEFAULT_MODEL,
    *,
    roles: str | int | None = None,
    engine: str | None = None,
    endpoint_urls: Sequence[str] = (),
    policy: str | Policy | None = None,
    port: int = 0,
    **options: Any,
) -> Starting:
    """Start a cluster and return it once all engines answer; the arguments are those of `Cluster`.

    `cluster = await up(...)`, or `async with up(...) as cluster`, which stops it at the end. With the arguments of the
    cluster that runs, gives that one. Raises `ArgumentError` when another one runs."""
    return Starting(
        _up(
            model,
            roles=roles,
            engine=engine,
            endpoint_urls=endpoint_urls,
            policy=policy,
            port=port,
            **options,
        )
    )


async def _up(model: str, **options: Any) -> Cluster:
    with ShortTraceback():
        wanted = Cluster(model, **options)
        running = find_same(wanted)
        if running is not None:
            await running.ready()
            return running
        return await wanted.start()


def find_same(wanted: Cluster) -> Cluster | None:
    """The running cluster if it is what `wanted` would be, None where none runs; raises `ArgumentError` if it differs.

    A cluster whose engines have all ended is stopped, and counts as none."""
    running = current.find()
    if running is None:
        return None
    if running.dead:
        running.down_blocking(grace=0.0)
        return find_same(wanted)
    if running.options != wanted.options:
        raise ArgumentError(
            f"A cluster with other arguments is running ({running.describe()}): stop it first, with %route down or "
            "await mlcrouter_nb.cluster().down()."
        )
    policy, active = wanted.asked_policy, running.status().policy
    if policy not in (None, running.asked_policy) and active is not None and policy != active.name:
        raise ArgumentError(
            f"The cluster is running with the policy {active.name}: change it with %route use {policy} or "
            f"cluster.use({policy!r})."
        )
    return running


async def ask(prompt: Any = None, **options: Any) -> Answer:
    """`Cluster.ask` on the running cluster."""
    return await current.get().ask(prompt, **options)


def stream(prompt: Any = None, **options: Any) -> AsyncGenerator[Chunk, None]:
    """`Cluster.stream` on the running cluster."""
    return current.get().stream(prompt, **options)


def panel() -> Any:
    """The live panel; it also boots a cluster where none runs."""
    from ..notebook.panel import open_panel

    return open_panel()
