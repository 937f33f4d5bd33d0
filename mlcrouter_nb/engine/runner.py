"""Run batches of sequences through the model: tokens in, logits out, keys and values in pages."""

import os
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from ..models.gguf import GgufFile, ModelConfig
from ..protocol.errors import ArgumentError, MlcRouterError
from ..protocol.progress import OnProgress, Progress, ignore_progress
from .build import ensure_built
from .kernels.kernel_set import select_kernels
from .kernels.paging import PAGE_SIZE
from .paged_kv_cache import Layout, PagedKVCache
from .weights import Embedding, GgufTensors, read_packed


class ModelRunner:
    """A model with its KV cache.

    Logits are the same bits whatever else is in the batch, wherever a prompt was cut, forked or received from. All
    calls come from one thread. A refused call (`MlcRouterError`) changes nothing."""

    def __init__(
        self,
        model_path: Path,
        *,
        max_num_sequence: int = 32,
        max_total_tokens: int = 16384,
        prefill_chunk_size: int = 512,
        nvshmem: Any = None,
        num_threads: int | None = None,
        kernels: str = "auto",
        progress: OnProgress | None = None,
    ) -> None:
        progress = progress or ignore_progress
        kernel_set = select_kernels(kernels)
        file = GgufFile.open(model_path)
        self.config = config = ModelConfig.from_gguf(file, model_path)
        built = ensure_built(Path(model_path), file, config, kernel_set, progress)
        progress(Progress("loading the model"))
        self.kernels = kernel_set.name
        self.page_size = PAGE_SIZE
        self.prefill_chunk_size = prefill_chunk_size
        self.max_num_sequence = max_num_sequence
        self.kv_bytes_per_token = 2 * 4 * config.num_layers * config.num_kv_heads * config.head_dim
        self.bytes_put: Counter[int] = Counter()
        self._tiles = kernel_set.row_tiles
        virtual_machine, cache_kernels = built.load()
        self._layers = {tile: virtual_machine[f"layers_{tile}"] for tile in self._tiles}
        self._logits = {tile: virtual_machine[f"logits_{tile}"] for tile in self._tiles}
        packed = read_packed(built.weights)
        self._parameters = [tvm.runtime.from_dlpack(packed[name]) for name in built.parameters]
        self._embedding = Embedding(GgufTensors(Path(model_path), file))
        self._cache = PagedKVCache(
            config,
            cache_kernels,
            attention_rows=kernel_set.attention_rows,
            max_num_sequence=max_num_sequence,
            max_total_tokens=max_total_tokens,
            chunk_size=prefill_chunk_size,
            threads=int(os.environ.get("TVM_NUM_THREADS", "0")) or os.cpu_count() or 1,
            transfer=False,
        )
        self.num_pages = self._cache.num_pages

    def free_pages(self) -> int:
        return self._cache.free_pages()

    def add_sequence(self, seq: int) -> None:
        self._cache.add(seq)

    def remove_sequence(self, seq: int) -> None:
        self._cache.remove(seq)

    def forward(self, batch: list[tuple[int, list[int]]]) -> np.ndarray:
        seqs = [seq for seq, _ in batch]
        counts = [len(tokens) for _, tokens in batch]
        ids = np.array([token for _, tokens in batch for token in tokens])
        layout = self._cache.begin(seqs, counts)
        hidden = self._run(self._embedding.lookup(ids), layout)
        self._cache.end()
        last = np.cumsum(counts) - 1
        rows = np.from_dlpack(hidden)[last]
        tile = self._tile(len(rows))
        return self._logits[tile](self._padded(rows, tile), self._parameters).numpy()[: len(rows)]

    def _tile(self, rows: int) -> int:
        return next((tile for tile in self._tiles if tile >= rows), self._tiles[-1])

    def _padded(self, rows: np.ndarray, tile: int) -> Any:
        """`rows` and zeros up to a multiple of `tile`, in memory aligned for the kernels."""
        height = len(rows) + -len(rows) % tile
        padded = aligned_zeros((height, rows.shape[1]))
        padded[: len(rows)] = rows
        return tvm_ffi.from_dlpack(padded)

    def _run(self, embedded: np.ndarray, layout: Layout) -> Any:
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


def aligned_zeros(shape: tuple[int, int]) -> np.ndarray:
    """Float32 zeros that begin at a multiple of 64 bytes, as vector loads may expect."""
    size = shape[0] * shape[1]
    memory = np.zeros(size + 16, np.float32)
    start = -(memory.ctypes.data // 4) % 16
    return memory[start : start + size].reshape(shape)
