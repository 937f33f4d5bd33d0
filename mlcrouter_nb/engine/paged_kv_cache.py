"""TVM's PagedKVCache: pages, forks, `popn`, KV transfer. Attention itself is the model's (`kernels.attention`); this
module tells it which pages each sequence has."""

from dataclasses import dataclass
from typing import Any

import numpy as np
import tvm
import tvm_ffi
from tvm.runtime import ShapeTuple

from ..models.gguf import ModelConfig
from .kernels.paging import PAGE_SIZE

_ROPE_NORMAL = 1
_NO_SEND = 2**62  # a window that begins behind every position: nothing is sent


def _builtin(name: str) -> Any:
    return tvm.get_global_func(f"vm.builtin.{name}")


def _tensor(values: np.ndarray) -> Any:
    return tvm.runtime.tensor(values, tvm.cpu())


def rope_table(config: ModelConfig) -> np.ndarray:
    """Cosines and sines `[context, 2, head_dim / 2]` float32."""
    frequencies = config.rope_theta ** (-np.arange(0, config.head_dim, 2, dtype=np.float64) / config.head_dim)
    angles = np.arange(config.context_length)[:, None] * frequencies
    return np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)


@dataclass(frozen=True)
class Layout:
    """A batch for the attention kernel, int32 tensors: tasks of one row, tasks of several, pages by sequence."""

    singles: Any
    chunks: Any
    table: Any


