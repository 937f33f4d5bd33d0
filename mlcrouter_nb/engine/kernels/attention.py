"""Batch-invariant causal attention over KV pages.

One rule per query row and head, whatever else is in the batch: scores feature by feature in order, the exact maximum
over all keys, powers of two, their sum by lane (a key's position modulo 16) and then across lanes, values key by key.
Masked lanes are exactly 0. So a row's bits do not depend on the batch, on where its prompt was cut into chunks, on
forks, or on who computed the keys.

Two loops follow that rule. Chunks of a prompt share each load among several rows; single tokens take powers and values
in one walk, where a value is read once for all heads that share it."""

from functools import lru_cache
from typing import Any

from tvm.script import tirx as T

from .vector import LANES, LOG2_E, const, exp2, lanes, reduce_add, reduce_max, splat

_MASKED = -1e30


@lru_cache(None)
def attention(heads: int, kv_heads: int, head_dim: int, rows: int, name: str) -> Any:
    """q `[M, heads, head_dim]` and a layer's pages to o `[M, heads, head_dim]`.

    A row of `chunks` is `(first row, rows, position of the first row, row of the page table)`, int32, for up to `rows`
    query rows; `singles` the same for one row each. `table` `[sequences, longest]` int32 lists each sequence's pages;
    its width also sizes the scores' scratch memory."""
    share = heads // kv_heads  # query heads per kv head
    units = rows * share  # (row, head) pairs of a chunk on one kv head
    vectors = head_dim // LANES
    factor = head_dim**-0.5 * LOG2_E  # powers of two stand for powers of e
    wide = min(vectors, 4)  # value vectors held in registers at a time

    @T.prim_func(s_tir=True)
    def kernel(
        q_handle: T.handle,
        pages_handle: T.handle,
        singles_handle: T.handle,
        chunks_handle: T.handle,
        table_handle: T.handle,
        o_handle: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "op_pattern": 8})
        M = T.int64()
        P = T.int64()
        singles_tasks = T.int64()
        chunks_tasks = T.int64()
        sequences = T.int64()
        longest = T.int64()
        pages_offset = T.int64()
        q = T.match_buffer(q_handle, (M, heads, head_dim), "float32")
        pages = T.match_buffer(
            pages_handle, (P, 2, kv_heads, LANES, head_dim), "float32", elem_offset=pages_offset
        )
        singles = T.match_buffer(singles_handle, (singles_tasks, 4), "int32")
        chunks = T.match_buffer(chunks_handle, (chunks_tasks, 4), "int32")
        table = T.match_buffer(table_handle, (sequences, longest), "int32")
        o = T.match_buffer(o_handle, (M, heads, head_dim), "float32")
        if singles_tasks > 0:
            for t in T.parallel(singles_tasks * kv_heads):
                with T.sblock("single"):
                    T.reads()
                    T.writes()
                    weight = T.sblock_alloc_buffer((longest, share, LANES), "float32")
                    acc = T.sblock_alloc_buffer((share, LANES), "float32")
                    lane = T.sblock_alloc_buffer((share, LANES), "float32")
                    scalar = T.sblock_alloc_buffer((share, 2), "float32")
                    out = T.sblock_alloc_buffer((share, vectors, LANES), "float32")
                    size = T.sblock_alloc_buffer((3,), "int32")  # pages, keys, offset in the table
                    size[0] = singles[t // kv_heads, 2] // 16 + 1
                    size[1] = singles[t // kv_heads, 2] + 1
                    size[2] = singles[t // kv_heads, 3]
                    for i in T.unroll(share):
                        lane[i, lanes(0)] = const(_MASKED)
                    for p in T.serial(size[0]):
                        for i in T.unroll(share):
                            acc[i, lanes(0)] = const(0)
                        for d in T.serial(LANES):
                            for e in T.unroll(vectors):
                                for i in T.unroll(share):
                                    acc[i, lanes(0)] = (
                                        acc[i, lanes(0)]
                                        + splat(
                                            q[
                                                singles[t // kv_heads, 0],
                                                t % kv_heads * share + i,
                                                d * vectors + e,
                                            ]
                                        )
                                        * pages[table[size[2], p], 0, t % kv_heads, d, lanes(e * 16)]
                                    )
                        for i in T.unroll(share):
                            acc[i, lanes(0)] = T.Select(
                                lanes(0) < splat(size[1] - p * 16),
                                acc[i, lanes(0)] * const(factor),
                                const(_MASKED),
                            )
                            weight[p, i, lanes(0)] = acc[i, lanes(0)]
                            lane[i, lanes(0)] = T.max(lane[i, lanes(0)], acc[i, lanes(0)])
                    for i in T.unroll(share):
                        scalar[i, 0] = reduce_max(lane[i, lanes(0)])
                        lane[i, lanes(0)] = const(0)
                        for j in T.unroll(vectors):
                            out[i, j, lanes(0)] = const(0)
                    for p in T.serial(size[0]):
                        for i in T.unroll(share):
                            weight[p, i, lanes(0)] = T.Select(
                                lanes(0) < splat(size[1] - p * 16),
                                exp2(weight[p, i, lanes(0)] - splat(scalar[i, 0])),
                                const(0),
                            )
                            lane[i, lanes(0)] = lane[i, lanes(0)] + weight[p, i, lanes(0)]
                        for r in T.serial(T.min(16, size[1] - p * 16)):
                            for i in T.unroll(share):
                                for j in T.unroll(vectors):
                                    out[i, j, lanes(0)] = (
                                        out[i, j, lanes(0)]
                                        + splat(weight[p, i, r])
                                        * pages[table[size[2], p], 1, t % kv_heads, r, lanes(j * 16)]
                                    )
                    for i in T.unroll(share):
                        scalar[i, 1] = reduce_add(lane[i, lanes(0)])
                        for j in T.unroll(vectors):
                            o[singles[t // kv_heads, 0], t % kv_heads * share + i, lanes(j * 16)] = out[
                                i, j, lanes(0)
                            ] / splat(scalar[i, 1])
        if chunks_tasks > 0:
            for t in T.parallel(chunks_tasks * kv_heads):
                with T.sblock("chunk"):
                    T.reads()
                    T.writes()
                    # Powers, and behind them their sums: small buffers indexed by a variable would not stay in registers.
                    score = T.sblock_alloc_buffer((longest + 1, units, LANES), "float32")
                    acc = T.sblock_alloc_buffer((units, LANES), "float32")
                    lane = T.sblock_alloc_buffer((units, LANES), "float32")
                    top = T.sblock_alloc_buffer((units,), "float32")
                    out = T.sblock_alloc_buffer((rows, wide, LANES), "float32")
                    row = T.sblock_alloc_buffer((rows,), "int32")
                    position = T.sblock_alloc_buffer((rows,), "int32")
                    size = T.sblock_alloc_buffer((3,), "int32")  # pages, keys, offset in the table
                    for i in T.unroll(rows):  # a short task repeats its last row
                        row[i] = chunks[t // kv_heads, 0] + T.min(i, chunks[t // kv_heads, 1] - 1)
                        position[i] = chunks[t // kv_heads, 2] + T.min(i, chunks[t // kv_heads, 1] - 1)
                    size[0] = position[rows - 1] // 16 + 1
                    size[1] = position[rows - 1] + 1
                    size[2] = chunks[t // kv_heads, 3]
                    for i in T.unroll(units):
                        lane[i, lanes(0)] = const(_MASKED)
                    for p in T.serial(size[0]):
                        for i in T.unroll(units):
                            acc[i, lanes(0)] = const(0)
                        for d in T.serial(LANES):
                            for e in T.unroll(vectors):
                                for i in T.unroll(units):
                                    acc[i, lanes(0)] = (
                                        acc[i, lanes(0)]
                                        + splat(
                                            q[
                                                row[i // share],
                                                t % kv_heads * share + i % share,
                                                d * vectors + e,
                                            ]
                                        )
                                        * pages[table[size[2], p], 0, t % kv_heads, d, lanes(e * 16)]
                                    )
                        for i in T.unroll(units):
                            acc[i, lanes(0)] = T.Select(
                                lanes(0) < splat(position[i // share] + 1 - p * 16),
                                acc[i, lanes(0)] * const(factor),
                                const(_MASKED),
                            )
                            score[p, i, lanes(0)] = acc[i, lanes(0)]
                            lane[i, lanes(0)] = T.max(lane[i, lanes(0)], acc[i, lanes(0)])
                    for i in T.unroll(units):
                        top[i] = reduce_max(lane[i, lanes(0)])
                        lane[i, lanes(0)] = const(0)
                    for p in T.serial(size[0]):
                        for i in T.unroll(units):
                            score[p, i, lanes(0)] = T.Select(
                                lanes(0) < splat(position[i // share] + 1 - p * 16),
                                exp2(score[p, i, lanes(0)] - splat(top[i])),
                                const(0),
                            )
                            lane[i, lanes(0)] = lane[i, lanes(0)] + score[p, i, lanes(0)]
                    for i in T.unroll(units):
                        score[size[0], i, 0] = reduce_add(lane[i, lanes(0)])
                    for c in T.serial(vectors // wide):
                        for s in T.serial(share):
                            for i in T.unroll(rows):
                                for j in T.unroll(wide):
                                    out[i, j, lanes(0)] = const(0)
                            for p in T.serial(size[0]):
                                for r in T.serial(T.min(16, size[1] - p * 16)):
                                    for i in T.unroll(rows):
                                        for j in T.unroll(wide):
                                            out[i, j, lanes(0)] = (
                                                out[i, j, lanes(0)]
                                                + splat(score[p, i * share + s, r])
                                                * pages[
                                                    table[size[2], p],
                                                    1,
                                                    t % kv_heads,
                                                    r,
                                                    lanes(c * (wide * 16) + j * 16),
                                                ]
                                            )
                            for i in T.unroll(rows):
                                for j in T.unroll(wide):
                                    o[row[i], t % kv_heads * share + s, lanes(c * (wide * 16) + j * 16)] = (
                                        out[i, j, lanes(0)] / splat(score[size[0], i * share + s, 0])
                                    )

    return kernel.with_attr("global_symbol", name)
