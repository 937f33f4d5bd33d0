"""A GGUF file's weights in the kernels' order: repacked once, without requantising, then mapped read-only.

Engines on one machine map the same file, so they share one copy in memory."""

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

import numpy as np

from ..models.gguf import GgufFile, ModelConfig, TensorInfo
from ..protocol.errors import ArgumentError
from .kernels.kernel_set import KernelSet
from .kernels.vector import GROUP, LANES

FORMAT = 1  # grows when the packed layout changes
_ALIGNMENT = 4096
_MATMUL_TYPES = {"Q4_0": 4, "Q4_1": 4, "Q8_0": 8}  # GGUF's type: bits of a quant
_HEADER_BYTES = {"Q4_0": 2, "Q4_1": 4, "Q8_0": 2}  # a block's scale (and minimum) before its quants
_EMBEDDING_TYPES = ("F32", "F16", "Q8_0")


@dataclass(frozen=True)
class PackedMatrix:
    """A matrix in blocks of 16 rows: quants `[rows / 16, groups, width]` uint8; scale and minimum `[rows / 16,
    groups, 16]`. A weight is `scale * quant + minimum`, quants counting from 0."""

    weight: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray


class GgufTensors:
    """The raw tensors of a mapped GGUF file."""

    def __init__(self, path: Path, file: GgufFile) -> None:
        self.path = path
        self.file = file
        self._bytes = np.memmap(path, np.uint8, "r")

    def info(self, name: str) -> TensorInfo:
        """Where tensor `name` lies; raises `ArgumentError` if the model has none of that name."""
        try:
            return self.file.tensors[name]
        except KeyError:
            raise ArgumentError(
                f"{self.path} has no tensor '{name}'; it is not a whole Llama model."
            ) from None

    def vector(self, name: str) -> np.ndarray:
        """A float32 vector."""
        info = self.info(name)
        if info.type != "F32":
            raise ArgumentError(f"{self.path}: '{name}' is {info.type}; the engine expects F32 there.")
        return self._bytes[info.offset : info.offset + 4 * info.shape[0]].view(np.float32)

    def bits(self, name: str) -> int:
        """Bits per quant of matrix `name`: 4 or 8; raises `ArgumentError` for a type without kernels."""
        info = self.info(name)
        if info.type not in _MATMUL_TYPES:
            raise ArgumentError(
                f"{self.path}: '{name}' is {info.type}, for which there are no kernels yet; "
                f"use a file quantised to {', '.join(_MATMUL_TYPES)}."
            )
        return _MATMUL_TYPES[info.type]

    def blocks(self, name: str) -> np.ndarray:
        """The quantised blocks `[rows, columns / 32, bytes]` of matrix `name`."""
        rows, columns = self.info(name).shape
        width = _HEADER_BYTES[self.info(name).type] + GROUP * self.bits(name) // 8
        start, size = self.info(name).offset, rows * columns // GROUP * width
        return self._bytes[start : start + size].reshape(rows, columns // GROUP, width)


class Embedding:
    """The embedding table, looked up in the GGUF file itself."""

    def __init__(self, tensors: GgufTensors) -> None:
        info = tensors.info("token_embd.weight")
        self.vocab_size, self.hidden_size = info.shape
        self._type = info.type
        if info.type == "Q8_0":
            self._table = tensors.blocks("token_embd.weight")
        elif info.type in _EMBEDDING_TYPES:
            dtype = np.float32 if info.type == "F32" else np.float16
            size = self.vocab_size * self.hidden_size * np.dtype(dtype).itemsize
            self._table = (
                tensors._bytes[info.offset : info.offset + size].view(dtype).reshape(self.vocab_size, -1)
            )
        else:
            raise ArgumentError(
                f"{tensors.path}: the embeddings are {info.type}; use a file with "
                f"{', '.join(_EMBEDDING_TYPES)} embeddings."
            )

    def lookup(self, ids: np.ndarray) -> np.ndarray:
        """`[n, hidden]` float32 for token ids `[n]`."""
        rows = self._table[ids]
        if self._type != "Q8_0":
            return rows.astype(np.float32)
        scale = rows[..., :2].copy().view(np.float16).astype(np.float32)
        return (rows[..., 2:].view(np.int8) * scale).reshape(len(ids), self.hidden_size)


def pack_matrix(kernels: KernelSet, blocks: np.ndarray, type: str) -> PackedMatrix:
    """GGUF blocks `[rows, groups, bytes]` of `type` in the order of `kernels`; the rows must come in sixteens."""
    rows, groups, _ = blocks.shape
    header = _HEADER_BYTES[type]
    scale = blocks[..., :2].copy().view(np.float16)[..., 0]
    quants = blocks[..., header:]
    if type == "Q4_1":
        minimum = blocks[..., 2:4].copy().view(np.float16)[..., 0].astype(np.float32)
    elif type == "Q4_0":
        minimum = scale.astype(np.float32) * -8
    else:
        minimum = scale.astype(np.float32) * -128
        quants = quants ^ np.uint8(128)  # int8 to uint8, counted from -128

    def by_block(values: np.ndarray) -> np.ndarray:
        turned = values.reshape(rows // LANES, LANES, groups).transpose(0, 2, 1)
        return np.ascontiguousarray(turned.astype(kernels.scale_dtype))

    return PackedMatrix(kernels.pack(quants), by_block(scale), by_block(minimum))


def split_half_rows(blocks: np.ndarray, heads: int) -> np.ndarray:
    """Undo llama.cpp's row order of q and k (pairs to rotate side by side) for rotation by halves."""
    rows, *rest = blocks.shape
    return blocks.reshape(heads, rows // heads // 2, 2, *rest).swapaxes(1, 2).reshape(rows, *rest)


def _llama_parameters(
    tensors: GgufTensors, config: ModelConfig, kernels: KernelSet
) -> Iterator[tuple[str, np.ndarray]]:
    """Every parameter of `architecture.llama.Llama`, one after the other."""

    def matrix(target: str, *sources: tuple[str, int]) -> Iterator[tuple[str, np.ndarray]]:
        """Matrices stacked; a head count above 0 undoes the rope order."""
        parts = []
        for name, heads in sources:
            tensors.bits(name)
            blocks = tensors.blocks(name)
            parts.append(
                pack_matrix(
                    kernels, split_half_rows(blocks, heads) if heads else blocks, tensors.info(name).type
                )
            )
        for field in ("weight", "scale", "minimum"):
            yield f"{target}.{field}", np.concatenate([getattr(part, field) for part in parts])

    for i in range(config.num_layers):
        layer, block = f"layers.{i}", f"blk.{i}"
        yield f"{layer}.attention_norm", tensors.vector(f"{block}.attn_norm.weight")
        yield f"{layer}.mlp_norm", tensors.vector(f"{block}.ffn_norm.weight")
        yield from matrix(
            f"{layer}.qkv",
            (f"{block}.attn_q.weight", config.num_heads),
            (f"{block}.attn_k.weight", config.num_kv_heads),
            (f"{block}.attn_v.weight", 0),
        )
        yield from matrix(f"{layer}.output", (f"{block}.attn_output.weight", 0))
        yield from matrix(f"{layer}.gate_up", (f"{block}.ffn_gate.weight", 0), (f"{block}.ffn_up.weight", 0))
        yield from matrix(f"{layer}.down", (f"{block}.ffn_down.weight", 0))
    yield "norm", tensors.vector("output_norm.weight")
    yield from matrix("head", ("token_embd.weight" if config.tie_word_embeddings else "output.weight", 0))


def packed_path(path: Path, kernels: KernelSet, folder: Path) -> Path:
    """Where the packed weights of `path` are cached: by name, size, time of change, and layout."""
    stat = path.stat()
    identity = f"{path.resolve()}|{stat.st_size}|{stat.st_mtime_ns}|{kernels.name}|{FORMAT}"
    return folder / f"{path.stem}-{kernels.name}-{sha256(identity.encode()).hexdigest()[:16]}.weights"


def write_packed(target: Path, tensors: GgufTensors, config: ModelConfig, kernels: KernelSet) -> None:
    """Write all parameters behind each other and an index after them; the file appears whole or not at all."""
    index: dict[str, tuple[int, str, list[int]]] = {}
    temporary = target.with_suffix(f".{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            for name, array in _llama_parameters(tensors, config, kernels):
                file.seek(-(-file.tell() // _ALIGNMENT) * _ALIGNMENT)
                index[name] = (file.tell(), str(array.dtype), list(array.shape))
                file.write(np.ascontiguousarray(array).data)
            text = json.dumps(index).encode()
            file.write(text + len(text).to_bytes(8, "little"))
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)


def read_packed(path: Path) -> dict[str, np.ndarray]:
    """The parameters by name, mapped copy-on-write: nobody writes them, but DLPack refuses read-only memory."""
    data = np.memmap(path, np.uint8, "c")
    size = int.from_bytes(data[-8:].tobytes(), "little")
    index = json.loads(data[-8 - size : -8].tobytes())
    arrays = {}
    for name, (offset, dtype, shape) in index.items():
        length = int(np.prod(shape)) * np.dtype(dtype).itemsize
        arrays[name] = np.asarray(data[offset : offset + length]).view(dtype).reshape(shape)
    return arrays
