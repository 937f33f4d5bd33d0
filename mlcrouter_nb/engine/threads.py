"""How many threads the kernels use."""

import os
import platform


def set_threads(count: int | None) -> int:
    """Let the kernels of this process use `count` threads and return how many they use.

    TVM reads `TVM_NUM_THREADS` whenever a kernel starts, but its pool, one for each thread that calls kernels, never
    grows: so call this before the first kernel. None takes the variable, else half the CPUs of an x86 (hyper-threads),
    all of another. Threads are not pinned: TVM would pin those of every engine on a machine to the same cores."""
    os.environ.setdefault("TVM_BIND_THREADS", "0")
    if count is None:
        cpus = os.cpu_count() or 1
        is_x86 = platform.machine() in ("x86_64", "AMD64")
        count = int(os.environ.get("TVM_NUM_THREADS", "0")) or max(1, cpus // 2 if is_x86 else cpus)
    os.environ["TVM_NUM_THREADS"] = str(count)
    return count
