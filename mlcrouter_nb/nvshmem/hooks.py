"""The functions that TVM's KV cache calls where it is built for NVSHMEM, served by shared memory.

`install` registers them; the next cache with `enable_kv_transfer` takes its pages from a segment of ours and writes
into its peers' segments, layer by layer, while it computes."""

import ctypes
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import tvm
import tvm_ffi

from .config import NvshmemConfig
from .segment import HEADER_BYTES, PageLayout, Segment, segment_name

AppendRows = Callable[[Any, Any, Any, Any], None]  # pages, k, v, slots
CopyRows = Callable[[Any, Any, Any, Any], None]  # pages, source pages, slots, source slots


class PeerError(Exception):
    """A peer cannot be written to: a sentence that says why."""


class _Peer:
    """Another engine's pages, by layer."""

    def __init__(self, segment: Segment) -> None:
        self.segment = segment
        layout = segment.layout
        size = int(np.prod(layout.shape[1:]))
        self.layers = [
            tvm_ffi.from_dlpack(
                np.frombuffer(
                    segment.memory, layout.dtype, size, HEADER_BYTES + layer * layout.layer_stride
                ).reshape(layout.shape[1:])
            )
            for layer in range(layout.shape[0])
        ]


class SharedMemoryHooks:
    """One PE: its own segment, and its peers' as they are needed.

    `append_rows` and `copy_rows` know how keys and values lie in a page (-1 as a slot: skip the row); by default row
    by row, as MLC-LLM's pages have it. Segments live as long as this object: `close` it."""

    def __init__(
        self,
        config: NvshmemConfig,
        append_rows: AppendRows | None = None,
        copy_rows: CopyRows | None = None,
    ) -> None:
        self.config = config
        self.rows_put: Counter[int] = Counter()  # rows of one layer, by PE
        self._append_rows = append_rows or append_rows_in_order
        self._copy_rows = copy_rows or copy_rows_in_order
        self._own: Segment | None = None
        self._address = 0
        self._peers: dict[int, _Peer] = {}

    def install(self) -> None:
        """Register the hooks; a cache takes those that are registered when it is made."""
        for name, function in {
            "runtime.disco.nvshmem.init_nvshmem": lambda *_: None,
            "runtime.disco.nvshmem.empty": self._empty,
            "nvshmem.KVTransfer": self._transfer,
            "nvshmem.KVTransferPageToPage": self._transfer_pages,
        }.items():
            tvm.register_global_func(name, function, override=True)

    def check(self, pe: int, slots: list[tuple[int, int]]) -> None:
        """Raise `PeerError` unless the `(slot, length)` runs can be written in the pages of `pe`; maps them if new."""
        layout = self._peer(pe).segment.layout
        for slot, length in slots:
            if slot < 0 or length < 1 or slot + length > layout.slots:
                raise PeerError(
                    f"Slots {slot} to {slot + length - 1} are outside the {layout.slots} slots of PE {pe}."
                )

    def close(self) -> None:
        """Remove our segment's name and forget the peers."""
        if self._own is not None:
            self._own.unlink()
            self._own.close()
            self._own = None
        self._forget(*list(self._peers))

    def _forget(self, *pes: int) -> None:
        for pe in pes:
            peer = self._peers.pop(pe)
            peer.layers.clear()
            peer.segment.close()

    def _peer(self, pe: int) -> _Peer:
        """The pages of `pe`, as they are now: an engine that was started again has new ones."""
        known = self._peers.get(pe)
        if known is not None and known.segment.is_current():
            return known
        if known is not None:
            self._forget(pe)
        if self._own is None or not 0 <= pe < self.config.npes or pe == self.config.pe_start:
            raise PeerError(
                f"PE {pe} is not a peer of PE {self.config.pe_start} in a world of {self.config.npes}."
            )
        try:
            segment = Segment.open(segment_name(self.config.uid, pe))
        except OSError as error:
            raise PeerError(f"PE {pe} cannot be written to: {error}") from error
        if not segment.layout.fits(self._own.layout):
            there, here = segment.layout, self._own.layout
            segment.close()
            raise PeerError(
                f"PE {pe} holds KV pages of {there.dtype} {list(there.shape)}, ours are {here.dtype} "
                f"{list(here.shape)}: the engines run different models or kernels."
            )
        self._peers[pe] = _Peer(segment)
        return self._peers[pe]

    # Called by TVM

    def _empty(self, shape: Any, dtype: Any, _device: Any) -> Any:
        """Memory for all layers' pages, zeros, a little larger than asked for.

        TVM 0.27 places layer i at `i * elements * (bits + 7) / 8` bytes, without brackets around `(bits + 7) / 8`."""
        dimensions, name = tuple(int(x) for x in shape), str(dtype)
        bits = np.dtype(name).itemsize * 8
        elements = int(np.prod(dimensions[1:]))
        layout = PageLayout(dimensions, name, elements * (bits + 7) // 8)
        size = layout.layer_stride * (dimensions[0] - 1) + elements * bits // 8
        size = -(-size // 4096) * 4096
        self._own = Segment.create(segment_name(self.config.uid, self.config.pe_start), layout, size)
        memory = np.frombuffer(self._own.memory, name, size // (bits // 8), HEADER_BYTES)
        self._address = memory.ctypes.data
        return tvm_ffi.from_dlpack(memory)

    def _layer(self, pages: Any) -> int:
        """Which layer these pages of ours are."""
        assert self._own is not None
        return int((pages.data_ptr() - self._address) // self._own.layout.layer_stride)

    def _transfer(self, pages: Any, k: Any, v: Any, slots: Any, pes: Any, _stream: Any) -> None:
        """Rows that were just computed, `[n, kv heads, head_dim]`, to slots `[n]` of PEs `[n]`; -1: stays here."""
        layer = self._layer(pages)
        for pe, chosen in self._by_peer(layer, slots.numpy(), pes.numpy()):
            self._append_rows(self._peers[pe].layers[layer], k, v, tvm_ffi.from_dlpack(chosen))

    def _transfer_pages(self, pages: Any, _: Any, slots: Any, own_slots: Any, pes: Any, _stream: Any) -> None:
        """Rows that are in our pages already, at `own_slots`."""
        layer = self._layer(pages)
        for pe, chosen in self._by_peer(layer, slots.numpy(), pes.numpy()):
            self._copy_rows(self._peers[pe].layers[layer], pages, tvm_ffi.from_dlpack(chosen), own_slots)

    def _by_peer(self, layer: int, slots: np.ndarray, pes: np.ndarray) -> list[tuple[int, np.ndarray]]:
        """For each PE the slots of its rows, -1 for others' rows; checked, as a kernel writes wherever it is told."""
        found = []
        for pe in sorted({int(x) for x in pes} - {-1}):
            peer = self._peer(pe) if layer == 0 or pe not in self._peers else self._peers[pe]
            chosen = np.where(pes == pe, slots, -1).astype(np.int32)
            if chosen.max() >= peer.segment.layout.slots or chosen.min() < -1:
                raise PeerError(f"KV for PE {pe} was to be written outside of its pages.")
            self.rows_put[pe] += int((chosen >= 0).sum())
            found.append((pe, chosen))
        return found


def append_rows_in_order(pages: Any, k: Any, v: Any, slots: Any) -> None:
    """k and v `[n, kv heads, head_dim]` to `slots` of pages `[pages, 2, kv heads, page size, head_dim]`."""
    target, positions = _writable(pages), np.from_dlpack(slots)
    kept = positions >= 0
    page, row = positions[kept] // target.shape[3], positions[kept] % target.shape[3]
    target[page, 0, :, row] = np.from_dlpack(k)[kept]
    target[page, 1, :, row] = np.from_dlpack(v)[kept]


def copy_rows_in_order(pages: Any, source: Any, slots: Any, source_slots: Any) -> None:
    """Rows at `source_slots` of other pages to `slots` of these."""
    target, origin = _writable(pages), np.from_dlpack(source)
    to, fro = np.from_dlpack(slots), np.from_dlpack(source_slots)
    to, fro = to[to >= 0], fro[to >= 0]
    size = target.shape[3]
    target[to // size, :, :, to % size] = origin[fro // size, :, :, fro % size]


def _writable(tensor: Any) -> np.ndarray:
    """A tensor's memory as an array; DLPack would give a read-only one."""
    shape, dtype = tuple(int(x) for x in tensor.shape), np.dtype(str(tensor.dtype))
    memory = (ctypes.c_char * (int(np.prod(shape)) * dtype.itemsize)).from_address(tensor.data_ptr())
    return np.frombuffer(memoryview(memory), dtype).reshape(shape)
