"""Program LLM serving from a notebook: a cluster of engines, routing policies in cells, and a live panel."""

import importlib
from typing import TYPE_CHECKING, Any

from .version import __version__

if TYPE_CHECKING:
    from . import cluster
    from .cluster import Cluster
    from .cluster.functions import ask, panel, stream, up
    from .protocol.errors import MlcRouterError
    from .router.parameters import choice, slider, switch

__all__ = [
    "Cluster",
    "MlcRouterError",
    "__version__",
    "ask",
    "choice",
    "cluster",
    "panel",
    "slider",
    "stream",
    "switch",
    "up",
]

# Where each public name lives; it is imported when first used, so that `import mlcrouter_nb` costs nothing.
_HOMES = {
    "Cluster": "cluster.cluster",
    "ask": "cluster.functions",
    "panel": "cluster.functions",
    "stream": "cluster.functions",
    "up": "cluster.functions",
    "MlcRouterError": "protocol.errors",
    "choice": "router.parameters",
    "slider": "router.parameters",
    "switch": "router.parameters",
}


def __getattr__(name: str) -> Any:
    if name == "cluster":  # a package that can be called
        return importlib.import_module(".cluster", __name__)
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(f".{home}", __name__), name)


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def load_ipython_extension(ipython: Any) -> None:
    """`%load_ext mlcrouter_nb`."""
    from .notebook import load_ipython_extension

    load_ipython_extension(ipython)


def unload_ipython_extension(ipython: Any) -> None:
    """`%unload_ext mlcrouter_nb`: takes back every hook and stops what runs."""
    from .notebook import unload_ipython_extension

    unload_ipython_extension(ipython)
