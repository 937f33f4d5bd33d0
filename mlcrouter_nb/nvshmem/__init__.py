"""One-sided writes of KV into the pages of other engines on this machine: NVSHMEM's part, on shared memory."""

from .config import NvshmemConfig
from .segment import sweep, unlink_all, unlink_own

__all__ = ["NvshmemConfig", "sweep", "unlink_all", "unlink_own"]
