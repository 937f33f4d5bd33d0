"""Each kernel by itself against numpy in float64, for several shapes, in every set that this CPU can run."""

from typing import Any

import numpy as np
import pytest

pytest.importorskip("tvm")

import tvm
from gguf import GGMLQuantizationType, quants

from mlcrouter_nb.engine.kernels.attention import attention
from mlcrouter_nb.engine.kernels.kernel_set import KernelSet, select_kernels
from mlcrouter_nb.engine.kernels.quantize import quantize
from mlcrouter_nb.engine.weights import pack_matrix, split_half_rows
from mlcrouter_nb.protocol.errors import ArgumentError

SHAPES = [(9, 3, 64), (8, 2, 128), (4, 4, 32), (8, 1, 64)]  # heads, kv heads, head_dim


def available_sets() -> list[KernelSet]:
    sets = [select_kernels("generic")]
    if select_kernels("auto").name != "generic":
        sets.append(select_kernels("auto"))
    return sets


@pytest.fixture(params=available_sets(), ids=lambda kernels: kernels.name)
def kernels(request: pytest.FixtureRequest) -> KernelSet:
    return request.param


@pytest.fixture
def rng() -> np.random.Generator:
    return np.random.default_rng(0)


def compiled(kernels: KernelSet, **functions: Any) -> Any:
    return tvm.compile(tvm.IRModule(functions), target=kernels.target)


def tensor(values: np.ndarray) -> Any:
    return tvm.runtime.tensor(np.ascontiguousarray(values))


def empty(*shape: int, dtype: str = "float32") -> Any:
    return tvm.runtime.tensor(np.zeros(shape, dtype))


