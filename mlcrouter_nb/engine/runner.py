"""Run batches of sequences through the model: tokens in, logits out, keys and values in pages."""

import ctypes
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from ..models.gguf import GgufFile, ModelConfig
from ..nvshmem import NvshmemConfig, sweep
from ..nvshmem.hooks import PeerError, SharedMemoryHooks
from ..protocol.errors import MlcRouterError
from ..protocol.progress import OnProgress, Progress, ignore_progress
from .build import ensure_built
from .kernels.kernel_set import select_kernels
from .kernels.paging import PAGE_SIZE
from .paged_kv_cache import Layout, PagedKVCache
from .threads import set_threads
from .weights import Embedding, GgufTensors, read_packed


class ModelRunner:
    """A model with its KV cache, and its peers' pages to write to.

    Logits are the same bits whatever else is in the batch and wherever a prompt was cut, forked or received from.
    Sequences are named by numbers from 0. A call that is refused (`MlcRouterError`) changes nothing. All calls come
    from one thread."""

    def __init__(
        self,
        model_path: Path,
        *,
        max_num_sequence: int = 32,
        max_total_tokens: int = 16384,
        prefill_chunk_size: int = 512,
        nvshmem: NvshmemConfig | None = None,
        num_threads: int | None = None,
        kernels: str = "auto",
        progress: OnProgress | None = None,
    ) -> None:
        """Build or find the kernels, map the weights, make the cache.

        `kernels`: see `select_kernels`. `num_threads`: of this whole process; None leaves TVM's choice, which is
        `TVM_NUM_THREADS` if that was set before tvm was imported. With `nvshmem` the pages lie in shared memory.
        `max_num_sequence` bounds a batch, not the number of sequences."""
        progress = progress or ignore_progress
        kernel_set = select_kernels(kernels)
        threads = set_threads(num_threads)
        file = GgufFile.open(model_path)
        self.config = config = ModelConfig.from_gguf(file, model_path)
        built = ensure_built(Path(model_path), file, config, kernel_set, progress)
        progress(Progress("loading the model"))
        self.kernels = kernel_set.name
        self.page_size = PAGE_SIZE
        self.prefill_chunk_size = prefill_chunk_size
        self.max_num_sequence = max_num_sequence
        self._row_bytes = 2 * 4 * config.num_kv_heads * config.head_dim  # k and v of a token in one layer
        self.kv_bytes_per_token = self._row_bytes * config.num_layers
        self._tiles = kernel_set.row_tiles
        virtual_machine, cache_kernels = built.load()
        self._layers = {tile: virtual_machine[f"layers_{tile}"] for tile in self._tiles}
        self._logits = {tile: virtual_machine[f"logits_{tile}"] for tile in self._tiles}
        packed = read_packed(built.weights)
        self._parameters = [tvm.runtime.from_dlpack(packed[name]) for name in built.parameters]
        self._embedding = Embedding(GgufTensors(Path(model_path), file))
        self._windows: dict[int, _Window] = {}
        self._hooks = None
        if nvshmem is not None:
            sweep()
            self._hooks = SharedMemoryHooks(nvshmem, cache_kernels["kv_append"], cache_kernels["copy_rows"])
            self._hooks.install()
        try:
            self._cache = PagedKVCache(
                config,
                cache_kernels,
                attention_rows=kernel_set.attention_rows,
                max_num_sequence=max_num_sequence,
                max_total_tokens=max_total_tokens,
                chunk_size=prefill_chunk_size,
                threads=threads,
                transfer=self._hooks is not None,
            )
        except BaseException:
            if self._hooks is not None:
                self._hooks.close()
            raise
        self.num_pages = self._cache.num_pages

    def close(self) -> None:
        """Free the pages and remove the shared memory; may be called again."""
        self._windows.clear()
        self._cache.close()
        if self._hooks is not None:
            self._hooks.close()

    @property
    def bytes_put(self) -> dict[int, int]:
        """Bytes written into each peer's pages so far, by PE."""
        if self._hooks is None:
            return {}
        return {pe: rows * self._row_bytes for pe, rows in self._hooks.rows_put.items()}

    @property
    def received_pages(self) -> np.ndarray | None:
        """The last layer of KV, `[pages, 2, KV heads, page size, head_dim]` float32, which peers write last.

        None where no peer writes."""
        if self._hooks is None:
            return None
        pages = self._cache.pages[-1]
        shape = tuple(int(x) for x in pages.shape)
        memory = (ctypes.c_float * math.prod(shape)).from_address(pages.data_ptr())
        return np.ctypeslib.as_array(memory).reshape(shape)

    def free_pages(self) -> int:
        """Pages that no sequence uses."""
        return self._cache.free_pages()

    def pages_needed(self, seq: int, n: int) -> int:
        """Pages that `n` more tokens of `seq` take. (A fork takes one too, unless its length is whole pages.)"""
        length = self.sequence_length(seq)
        return -(-(length + n) // PAGE_SIZE) - -(-length // PAGE_SIZE)

    def sequence_length(self, seq: int) -> int:
        """Tokens of `seq`."""
        self._check_known(seq)
        return self._cache.length(seq)

    def add_sequence(self, seq: int) -> None:
        """A new, empty sequence."""
        self._check_new(seq)
        self._cache.add(seq)

    def remove_sequence(self, seq: int) -> None:
        """Forget `seq`; pages that no fork shares become free."""
        self._check_known(seq)
        self._cache.remove(seq)
        self._windows.pop(seq, None)

    def fork_sequence(self, parent: int, child: int, length: int) -> None:
        """`child` becomes the first `length` tokens of `parent`; whole pages are shared, a part of one is copied."""
        self._check_known(parent)
        self._check_new(child)
        if not 0 <= length <= self._cache.length(parent):
            raise MlcRouterError(
                f"Sequence {parent} has {self._cache.length(parent)} tokens; it cannot be forked at {length}."
            )
        self._check_pages(1 if length % PAGE_SIZE else 0)
        if length == 0:
            self._cache.add(child)
        else:
            self._cache.fork(parent, child, length)

    def popn(self, seq: int, n: int) -> None:
        """Drop the last `n` tokens of `seq`; a send window of it ends."""
        if not 0 <= n <= self.sequence_length(seq):
            raise MlcRouterError(
                f"Sequence {seq} has {self._cache.length(seq)} tokens; {n} cannot be dropped."
            )
        if n == 0:
            return
        if (self._cache.length(seq) - n) % PAGE_SIZE:
            self._check_pages(1)  # the last page may be shared: then it is copied
        if seq in self._windows:
            self._end_window(seq)
        self._cache.popn(seq, n)

    def prepare_recv(self, seq: int, n: int) -> list[int]:
        """Reserve `n` more tokens of `seq` for a peer to write: `[segments, slot, length, ...]`, for the wire."""
        self._check_appends([(seq, n)])
        return self._cache.prepare_recv(seq, n)

    def mark_send(self, seq: int, begin: int, segments: Sequence[int], recv_rank: int) -> None:
        """Write KV of positions from `begin` on to the slots `segments` of PE `recv_rank`, as `forward` computes them.

        KV that `seq` holds already goes out with its next forward, so at least one token of the window must be left
        to compute. The window ends where the segments do; then, or with `popn`, so does the sending."""
        self._check_known(seq)
        runs = _runs(segments)
        end = begin + sum(length for _, length in runs)
        length = self._cache.length(seq)
        if self._hooks is None:
            raise MlcRouterError(
                "This engine belongs to no NVSHMEM world; start it with MLC_NVSHMEM_INIT_CONFIG_JSON_STR."
            )
        if not 0 <= begin < end or end <= length:
            raise MlcRouterError(
                f"The window {begin} to {end} of sequence {seq} leaves nothing to compute: it has {length} tokens."
            )
        if begin > length:
            raise MlcRouterError(
                f"The window of sequence {seq} begins at {begin}, behind its {length} tokens; prefill up to there first."
            )
        try:
            self._hooks.check(recv_rank, runs)
        except PeerError as error:
            raise MlcRouterError(str(error)) from error
        self._cache.mark_send(seq, begin, list(segments), recv_rank)
        self._windows[seq] = _Window(end, recv_rank, runs)

    def forward(self, batch: list[tuple[int, list[int]]]) -> np.ndarray:
        """Append tokens to sequences; float32 logits `[len(batch), vocab]`, read-only, of each one's last token.

        At most `prefill_chunk_size` tokens in all and `max_num_sequence` sequences. Capacity is the caller's business
        (`pages_needed`, `free_pages`): a batch for which there are no pages is refused."""
        seqs = [seq for seq, _ in batch]
        counts = [len(tokens) for _, tokens in batch]
        ids = np.array([token for _, tokens in batch for token in tokens], np.int64)
        self._check_batch(seqs, counts, ids)
        before = [self._cache.length(seq) for seq in seqs]
        try:
            layout = self._cache.begin(seqs, counts)
            hidden = self._run(self._embedding.lookup(ids), layout)
            self._cache.end()
        except BaseException:
            self._cache.restore(seqs, before)
            for seq in set(seqs) & set(self._windows):
                self._end_window(seq)
            raise
        for seq in seqs:
            window = self._windows.get(seq)
            if window is not None and self._cache.length(seq) == window.end:
                self._end_window(seq)
        last = np.cumsum(counts) - 1
        rows = np.from_dlpack(hidden)[last]
        tile = self._tile(len(rows))
        logits = self._logits[tile](self._padded(rows, tile), self._parameters)
        return np.from_dlpack(logits)[: len(rows)]

    def _run(self, embedded: np.ndarray, layout: Layout) -> Any:
        """Embeddings `[n, hidden]` through the layers; n rows count, more may come back."""
        tile = self._tile(len(embedded))
        return self._layers[tile](
            self._padded(embedded, tile),
            self._cache.handle,
            self._cache.pages,
            layout.singles,
            layout.chunks,
            layout.table,
            self._parameters,
        )

    def _tile(self, rows: int) -> int:
        return next((tile for tile in self._tiles if tile >= rows), self._tiles[-1])

    def _padded(self, rows: np.ndarray, tile: int) -> Any:
        """`rows` and zeros up to a multiple of `tile`, in memory aligned for the kernels."""
        height = len(rows) + -len(rows) % tile
        padded = _aligned_zeros(height, rows.shape[1])
        padded[: len(rows)] = rows
        return tvm_ffi.from_dlpack(padded)

    def _end_window(self, seq: int) -> None:
        del self._windows[seq]
        if seq in self._cache:
            self._cache.unmark_send(seq)

    def _check_known(self, seq: int) -> None:
        if seq not in self._cache:
            raise MlcRouterError(f"There is no sequence {seq}.")

    def _check_new(self, seq: int) -> None:
        if seq < 0:
            raise MlcRouterError(f"Sequence {seq}: numbers start from 0.")
        if seq in self._cache:
            raise MlcRouterError(f"There is a sequence {seq} already.")

    def _check_pages(self, needed: int) -> None:
        if needed and needed > self._cache.free_pages():
            raise MlcRouterError(
                f"The KV cache is full: {needed} pages of {PAGE_SIZE} tokens are needed, "
                f"{self._cache.free_pages()} of {self.num_pages} are free."
            )

    def _check_appends(self, appends: list[tuple[int, int]]) -> None:
        for seq, n in appends:
            length = self.sequence_length(seq)
            if n < 1:
                raise MlcRouterError(f"Sequence {seq} must grow by at least one token, not by {n}.")
            if length + n > self.config.context_length:
                raise MlcRouterError(
                    f"Sequence {seq} would have {length + n} tokens; the model's context is "
                    f"{self.config.context_length}."
                )
        self._check_pages(sum(self.pages_needed(seq, n) for seq, n in appends))

    def _check_batch(self, seqs: list[int], counts: list[int], ids: np.ndarray) -> None:
        if not seqs or len(seqs) > self.max_num_sequence:
            raise MlcRouterError(f"A batch has 1 to {self.max_num_sequence} sequences, not {len(seqs)}.")
        if len(set(seqs)) < len(seqs):
            raise MlcRouterError("A sequence may come once in a batch.")
        if len(ids) > self.prefill_chunk_size:
            raise MlcRouterError(
                f"A batch has {self.prefill_chunk_size} tokens (prefill_chunk_size) at most, not {len(ids)}."
            )
        if len(ids) and not (ids.min() >= 0 and ids.max() < self.config.vocab_size):
            raise MlcRouterError(f"Token ids go from 0 to {self.config.vocab_size - 1}.")
        self._check_appends(list(zip(seqs, counts, strict=True)))
        for seq, count in zip(seqs, counts, strict=True):
            window = self._windows.get(seq)
            if window is None:
                continue
            if self._cache.length(seq) + count > window.end:
                raise MlcRouterError(
                    f"Sequence {seq} sends KV up to position {window.end}; end its chunk there."
                )
            try:
                assert self._hooks is not None
                self._hooks.check(window.rank, window.runs)
            except PeerError as error:
                self._end_window(seq)
                raise MlcRouterError(str(error)) from error


@dataclass(frozen=True)
class _Window:
    """Positions before `end` go to the slots `runs` of PE `rank`."""

    end: int
    rank: int
    runs: list[tuple[int, int]]


def _runs(segments: Sequence[int]) -> list[tuple[int, int]]:
    """`[segments, slot, length, ...]` as pairs; raises `MlcRouterError` if it is not that."""
    runs = list(zip(segments[1::2], segments[2::2], strict=False))
    if not segments or len(segments) != 2 * segments[0] + 1:
        raise MlcRouterError(
            "The KV segments must be [count, slot, length, ...], as prepare_recv gives them."
        )
    return runs


def _aligned_zeros(rows: int, columns: int) -> np.ndarray:
    """Float32 zeros that begin at a multiple of 64 bytes, as vector loads may expect."""
    memory = np.zeros(rows * columns + 16, np.float32)
    start = -(memory.ctypes.data // 4) % 16
    return memory[start : start + rows * columns].reshape(rows, columns)
