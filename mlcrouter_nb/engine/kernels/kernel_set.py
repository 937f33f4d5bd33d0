"""Which kernels fit this CPU."""

import platform
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from types import ModuleType
from typing import Any

import tvm
from tvm.target import codegen

from ...protocol.errors import ArgumentError
from . import matmul_generic, matmul_vnni
from .hooks import attention_hooks
from .paging import copy_page, copy_rows, kv_append, rope_split

_VNNI_FLAGS = frozenset(
    [
        "avx512f",
        "avx512bw",
        "avx512cd",
        "avx512dq",
        "avx512vl",
        "avx512_vnni",
        "avx2",
        "bmi1",
        "bmi2",
        "f16c",
        "fma",
    ]
)
_HASWELL_FLAGS = frozenset(["avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"])


@dataclass(frozen=True)
class KernelSet:
    """A matmul, the sizes that suit it and the CPU that LLVM compiles for; all else is common to all sets."""

    name: str
    cpu: str
    row_tiles: tuple[int, ...]  # rows that a matmul handles at once, ascending; one compiled model each
    attention_rows: int  # query rows of a chunk that share the attention's loads, at most
    matmul_module: ModuleType

    @property
    def matmul(self) -> Callable[..., Any]:
        """See `matmul_vnni.matmul`."""
        return self.matmul_module.matmul

    @property
    def pack(self) -> Callable[..., Any]:
        """See `matmul_vnni.pack`."""
        return self.matmul_module.pack

    @property
    def packed_width(self) -> Callable[[int], int]:
        """See `matmul_vnni.packed_width`."""
        return self.matmul_module.packed_width

    @property
    def scale_dtype(self) -> str:
        """Of a weight's scale and minimum: float16 or float32."""
        return self.matmul_module.SCALE_DTYPE

    @property
    def activation_dtype(self) -> str:
        """Of quantised activations, which are always 8 bits: int8 or int16."""
        return self.matmul_module.ACTIVATION_DTYPE

    @property
    def target(self) -> tvm.target.Target:
        """TVM's target for `cpu`."""
        return tvm.target.Target({"kind": "llvm", "mcpu": self.cpu})

    def cache_kernels(self, heads: int, kv_heads: int, head_dim: int) -> dict[str, Any]:
        """The kernels that the KV cache calls, by name."""
        return {
            "rope_split": rope_split(heads, kv_heads, head_dim),
            "kv_append": kv_append(kv_heads, head_dim),
            "copy_rows": copy_rows(kv_heads, head_dim),
            "copy_page": copy_page(kv_heads, head_dim),
            **attention_hooks(heads, head_dim),
        }


@lru_cache(None)
def cpu_flags() -> frozenset[str]:
    """The CPU's feature flags as Linux names them; empty where it does not say."""
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith(("flags", "Features")):
                return frozenset(line.partition(":")[2].split())
    except OSError:
        pass
    return frozenset()


def _generic_cpu() -> str:
    """A CPU name whose instructions this machine surely has; LLVM's guess where the flags do not tell."""
    if platform.machine() in ("x86_64", "AMD64"):
        return "haswell" if cpu_flags() >= _HASWELL_FLAGS else "x86-64"
    return str(codegen.llvm_get_system_cpu())


def select_kernels(name: str = "auto") -> KernelSet:
    """The kernel set `name`: "avx512-vnni", "generic", or "auto" for the fastest that runs here.

    Raises `ArgumentError` for another name, or for one that this CPU lacks the instructions for."""
    has_vnni = cpu_flags() >= _VNNI_FLAGS
    if name == "auto":
        name = "avx512-vnni" if has_vnni else "generic"
    if name == "avx512-vnni":
        if not has_vnni:
            missing = ", ".join(sorted(_VNNI_FLAGS - cpu_flags()))
            raise ArgumentError(
                f"This CPU cannot run the kernels avx512-vnni (it lacks {missing}); use generic."
            )
        return KernelSet(name, "cascadelake", (1, 2, 4, 8), 4, matmul_vnni)
    if name == "generic":
        return KernelSet(name, _generic_cpu(), (1, 2, 4), 2, matmul_generic)
    raise ArgumentError(f"There are no kernels {name!r}; choose auto, avx512-vnni or generic.")
