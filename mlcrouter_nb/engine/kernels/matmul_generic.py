"""4-bit and 8-bit weights times int8 activations in plain 16-bit arithmetic, for any CPU that LLVM knows.

Sixteen products of a nibble (0..15) and an activation (-127..127) stay below 2**15, so they add up in int16;
an 8-bit weight is two nibbles, the high one worth 16 times the low one. The integer sums are exact."""

from functools import lru_cache
from typing import Any

import numpy as np
from tvm.script import tirx as T

from .vector import GROUP, LANES, const, lanes, splat

SCALE_DTYPE = "float32"  # not every CPU converts float16 by itself
ACTIVATION_DTYPE = "int16"  # holds what int8 would; one load spreads it over all lanes


def packed_width(bits: int) -> int:
    """Bytes of one group (32 columns) of one block (16 rows)."""
    return LANES * GROUP * bits // 8


def pack(quants: np.ndarray) -> np.ndarray:
    """`[rows, groups, bytes]` of GGUF to `[rows / 16, groups, bytes * 16]`: one byte of each of 16 rows in turn."""
    rows, groups, width = quants.shape
    blocks = quants.reshape(rows // LANES, LANES, groups, width).transpose(0, 2, 3, 1)
    return np.ascontiguousarray(blocks).reshape(rows // LANES, groups, width * LANES)


def _low_nibbles(vector: Any) -> Any:
    return T.Cast("int16x16", T.bitwise_and(vector, splat(T.uint8(15))))


def _high_nibbles(vector: Any) -> Any:
    return T.Cast("int16x16", T.shift_right(vector, splat(T.uint8(4))))


def _activation(value: Any) -> Any:
    return splat(value)


@lru_cache(None)
def matmul(rows: int, columns: int, bits: int, tile: int, residual: bool, name: str) -> Any:
    """`y[M, rows] = W x (+ r)`; the same operands, order and sums as in `matmul_vnni`, but for the packing
    and for x, which is int16."""
    blocks, groups, width = rows // LANES, columns // GROUP, packed_width(bits)
    halves = bits // 4  # runs of 16 bytes: a 4-bit group is one of them, an 8-bit group two
    partner = LANES if bits == 4 else 0  # the column of a byte's high nibble, relative to the low one's
    weight = 1 if bits == 4 else 16  # what a high nibble is worth

    @T.prim_func(s_tir=True)
    def kernel(
        x_handle: T.handle,
        scale_handle: T.handle,
        sum_handle: T.handle,
        w: T.Buffer((blocks, groups, width), "uint8"),
        w_scale: T.Buffer((blocks, groups, LANES), "float32"),
        w_min: T.Buffer((blocks, groups, LANES), "float32"),
        r_handle: T.handle,
        y_handle: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "op_pattern": 8})
        M = T.int64()
        x = T.match_buffer(x_handle, (M, columns), "int16")
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
                low = T.sblock_alloc_buffer((tile, LANES), "int16")
                high = T.sblock_alloc_buffer((tile, LANES), "int16")
                for step in T.serial(M // tile):
                    for m in T.unroll(tile):
                        acc[m, lanes(0)] = const(0)
                    for g in T.serial(groups):
                        for m in T.unroll(tile):
                            dot[m, lanes(0)] = splat(T.int32(0))
                        for half in T.unroll(halves):
                            for m in T.unroll(tile):
                                low[m, lanes(0)] = splat(T.int16(0))
                                high[m, lanes(0)] = splat(T.int16(0))
                            for j in T.unroll(16):
                                for m in T.unroll(tile):
                                    low[m, lanes(0)] = low[m, lanes(0)] + _low_nibbles(
                                        w[block, g, lanes(half * 256 + j * 16)]
                                    ) * _activation(x[step * tile + m, g * 32 + half * 16 + j])
                                    high[m, lanes(0)] = high[m, lanes(0)] + _high_nibbles(
                                        w[block, g, lanes(half * 256 + j * 16)]
                                    ) * _activation(x[step * tile + m, g * 32 + half * 16 + j + partner])
                            for m in T.unroll(tile):
                                dot[m, lanes(0)] = (
                                    dot[m, lanes(0)]
                                    + T.Cast("int32x16", low[m, lanes(0)])
                                    + T.Cast("int32x16", high[m, lanes(0)]) * splat(T.int32(weight))
                                )
                        for m in T.unroll(tile):
                            acc[m, lanes(0)] = (
                                acc[m, lanes(0)]
                                + w_scale[block, g, lanes(0)]
                                * (
                                    T.Cast("float32x16", dot[m, lanes(0)])
                                    * splat(x_scale[step * tile + m, g])
                                )
                                + (
                                    w_min[block, g, lanes(0)]
                                    if bits == 4
                                    else w_scale[block, g, lanes(0)] * const(-128)
                                )
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
