"""A cluster: boots engines, watches them, stops them, and keeps the router's loop off the kernel's.

The module is callable: `mlcrouter_nb.cluster()` is the running cluster."""

import sys
from types import ModuleType

from . import current
from .ask import Answer, Submission
from .cluster import Cluster

__all__ = ["Answer", "Cluster", "Submission", "current"]


class _CallableModule(ModuleType):
    def __call__(self) -> Cluster:
        """The running cluster; raises `MlcRouterError` where there is none."""
        return current.get()


sys.modules[__name__].__class__ = _CallableModule
