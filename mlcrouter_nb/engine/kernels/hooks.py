"""In place of TVM's attention: give back the rotated queries, for our own attention to use.

TVM attends in parts (this batch's tokens, then each level of forks) and merges them, whose bits depend on the parts.
Here each part answers q itself and merging does nothing, so q is what the cache returns."""

from typing import Any

from tvm.script import tirx as T

from .vector import LANES, lanes


def attention_hooks(heads: int, head_dim: int) -> dict[str, Any]:
    """TVM's attention functions by name, with the arguments that its cache passes: each sets o to q."""
    vectors = head_dim // LANES

    @T.prim_func(s_tir=True)
    def ragged_hook(
        q_handle: T.handle,
        q_indptr: T.handle,
        k: T.handle,
        v: T.handle,
        kv_indptr: T.handle,
        q_position: T.handle,
        k_offset: T.handle,
        o_handle: T.handle,
        lse: T.handle,
        causal: T.int32,
        rotary_mode: T.int32,
        rotary_scale: T.float32,
        rotary_theta: T.float32,
        scale: T.float32,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "global_symbol": "ragged_hook"})
        M = T.int64()
        q = T.match_buffer(q_handle, (M, heads, head_dim), "float32")
        o = T.match_buffer(o_handle, (M, heads, head_dim), "float32")
        for m, h in T.grid(M, heads):
            with T.sblock("head"):
                T.reads()
                T.writes()
                for j in T.unroll(vectors):
                    o[m, h, lanes(j * 16)] = q[m, h, lanes(j * 16)]

    @T.prim_func(s_tir=True)
    def paged_hook(
        q_handle: T.handle,
        q_indptr: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        k_offset: T.handle,
        q_position: T.handle,
        o_handle: T.handle,
        lse: T.handle,
        causal: T.int32,
        rotary_mode: T.int32,
        rotary_scale: T.float32,
        rotary_theta: T.float32,
        scale: T.float32,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "global_symbol": "paged_hook"})
        M = T.int64()
        q = T.match_buffer(q_handle, (M, heads, head_dim), "float32")
        o = T.match_buffer(o_handle, (M, heads, head_dim), "float32")
        for m, h in T.grid(M, heads):
            with T.sblock("head"):
                T.reads()
                T.writes()
                for j in T.unroll(vectors):
                    o[m, h, lanes(j * 16)] = q[m, h, lanes(j * 16)]

    @T.prim_func(s_tir=True)
    def decode_hook(
        q_handle: T.handle,
        pages: T.handle,
        page_indptr: T.handle,
        page_values: T.handle,
        length_info: T.handle,
        k_offset: T.handle,
        q_position: T.handle,
        o_handle: T.handle,
        lse: T.handle,
        rotary_mode: T.int32,
        rotary_scale: T.float32,
        rotary_theta: T.float32,
        scale: T.float32,
    ):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "global_symbol": "decode_hook"})
        M = T.int64()
        q = T.match_buffer(q_handle, (M, heads, head_dim), "float32")
        o = T.match_buffer(o_handle, (M, heads, head_dim), "float32")
        for m, h in T.grid(M, heads):
            with T.sblock("head"):
                T.reads()
                T.writes()
                for j in T.unroll(vectors):
                    o[m, h, lanes(j * 16)] = q[m, h, lanes(j * 16)]

    @T.prim_func(s_tir=True)
    def merge_hook(o: T.handle, lse: T.handle, other_o: T.handle, other_lse: T.handle):
        T.func_attr({"tirx.is_scheduled": True, "tirx.noalias": True, "global_symbol": "merge_hook"})
        T.evaluate(0)

    return {
        "ragged_hook": ragged_hook,
        "paged_hook": paged_hook,
        "decode_hook": decode_hook,
        "merge_hook": merge_hook,
    }
