"""4-bit and 8-bit weights times int8 activations with AVX512-VNNI's `vpdpbusd`."""

from functools import lru_cache
from typing import Any

import numpy as np
from tvm.script import tirx as T
from tvm.target import codegen

from .vector import GROUP, LANES, const, lanes, splat

SCALE_DTYPE = "float16"
ACTIVATION_DTYPE = "int8"
_VPDPBUSD = codegen.llvm_lookup_intrinsic_id("llvm.x86.avx512.vpdpbusd.512")


def packed_width(bits: int) -> int:
    """Bytes of one group (32 columns) of one block (16 rows)."""
    return LANES * GROUP * bits // 8


def pack(quants: np.ndarray) -> np.ndarray:
    """`[rows, groups, bytes]` of GGUF to `[rows / 16, groups, bytes * 16]`: four bytes of each of 16 rows in turn."""
    rows, groups, width = quants.shape
    blocks = quants.reshape(rows // LANES, LANES, groups, width // 4, 4)
    return np.ascontiguousarray(blocks.transpose(0, 2, 3, 1, 4)).reshape(rows // LANES, groups, width * LANES)


def _as_bytes(vector: Any) -> Any:
    return T.reinterpret(vector, dtype="int8x64")


def _low_nibbles(vector: Any) -> Any:
    return _as_bytes(T.bitwise_and(vector, T.broadcast(T.uint8(15), 64)))


def _high_nibbles(vector: Any) -> Any:
    shifted = T.shift_right(T.reinterpret(vector, dtype="uint32x16"), splat(T.uint32(4)))
    return _as_bytes(T.bitwise_and(shifted, splat(T.uint32(0x0F0F0F0F))))


def _four_activations(vector: Any) -> Any:
    """Four int8 activations, the same in every lane."""
    return _as_bytes(splat(T.reinterpret(vector, dtype="int32")))


def _dot(total: Any, weights: Any, activations: Any) -> Any:
    return T.call_llvm_pure_intrin(_VPDPBUSD, total, weights, activations, dtype="int32x16")


@lru_cache(None)
def matmul(rows: int, columns: int, bits: int, tile: int, residual: bool, name: str) -> Any:
    """`y[M, rows] = W x (+ r)` for M a multiple of `tile`; without a residual, r is x's scales once more, unread.

    x is int8 with a scale and a scaled sum per group of 32 columns. W is packed by `pack`, with float16 scale and
    minimum per group; an 8-bit minimum is always -128 scales and not read. A row's bits do not depend on M or on
    `tile`: each row has accumulators of its own, fed in the same order."""
    blocks, groups, width = rows // LANES, columns // GROUP, packed_width(bits)
    high = LANES if bits == 4 else 256  # where the second half of a group's weights starts: nibble or byte

    @T.prim_func(s_tir=True)
    def kernel(
        x_handle: T.handle,
        scale_handle: T.handle,
        sum_handle: T.handle,
        w: T.Buffer((blocks, groups, width), "uint8"),
        w_scale: T.Buffer((blocks, groups, LANES), "float16"),
        w_min: T.Buffer((blocks, groups, LANES), "float16"),
        r_handle: T.handle,
        y_handle: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "op_pattern": 8})
        M = T.int64()
        x = T.match_buffer(x_handle, (M, columns), "int8")
        x_scale = T.match_buffer(scale_handle, (M, groups), "float32")
        x_sum = T.match_buffer(sum_handle, (M, groups), "float32")
        r = T.match_buffer(r_handle, (M, rows if residual else groups), "float32")
        y = T.match_buffer(y_handle, (M, rows), "float32")
        for block in T.parallel(blocks):
            with T.sblock("block"):
                T.reads()
                T.writes()
                acc = T.sblock_alloc_buffer((tile, LANES), "float32")
                dot = T.sblock_alloc_buffer((tile, LANES), "int32")
                for step in T.serial(M // tile):
                    for m in T.unroll(tile):
                        acc[m, lanes(0)] = const(0)
                    for g in T.serial(groups):
                        for m in T.unroll(tile):
                            dot[m, lanes(0)] = splat(T.int32(0))
                        for v in T.unroll(4):
                            for m in T.unroll(tile):
                                dot[m, lanes(0)] = _dot(
                                    dot[m, lanes(0)],
                                    _low_nibbles(w[block, g, T.ramp(v * 64, 1, 64)])
                                    if bits == 4
                                    else _as_bytes(w[block, g, T.ramp(v * 64, 1, 64)]),
                                    _four_activations(x[step * tile + m, T.ramp(g * 32 + v * 4, 1, 4)]),
                                )
                            for m in T.unroll(tile):
                                dot[m, lanes(0)] = _dot(
                                    dot[m, lanes(0)],
                                    _high_nibbles(w[block, g, T.ramp(v * 64, 1, 64)])
                                    if bits == 4
                                    else _as_bytes(w[block, g, T.ramp(v * 64 + high, 1, 64)]),
                                    _four_activations(x[step * tile + m, T.ramp(g * 32 + 16 + v * 4, 1, 4)]),
                                )
                        for m in T.unroll(tile):
                            acc[m, lanes(0)] = (
                                acc[m, lanes(0)]
                                + T.Cast("float32x16", w_scale[block, g, lanes(0)])
                                * (
                                    T.Cast("float32x16", dot[m, lanes(0)])
                                    * splat(x_scale[step * tile + m, g])
                                )
                                + T.Cast("float32x16", w_min[block, g, lanes(0)])
                                * splat(x_sum[step * tile + m, g])
                            )
                    for m in T.unroll(tile):
                        if residual:
                            y[step * tile + m, lanes(block * LANES)] = (
                                acc[m, lanes(0)] + r[step * tile + m, lanes(block * LANES)]
                            )
                        else:
                            y[step * tile + m, lanes(block * LANES)] = acc[m, lanes(0)]

    return kernel.with_attr("global_symbol", name)
