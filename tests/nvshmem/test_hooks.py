"""The hooks as TVM calls them, with pages in the order of MLC-LLM's engine (float16, rows behind each other)."""

import random
from collections.abc import Iterator

import numpy as np
import pytest

pytest.importorskip("tvm")

import tvm

from mlcrouter_nb.nvshmem import NvshmemConfig
from mlcrouter_nb.nvshmem.hooks import PeerError, SharedMemoryHooks

LAYERS, HEADS, PAGE, DIM = 3, 2, 16, 8


def tensor(values: object, dtype: str = "int32") -> object:
    return tvm.runtime.tensor(np.array(values, dtype))


class Engine:
    """What TVM's cache does at its start, and before attention."""

    def __init__(self, uid: list[int], pe: int, pages: int, dtype: str = "float16") -> None:
        self.hooks = SharedMemoryHooks(NvshmemConfig(uid, 2, pe))
        self.hooks.install()
        shape = (LAYERS, pages, 2, HEADS, PAGE, DIM)
        self.memory = tvm.get_global_func("runtime.disco.nvshmem.empty")(
            tvm.runtime.ShapeTuple(shape), dtype, tvm.cpu()
        )
        elements = int(np.prod(shape[1:]))
        bits = np.dtype(dtype).itemsize * 8
        self.pages = [
            self.memory._create_view(shape[1:], dtype, layer * elements * (bits + 7) // 8)
            for layer in range(LAYERS)
        ]
        self.transfer = tvm.get_global_func("nvshmem.KVTransfer")
        self.transfer_pages = tvm.get_global_func("nvshmem.KVTransferPageToPage")


@pytest.fixture
def pair() -> Iterator[tuple[Engine, Engine]]:
    uid = [random.randrange(256) for _ in range(128)]
    engines = Engine(uid, 0, 5), Engine(uid, 1, 7)
    yield engines
    for engine in engines:
        engine.hooks.close()


@pytest.mark.parametrize("layer", range(LAYERS))
def test_computed_rows(pair: tuple[Engine, Engine], layer: int) -> None:
    sender, receiver = pair
    rng = np.random.default_rng(layer)
    k, v = rng.standard_normal((2, 4, HEADS, DIM)).astype(np.float16)
    sender.hooks.check(1, [(17, 2), (100, 1)])
    sender.transfer(
        sender.pages[layer],
        tensor(k, "float16"),
        tensor(v, "float16"),
        tensor([17, -1, 100, 18]),
        tensor([1, -1, 1, 1]),
        None,
    )
    expected = np.zeros((LAYERS, 7, 2, HEADS, PAGE, DIM), np.float16)
    for row, slot in ((0, 17), (2, 100), (3, 18)):
        expected[layer, slot // PAGE, 0, :, slot % PAGE] = k[row]
        expected[layer, slot // PAGE, 1, :, slot % PAGE] = v[row]
    assert np.array_equal(np.stack([pages.numpy() for pages in receiver.pages]), expected)
    assert not any(pages.numpy().any() for pages in sender.pages)
    assert sender.hooks.rows_put == {1: 3}


def test_cached_rows(pair: tuple[Engine, Engine]) -> None:
    sender, receiver = pair
    values = np.random.default_rng(0).standard_normal((5, 2, HEADS, PAGE, DIM)).astype(np.float16)
    sender.pages[1].copyfrom(values)
    sender.hooks.check(1, [(3, 2)])
    sender.transfer_pages(
        sender.pages[1], sender.pages[1], tensor([3, 4]), tensor([79, 20]), tensor([1, 1]), None
    )
    got = receiver.pages[1].numpy()
    assert np.array_equal(got[0, :, :, 3], values[4, :, :, 15])
    assert np.array_equal(got[0, :, :, 4], values[1, :, :, 4])
    assert np.count_nonzero(got) == 2 * 2 * HEADS * DIM


def test_nothing_is_written_outside(pair: tuple[Engine, Engine]) -> None:
    sender, receiver = pair
    rows = tensor(np.ones((1, HEADS, DIM)), "float16")
    for slot, pe, message in ((7 * PAGE, 1, "outside"), (-2, 1, "outside"), (3, 2, "not a peer")):
        with pytest.raises(RuntimeError, match=message):  # what TVM makes of it
            sender.transfer(sender.pages[0], rows, rows, tensor([slot]), tensor([pe]), None)
    sender.hooks.check(1, [(0, 7 * PAGE)])
    for bad in ([(7 * PAGE, 1)], [(0, 7 * PAGE + 1)], [(-1, 2)], [(0, 0)]):
        with pytest.raises(PeerError, match="outside"):
            sender.hooks.check(1, bad)
    assert not any(pages.numpy().any() for pages in receiver.pages)


def test_peers_of_another_kind_are_refused() -> None:
    uid = [random.randrange(256) for _ in range(128)]
    first, second = Engine(uid, 0, 5), Engine(uid, 1, 5, dtype="float32")
    try:
        with pytest.raises(PeerError, match="different models or kernels"):
            first.hooks.check(1, [(0, 1)])
        for pe in (-1, 0, 2):
            with pytest.raises(PeerError, match="not a peer"):
                first.hooks.check(pe, [(0, 1)])
    finally:
        first.hooks.close()
        second.hooks.close()
    with pytest.raises(PeerError):
        first.hooks.check(1, [(0, 1)])