def quantized(x: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """int8, scales, scaled sums, as the kernels exchange activations."""
    groups = x.reshape(len(x), -1, 32)
    scale = np.abs(groups).max(-1) / 127
    q = np.rint(groups / np.maximum(scale, 1e-30)[..., None]).astype(np.int8)
    total = scale * q.astype(np.int32).sum(-1)
    return q.reshape(x.shape), scale.astype(np.float32), total.astype(np.float32)


@pytest.mark.parametrize("type", ["Q4_0", "Q4_1", "Q8_0"])
def test_matmul(kernels: KernelSet, rng: np.random.Generator, type: str) -> None:
    rows, columns, bits = 64, 96, 8 if type == "Q8_0" else 4
    blob = quants.quantize(
        rng.standard_normal((rows, columns), np.float32), getattr(GGMLQuantizationType, type)
    )
    w = quants.dequantize(blob, getattr(GGMLQuantizationType, type)).astype(np.float64)
    packed = pack_matrix(kernels, blob.reshape(rows, columns // 32, -1), type)
    x = rng.standard_normal((8, columns), np.float32)
    x[3] = 0
    x[4] *= 1e4
    q, scale, total = quantized(x)
    seen = q.reshape(8, -1, 32) * scale.astype(np.float64)[..., None]
    expected = seen.reshape(8, columns) @ w.T
    residual = rng.standard_normal((8, rows), np.float32)
    weights = [tensor(packed.weight), tensor(packed.scale), tensor(packed.minimum)]
    outputs = []
    for tile in kernels.row_tiles:
        plain = compiled(kernels, f=kernels.matmul(rows, columns, bits, tile, False, "f"))["f"]
        added = compiled(kernels, f=kernels.matmul(rows, columns, bits, tile, True, "f"))["f"]
        y, z = empty(8, rows), empty(8, rows)
        arguments = [tensor(q.astype(kernels.activation_dtype)), tensor(scale), tensor(total), *weights]
        plain(*arguments, tensor(scale), y)
        added(*arguments, tensor(residual), z)
        bound = 1e-5 * np.abs(seen.reshape(8, columns)) @ np.abs(w.T) + 1e-6
        assert (np.abs(y.numpy() - expected) <= bound).all()
        assert (np.abs(z.numpy() - expected - residual) <= bound + 1e-6).all()
        outputs.append(y.numpy())
    for other in outputs[1:]:  # a row's bits do not depend on how many are computed at once
        assert np.array_equal(outputs[0], other)


def test_matmul_at_the_ends_of_the_range(kernels: KernelSet) -> None:
    """The largest quants and activations: nothing overflows on the way."""
    for bits, type in ((4, "Q4_1"), (8, "Q8_0")):
        blob = np.zeros((16, 1, 20 if bits == 4 else 34), np.uint8)
        blob[..., :2] = np.array([1.0], np.float16).view(np.uint8)
        blob[..., -16 if bits == 4 else -32 :] = 0xFF if bits == 4 else 0x80  # 15; -128, the packed 0
        packed = pack_matrix(kernels, blob, type)
        for value in (127, -127):
            q = np.full((1, 32), value, kernels.activation_dtype)
            y = empty(1, 16)
            one, total = np.ones((1, 1), np.float32), np.full((1, 1), 32.0 * value, np.float32)
            compiled(kernels, f=kernels.matmul(16, 32, bits, 1, False, "f"))["f"](
                *map(tensor, (q, one, total, packed.weight, packed.scale, packed.minimum, one)), y
            )
            assert (y.numpy() == 32 * value * (15 if bits == 4 else -128)).all()


@pytest.mark.parametrize("mode", ["rms_norm", "silu_gate", "plain"])
def test_quantize(kernels: KernelSet, rng: np.random.Generator, mode: str) -> None:
    columns, epsilon = 96, 1e-5
    x = 3 * rng.standard_normal((5, 2 * columns if mode == "silu_gate" else columns), np.float32)
    x[2] = 0
    weight = rng.standard_normal(columns, np.float32)
    wide = x.astype(np.float64)
    if mode == "rms_norm":
        wide = wide / np.sqrt((wide**2).mean(-1, keepdims=True) + epsilon) * weight
    elif mode == "silu_gate":
        gate, up = wide[:, :columns], wide[:, columns:]
        wide = gate / (1 + np.exp(-gate)) * up
    q = empty(5, columns, dtype=kernels.activation_dtype)
    scale, total = empty(5, columns // 32), empty(5, columns // 32)
    compiled(kernels, f=quantize(columns, mode, epsilon, kernels.activation_dtype, "f"))["f"](
        tensor(x), tensor(weight), q, scale, total
    )
    groups = wide.reshape(5, -1, 32)
    assert np.allclose(scale.numpy(), np.abs(groups).max(-1) / 127, rtol=1e-5, atol=1e-12)
    back = q.numpy().reshape(5, -1, 32) * scale.numpy()[..., None]
    assert (np.abs(back - groups) <= scale.numpy()[..., None] * 0.501 + 1e-9).all()
    assert np.allclose(total.numpy(), back.sum(-1), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES)
def test_attention(
    kernels: KernelSet, rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int
) -> None:
    """Three sequences in scattered pages, NaN in every slot that holds nothing."""
    lengths, news = [37, 16, 50], [1, 5, 50]
    pages = np.full((20, 2, kv_heads, 16, head_dim), np.nan, np.float32)
    free = iter(rng.permutation(20))
    table = np.zeros((3, 4), np.int32)
    singles, chunks, expected, queries, row = [], [], [], [], 0
    for i, (length, new) in enumerate(zip(lengths, news, strict=True)):
        own = [next(free) for _ in range(-(-length // 16))]
        table[i, : len(own)] = own
        k, v = rng.standard_normal((2, length, kv_heads, head_dim), np.float32)
        for position in range(length):
            page, lane = own[position // 16], position % 16
            transposed = pages[page, 0].reshape(kv_heads, head_dim, 16)
            transposed[:, :, lane] = k[position]
            pages[page, 1, :, lane] = v[position]
        q = rng.standard_normal((new, heads, head_dim), np.float32)
        for j in range(new):
            count = length - new + j + 1
            share = heads // kv_heads
            wide_k, wide_v = (np.repeat(a[:count].astype(np.float64), share, 1) for a in (k, v))
            score = np.einsum("hd,khd->hk", q[j], wide_k) / np.sqrt(head_dim)
            power = np.exp(score - score.max(-1, keepdims=True))
            expected.append(np.einsum("hk,khd->hd", power / power.sum(-1, keepdims=True), wide_v))
        queries.append(q)
        if new == 1:
            singles.append((row, 1, length - 1, i))
        else:
            step = kernels.attention_rows
            for j in range(0, new, step):
                chunks.append((row + j, min(step, new - j), length - new + j, i))
        row += new
    function = compiled(kernels, f=attention(heads, kv_heads, head_dim, kernels.attention_rows, "f"))["f"]
    tasks = [np.array(tasks, np.int32).reshape(-1, 4) for tasks in (singles, chunks)]
    o = empty(row, heads, head_dim)
    function(*map(tensor, (np.concatenate(queries), pages, *tasks, table)), o)
    assert np.abs(o.numpy() - np.array(expected)).max() < 2e-5

    # The same rows one by one: the same bits.
    everything = [
        (start + j, 1, length - new + j, i)
        for i, (start, length, new) in enumerate(zip([0, 1, 6], lengths, news, strict=True))
        for j in range(new)
    ]
    again = empty(row, heads, head_dim)
    none = np.zeros((0, 4), np.int32)
    function(
        *map(tensor, (np.concatenate(queries), pages, np.array(everything, np.int32), none, table)), again
    )
    assert np.array_equal(o.numpy(), again.numpy())


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), SHAPES[:2])
def test_rope_and_pages(
    kernels: KernelSet, rng: np.random.Generator, heads: int, kv_heads: int, head_dim: int
) -> None:
    module = compiled(kernels, **kernels.cache_kernels(heads, kv_heads, head_dim))
    angles = rng.uniform(0, 6, (50, head_dim // 2))
    table = np.stack([np.cos(angles), np.sin(angles)], 1).astype(np.float32)
    positions = np.array([3, 49, 0], np.int32)
    qkv = rng.standard_normal((3, heads + 2 * kv_heads, head_dim), np.float32)
    q, k, v = (empty(3, count, head_dim) for count in (heads, kv_heads, kv_heads))
    module["rope_split"](tensor(qkv), tensor(positions), q, k, v, tensor(table))
    turned = qkv[:, : heads + kv_heads].astype(np.float64)
    first, second = turned[..., : head_dim // 2], turned[..., head_dim // 2 :]
    cosine, sine = (table[positions, part][:, None] for part in (0, 1))
    rotated = np.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)
    assert np.allclose(q.numpy(), rotated[:, :heads], atol=1e-6)
    assert np.allclose(k.numpy(), rotated[:, heads:], atol=1e-6)
    assert np.array_equal(v.numpy(), qkv[:, heads + kv_heads :])

    pages = empty(4, 2, kv_heads, 16, head_dim)
    module["kv_append"](pages, k, v, tensor(np.array([35, -1, 16], np.int32)))
    expected = np.zeros((4, 2, kv_heads, 16, head_dim), np.float32)
    for row, (page, lane) in ((0, (2, 3)), (2, (1, 0))):
        expected[page, 0].reshape(kv_heads, head_dim, 16)[:, :, lane] = k.numpy()[row]
        expected[page, 1, :, lane] = v.numpy()[row]
    assert np.array_equal(pages.numpy(), expected)

    other = empty(4, 2, kv_heads, 16, head_dim)
    module["copy_rows"](
        other, pages, tensor(np.array([5, -1], np.int32)), tensor(np.array([35, 16], np.int32))
    )
    copied = np.zeros_like(expected)
    copied[0, 0].reshape(kv_heads, head_dim, 16)[:, :, 5] = k.numpy()[0]
    copied[0, 1, :, 5] = v.numpy()[0]
    assert np.array_equal(other.numpy(), copied)

    module["copy_page"](pages, 2, 0, 16)
    expected[0] = expected[2]
    assert np.array_equal(pages.numpy(), expected)


def test_rows_of_q_and_k_turn_by_halves(rng: np.random.Generator) -> None:
    rows = np.arange(2 * 8).reshape(16, 1)
    assert split_half_rows(rows, 2)[:, 0].tolist() == [0, 2, 4, 6, 1, 3, 5, 7, 8, 10, 12, 14, 9, 11, 13, 15]


def test_an_arm_processor_compiles_the_generic_set() -> None:
    """No x86 instructions in it: LLVM makes code for another architecture."""
    kernels = select_kernels("generic")
    target = tvm.target.Target({"kind": "llvm", "mtriple": "aarch64-linux-gnu", "mcpu": "cortex-a72"})
    functions = {
        **kernels.cache_kernels(9, 3, 64),
        "matmul": kernels.matmul(32, 64, 4, 4, True, "matmul"),
        "head": kernels.matmul(32, 64, 8, 4, False, "head"),
        "quantize": quantize(64, "rms_norm", 1e-5, "int16", "quantize"),
        "gate": quantize(64, "silu_gate", 1e-5, "int16", "gate"),
        "attention": attention(9, 3, 64, 2, "attention"),
    }
    assembly = tvm.compile(tvm.IRModule(functions), target=target).mod.inspect_source("s")
    assert "fmla" in assembly


def test_an_unknown_set_is_refused() -> None:
    with pytest.raises(ArgumentError, match="avx512-vnni or generic"):
        select_kernels("fast")
