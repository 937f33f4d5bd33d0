"""What goes before a matmul: norm or gate, then rounding to 8 bits with a scale per group of 32."""

from functools import lru_cache
from typing import Any

from tvm.script import tirx as T

from .vector import (
    GROUP,
    LANES,
    absolute,
    const,
    lanes,
    reduce_add,
    reduce_add_int,
    reduce_max,
    silu,
    splat,
)


@lru_cache(None)
def quantize(columns: int, mode: str, epsilon: float, dtype: str, name: str) -> Any:
    """x `[M, columns]` float32 to -127..127 `[M, columns]` in `dtype`, scales and scaled sums `[M, columns / 32]`.

    `mode` "rms_norm": `x * rsqrt(mean(x**2) + epsilon) * weight` first; "silu_gate": `silu(x[:, :columns]) *
    x[:, columns:]` of an x twice as wide; "plain": x itself. The weight is read by "rms_norm" only."""
    groups = columns // GROUP
    width = 2 * columns if mode == "silu_gate" else columns

    @T.prim_func(s_tir=True)
    def kernel(
        x_handle: T.handle,
        weight_handle: T.handle,
        q_handle: T.handle,
        scale_handle: T.handle,
        sum_handle: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "op_pattern": 8})
        M = T.int64()
        weights = T.int64()
        x = T.match_buffer(x_handle, (M, width), "float32")
        weight = T.match_buffer(weight_handle, (weights,), "float32")
        q = T.match_buffer(q_handle, (M, columns), dtype)
        scale = T.match_buffer(scale_handle, (M, groups), "float32")
        total = T.match_buffer(sum_handle, (M, groups), "float32")
        for m in T.parallel(M):
            with T.sblock("row"):
                T.reads()
                T.writes()
                squares = T.sblock_alloc_buffer((LANES,), "float32")
                scalar = T.sblock_alloc_buffer((4,), "float32")
                value = T.sblock_alloc_buffer((2, LANES), "float32")
                rounded = T.sblock_alloc_buffer((2, LANES), "int32")
                if mode == "rms_norm":
                    squares[lanes(0)] = const(0)
                    for k in T.serial(columns // LANES):
                        squares[lanes(0)] = squares[lanes(0)] + x[m, lanes(k * 16)] * x[m, lanes(k * 16)]
                    scalar[0] = T.float32(1) / T.sqrt(
                        reduce_add(squares[lanes(0)]) / T.float32(columns) + T.float32(epsilon)
                    )
                for g in T.serial(groups):
                    for j in T.unroll(2):
                        if mode == "rms_norm":
                            value[j, lanes(0)] = (
                                x[m, lanes(g * 32 + j * 16)]
                                * splat(scalar[0])
                                * weight[lanes(g * 32 + j * 16)]
                            )
                        elif mode == "silu_gate":
                            value[j, lanes(0)] = (
                                silu(x[m, lanes(g * 32 + j * 16)]) * x[m, lanes(columns + g * 32 + j * 16)]
                            )
                        else:
                            value[j, lanes(0)] = x[m, lanes(g * 32 + j * 16)]
                    scalar[1] = reduce_max(T.max(absolute(value[0, lanes(0)]), absolute(value[1, lanes(0)])))
                    scalar[2] = T.if_then_else(
                        scalar[1] > T.float32(0), T.float32(127) / scalar[1], T.float32(0)
                    )
                    scalar[3] = scalar[1] * T.float32(1 / 127)
                    for j in T.unroll(2):
                        rounded[j, lanes(0)] = T.Cast(
                            "int32x16", T.nearbyint(value[j, lanes(0)] * splat(scalar[2]))
                        )
                        q[m, lanes(g * 32 + j * 16)] = T.Cast(f"{dtype}x16", rounded[j, lanes(0)])
                    scale[m, g] = scalar[3]
                    total[m, g] = scalar[3] * T.Cast(
                        "float32", reduce_add_int(rounded[0, lanes(0)] + rounded[1, lanes(0)])
                    )

    return kernel.with_attr("global_symbol", name)
