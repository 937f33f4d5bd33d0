"""What the KV cache calls for each layer: rope and split, append, copy.

A layer's pages are `[pages, 2, kv heads, 16, head_dim]` float32. Keys lie transposed in theirs, as
`[head_dim][16]`, so that one load takes one feature of 16 keys; values lie row by row."""

from typing import Any

from tvm.script import tirx as T

from .vector import LANES, lanes

PAGE_SIZE = LANES


def rope_split(heads: int, kv_heads: int, head_dim: int) -> Any:
    """qkv `[M, heads + 2 kv_heads, head_dim]` to q, k (rotated by halves) and v.

    `table[position, 0]` holds cosines, `table[position, 1]` sines, each head_dim / 2 wide."""
    half = head_dim // 2

    @T.prim_func(s_tir=True)
    def kernel(
        qkv_handle: T.handle,
        position_handle: T.handle,
        q_handle: T.handle,
        k_handle: T.handle,
        v_handle: T.handle,
        table_handle: T.handle,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "global_symbol": "rope_split"})
        M = T.int64()
        context = T.int64()
        offset = T.int64()
        qkv = T.match_buffer(qkv_handle, (M, heads + 2 * kv_heads, head_dim), "float32")
        position = T.match_buffer(position_handle, (M,), "int32", elem_offset=offset)
        q = T.match_buffer(q_handle, (M, heads, head_dim), "float32")
        k = T.match_buffer(k_handle, (M, kv_heads, head_dim), "float32")
        v = T.match_buffer(v_handle, (M, kv_heads, head_dim), "float32")
        table = T.match_buffer(table_handle, (context, 2, half), "float32")
        for m in T.serial(M):
            with T.sblock("row"):
                T.reads()
                T.writes()
                for h in T.serial(heads):
                    for j in T.unroll(half // LANES):
                        q[m, h, lanes(j * 16)] = (
                            qkv[m, h, lanes(j * 16)] * table[position[m], 0, lanes(j * 16)]
                            - qkv[m, h, lanes(half + j * 16)] * table[position[m], 1, lanes(j * 16)]
                        )
                        q[m, h, lanes(half + j * 16)] = (
                            qkv[m, h, lanes(half + j * 16)] * table[position[m], 0, lanes(j * 16)]
                            + qkv[m, h, lanes(j * 16)] * table[position[m], 1, lanes(j * 16)]
                        )
                for h in T.serial(kv_heads):
                    for j in T.unroll(half // LANES):
                        k[m, h, lanes(j * 16)] = (
                            qkv[m, heads + h, lanes(j * 16)] * table[position[m], 0, lanes(j * 16)]
                            - qkv[m, heads + h, lanes(half + j * 16)] * table[position[m], 1, lanes(j * 16)]
                        )
                        k[m, h, lanes(half + j * 16)] = (
                            qkv[m, heads + h, lanes(half + j * 16)] * table[position[m], 0, lanes(j * 16)]
                            + qkv[m, heads + h, lanes(j * 16)] * table[position[m], 1, lanes(j * 16)]
                        )
                    for j in T.unroll(head_dim // LANES):
                        v[m, h, lanes(j * 16)] = qkv[m, heads + kv_heads + h, lanes(j * 16)]

    return kernel


def kv_append(kv_heads: int, head_dim: int) -> Any:
    """k and v `[M, kv_heads, head_dim]` into the pages; row m goes to slot `position[m]` (page * 16 + row), -1: nowhere."""
    vectors = head_dim // LANES  # of a value; also the number of key features in one row of a page

    @T.prim_func(s_tir=True)
    def kernel(pages_handle: T.handle, k_handle: T.handle, v_handle: T.handle, position_handle: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "global_symbol": "kv_append"})
        M = T.int64()
        P = T.int64()
        offset = T.int64()
        pages_offset = T.int64()
        pages = T.match_buffer(
            pages_handle, (P, 2, kv_heads, PAGE_SIZE, head_dim), "float32", elem_offset=pages_offset
        )
        k = T.match_buffer(k_handle, (M, kv_heads, head_dim), "float32")
        v = T.match_buffer(v_handle, (M, kv_heads, head_dim), "float32")
        position = T.match_buffer(position_handle, (M,), "int32", elem_offset=offset)
        for m in T.serial(M):
            with T.sblock("row"):
                T.reads()
                T.writes()
                if position[m] != -1:
                    for h in T.serial(kv_heads):
                        for d in T.serial(head_dim):
                            pages[
                                position[m] // 16, 0, h, d // vectors, d % vectors * 16 + position[m] % 16
                            ] = k[m, h, d]
                        for j in T.unroll(vectors):
                            pages[position[m] // 16, 1, h, position[m] % 16, lanes(j * 16)] = v[
                                m, h, lanes(j * 16)
                            ]

    return kernel


def copy_rows(kv_heads: int, head_dim: int) -> Any:
    """Rows of one set of pages to another's: slot `source[m]` to slot `target[m]`, -1: nowhere."""
    vectors = head_dim // LANES  # of a value; also the number of key features in one row of a page

    @T.prim_func(s_tir=True)
    def kernel(to_handle: T.handle, from_handle: T.handle, target_handle: T.handle, source_handle: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "global_symbol": "copy_rows"})
        M = T.int64()
        P = T.int64()
        Q = T.int64()
        to_offset = T.int64()
        from_offset = T.int64()
        target_offset = T.int64()
        source_offset = T.int64()
        to = T.match_buffer(
            to_handle, (P, 2, kv_heads, PAGE_SIZE, head_dim), "float32", elem_offset=to_offset
        )
        fro = T.match_buffer(
            from_handle, (Q, 2, kv_heads, PAGE_SIZE, head_dim), "float32", elem_offset=from_offset
        )
        target = T.match_buffer(target_handle, (M,), "int32", elem_offset=target_offset)
        source = T.match_buffer(source_handle, (M,), "int32", elem_offset=source_offset)
        for m in T.serial(M):
            with T.sblock("row"):
                T.reads()
                T.writes()
                if target[m] != -1:
                    for h in T.serial(kv_heads):
                        for d in T.serial(head_dim):
                            to[target[m] // 16, 0, h, d // vectors, d % vectors * 16 + target[m] % 16] = fro[
                                source[m] // 16, 0, h, d // vectors, d % vectors * 16 + source[m] % 16
                            ]
                        for j in T.unroll(vectors):
                            to[target[m] // 16, 1, h, target[m] % 16, lanes(j * 16)] = fro[
                                source[m] // 16, 1, h, source[m] % 16, lanes(j * 16)
                            ]

    return kernel


def copy_page(kv_heads: int, head_dim: int) -> Any:
    """All of page `source` to page `target`; how many rows of it count is the caller's business."""
    vectors = head_dim // LANES

    @T.prim_func(s_tir=True)
    def kernel(pages_handle: T.handle, source: T.int64, target: T.int64, rows: T.int64):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "global_symbol": "copy_page"})
        P = T.int64()
        offset = T.int64()
        pages = T.match_buffer(
            pages_handle, (P, 2, kv_heads, PAGE_SIZE, head_dim), "float32", elem_offset=offset
        )
        for part in T.serial(2):
            for h in T.serial(kv_heads):
                for row in T.serial(PAGE_SIZE):
                    with T.sblock("row"):
                        T.reads()
                        T.writes()
                        for j in T.unroll(vectors):
                            pages[target, part, h, row, lanes(j * 16)] = pages[
                                source, part, h, row, lanes(j * 16)
                            ]

    return kernel