class PagedKVCache:
    """Sequences in pages of 16 tokens. Callers see to capacity first: TVM leaks pages where it runs out of them."""

    def __init__(
        self,
        config: ModelConfig,
        kernels: Any,
        *,
        attention_rows: int,
        max_num_sequence: int,
        max_total_tokens: int,
        chunk_size: int,
        threads: int,
        transfer: bool,
    ) -> None:
        self._config = config
        self._rows = attention_rows
        self._threads = threads
        self._tables: dict[int, np.ndarray] = {}  # pages by sequence, as far as known
        self._probed: Any = None
        self.pages: list[Any] = [None] * config.num_layers  # of each layer, for the attention kernel
        hook = tvm_ffi.convert
        self._cache = _builtin("paged_attention_kv_cache_create")(
            # The chunk bounds tables for whole sequences too, when their KV is sent.
            ShapeTuple([max_num_sequence, max_total_tokens, max(chunk_size, max_total_tokens), PAGE_SIZE, 0]),
            ShapeTuple([0, config.num_layers]),
            config.num_heads,
            config.num_kv_heads,
            config.head_dim,
            config.head_dim,
            ShapeTuple([0] * config.num_layers),  # every layer: multi-head attention
            transfer,
            _ROPE_NORMAL,
            1.0,
            config.rope_theta,
            _tensor(rope_table(config)),  # handed to rope_split as it is
            _tensor(np.zeros((), np.float32)),
            kernels["kv_append"],
            None,
            ["tirx", kernels["ragged_hook"]],
            ["tirx", kernels["paged_hook"]],
            ["tirx", kernels["decode_hook"]],
            [],
            [],
            [],
            [],
            [],
            [kernels["merge_hook"]],
            kernels["rope_split"],
            kernels["copy_page"],
            hook(self._on_probe),
            hook(lambda *_: None),
        )
        self._probe = _builtin("attention_kv_cache_debug_get_kv")
        self._begin, self._end = _builtin("kv_state_begin_forward"), _builtin("kv_state_end_forward")
        self._available = _builtin("attention_kv_cache_get_num_available_pages")
        self._lengths: dict[int, int] = {}
        self.num_pages = self.free_pages()
        self._find_pages()

    def close(self) -> None:
        """Free the pages. TVM's object and this one hold each other, so nobody else would."""
        self._cache = None
        self.pages = []

    @property
    def handle(self) -> Any:
        """TVM's object, for the compiled model."""
        return self._cache

    def free_pages(self) -> int:
        """Pages that no sequence uses."""
        return int(self._available(self._cache))

    def __contains__(self, seq: int) -> bool:
        return seq in self._lengths

    def length(self, seq: int) -> int:
        """Tokens of `seq`."""
        return self._lengths[seq]

    def add(self, seq: int) -> None:
        """A new, empty sequence."""
        _builtin("kv_state_add_sequence")(self._cache, seq)
        self._lengths[seq], self._tables[seq] = 0, np.empty(0, np.int32)

    def remove(self, seq: int) -> None:
        """Forget `seq`; pages that no fork shares become free."""
        _builtin("kv_state_remove_sequence")(self._cache, seq)
        del self._lengths[seq], self._tables[seq]

    def fork(self, parent: int, child: int, length: int) -> None:
        """`child` becomes the first `length` tokens of `parent`; whole pages are shared, a part of one is copied."""
        _builtin("kv_state_fork_sequence")(self._cache, parent, child, length)
        self._lengths[child], self._tables[child] = length, self._tables[parent][: length // PAGE_SIZE]

    def popn(self, seq: int, n: int) -> None:
        """Drop the last `n` tokens."""
        _builtin("kv_state_popn")(self._cache, seq, n)
        self._lengths[seq] -= n
        self._tables[seq] = self._tables[seq][: self._lengths[seq] // PAGE_SIZE]

    def prepare_recv(self, seq: int, n: int) -> list[int]:
        """Reserve `n` more tokens of `seq` for a peer to write: `[segments, slot, length, ...]`."""
        segments = _builtin("kv_cache_disagg_prepare_recv")(self._cache, seq, n)
        self._lengths[seq] += n
        return [int(x) for x in segments]

    def mark_send(self, seq: int, begin: int, segments: list[int], rank: int) -> None:
        """From the next batch on, write KV of positions >= `begin` to the slots `segments` of PE `rank`."""
        _builtin("kv_cache_disagg_mark_send")(self._cache, seq, begin, ShapeTuple(segments), rank)

    def unmark_send(self, seq: int) -> None:
        """Send nothing of `seq` from now on."""
        self.mark_send(seq, _NO_SEND, [0], 0)

    def begin(self, seqs: list[int], counts: list[int]) -> Layout:
        """Reserve room for `counts` new tokens of `seqs` and lay out the attention's tasks."""
        self._begin(self._cache, ShapeTuple(seqs), ShapeTuple(counts))
        singles, chunks, tables = [], [], []
        row = 0
        for i, (seq, count) in enumerate(zip(seqs, counts, strict=True)):
            start = self._lengths[seq]
            self._lengths[seq] = start + count
            tables.append(self._table(seq))
            if count == 1:
                singles.append((row, 1, start, i))
            else:
                for j in range(0, count, self._rows):
                    chunks.append((row + j, min(self._rows, count - j), start + j, i))
            row += count
        table = np.zeros((len(seqs), max(map(len, tables))), np.int32)
        for i, pages in enumerate(tables):
            table[i, : len(pages)] = pages
        return Layout(self._tasks(singles), self._tasks(chunks), tvm_ffi.from_dlpack(table))

    def end(self) -> None:
        """The batch is computed."""
        self._end(self._cache)

    def restore(self, seqs: list[int], lengths: list[int]) -> None:
        """After a failed batch: sequences as long as before it, as far as TVM had let them grow."""
        for seq, before in zip(seqs, lengths, strict=True):
            grown = int(_builtin("attention_kv_cache_get_sequence_length")(self._cache, seq)) - before
            if grown > 0:
                _builtin("kv_state_popn")(self._cache, seq, grown)
            self._lengths[seq], self._tables[seq] = before, self._tables[seq][: before // PAGE_SIZE]

    def _tasks(self, tasks: list[tuple[int, int, int, int]]) -> Any:
        """Tasks dealt out so that threads, which take even runs of them, get even work."""
        dealt = [task for thread in range(self._threads) for task in tasks[thread :: self._threads]]
        return tvm_ffi.from_dlpack(np.array(dealt, np.int32).reshape(-1, 4))

    def _find_pages(self) -> None:
        """Learn where each layer's pages lie, with a sequence for the purpose."""
        self.add(0)
        self.prepare_recv(0, 1)
        self._table(0)
        self.remove(0)

    def _table(self, seq: int) -> np.ndarray:
        """The pages of `seq`, in order; TVM is asked about new ones only."""
        table = self._tables[seq]
        end = self._lengths[seq]
        if len(table) * PAGE_SIZE < end:
            start = len(table) * PAGE_SIZE
            shape = (self._config.num_layers, end - start, self._config.num_kv_heads, self._config.head_dim)
            unused = tvm.runtime.empty(shape, "float32", tvm.cpu())  # the call wants it; nobody touches it
            self._probe(self._cache, seq, start, end, unused, unused)
            table = self._tables[seq] = np.concatenate([table, self._probed[::PAGE_SIZE] // PAGE_SIZE])
        return table

    def _on_probe(self, pages: Any, slots: Any, _k: Any, _v: Any, layer: int) -> None:
        self.pages[layer] = pages
        if layer == 0:
            self._probed = slots.numpy()
