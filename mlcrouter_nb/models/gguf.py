"""GGUF: the metadata, the model's shape, and where each tensor lies. Reads the header only, with the standard library.

The `gguf` package's reader takes seconds to build 100,000 numpy views of the vocabulary; this takes 0.1 s.
Source: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md"""

import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ..protocol.errors import ArgumentError

_SCALARS = {
    0: "<B", 1: "<b", 2: "<H", 3: "<h", 4: "<I", 5: "<i", 6: "<f", 7: "<?", 10: "<Q", 11: "<q", 12: "<d",
}  # fmt: skip
_STRING, _ARRAY = 8, 9
GGML_TYPES = {0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 6: "Q5_0", 7: "Q5_1", 8: "Q8_0", 30: "BF16"}


@dataclass(frozen=True)
class TensorInfo:
    """One tensor: `shape` is outermost first (rows, columns), `offset` counts from the start of the file."""

    name: str
    shape: tuple[int, ...]
    type: str
    offset: int


@dataclass(frozen=True)
class GgufFile:
    """The header of a GGUF file: metadata by key, tensors by name."""

    metadata: dict[str, Any]
    tensors: dict[str, TensorInfo]

    @classmethod
    def open(cls, path: Path | str) -> "GgufFile":
        """Read the header; raises `ArgumentError` where the file is missing or is no GGUF file."""
        path = Path(path)
        try:
            with path.open("rb") as file, mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as data:
                return _Cursor(data).header()
        except FileNotFoundError:
            raise ArgumentError(f"There is no file {path}.") from None
        except (OSError, ValueError, struct.error, KeyError, UnicodeDecodeError) as error:
            raise ArgumentError(
                f"{path} is not a complete GGUF file ({error}); fetch it again or name another."
            ) from error


class _Cursor:
    """Walks through the header."""

    def __init__(self, data: mmap.mmap) -> None:
        self.data = data
        self.at = 0

    def header(self) -> GgufFile:
        if self.data[:4] != b"GGUF":
            raise ValueError("it does not start with the letters GGUF")
        self.at = 4
        version = self.scalar("<I")
        if version not in (2, 3):
            raise ValueError(f"its version is {version}, known are 2 and 3")
        num_tensors, num_values = self.scalar("<Q"), self.scalar("<Q")
        metadata = {}
        for _ in range(num_values):
            key = self.string()
            metadata[key] = self.value(self.scalar("<I"))
        raw = [self._tensor() for _ in range(num_tensors)]
        alignment = metadata.get("general.alignment", 32)
        start = -(-self.at // alignment) * alignment
        tensors = {name: TensorInfo(name, shape, type, start + offset) for name, shape, type, offset in raw}
        return GgufFile(metadata, tensors)

    def _tensor(self) -> tuple[str, tuple[int, ...], str, int]:
        name = self.string()
        shape = tuple(self.scalar("<Q") for _ in range(self.scalar("<I")))[::-1]
        type = self.scalar("<I")
        return name, shape, GGML_TYPES.get(type, f"type {type}"), self.scalar("<Q")

    def scalar(self, format: str) -> Any:
        (value,) = struct.unpack_from(format, self.data, self.at)
        self.at += struct.calcsize(format)
        return value

    def string(self) -> str:
        (length,) = struct.unpack_from("<Q", self.data, self.at)
        start = self.at + 8
        self.at = start + length
        if self.at > len(self.data):
            raise ValueError("it ends too early")
        return self.data[start : self.at].decode()

    def value(self, type: int) -> Any:
        if type == _STRING:
            return self.string()
        if type == _ARRAY:
            inner, length = self.scalar("<I"), self.scalar("<Q")
            if inner in _SCALARS:
                format = f"<{length}{_SCALARS[inner][1]}"
                values = struct.unpack_from(format, self.data, self.at)
                self.at += struct.calcsize(format)
                return list(values)
            return [self.value(inner) for _ in range(length)]
        return self.scalar(_SCALARS[type])


def read_metadata(path: Path | str) -> dict[str, Any]:
    """The metadata of a GGUF file, by key."""
    return GgufFile.open(path).metadata


@dataclass(frozen=True)
class ModelConfig:
    """The shape of a model, and the few facts about its text that an engine needs."""

    architecture: str
    num_layers: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    context_length: int
    rope_theta: float
    rms_norm_eps: float
    tie_word_embeddings: bool
    bos_id: int | None
    eos_ids: tuple[int, ...]
    chat_template: str | None

    @classmethod
    def from_file(cls, path: Path | str) -> "ModelConfig":
        """Read from a GGUF file; raises `ArgumentError` naming what is missing."""
        return cls.from_gguf(GgufFile.open(path), path)

    @classmethod
    def from_gguf(cls, file: GgufFile, path: Path | str = "the file") -> "ModelConfig":
        """The same from a header that was read already."""
        meta = file.metadata
        architecture = meta.get("general.architecture", "")

        def shape(key: str, default: Any = None) -> Any:
            value = meta.get(f"{architecture}.{key}", default)
            if value is None:
                raise ArgumentError(
                    f"{path} lacks '{architecture}.{key}' in its metadata; the model cannot be run."
                )
            return value

        num_heads, hidden_size = shape("attention.head_count"), shape("embedding_length")
        return cls(
            architecture=architecture,
            num_layers=shape("block_count"),
            hidden_size=hidden_size,
            intermediate_size=shape("feed_forward_length"),
            num_heads=num_heads,
            num_kv_heads=shape("attention.head_count_kv", num_heads),
            head_dim=shape("attention.key_length", hidden_size // num_heads),
            vocab_size=shape("vocab_size", len(meta.get("tokenizer.ggml.tokens", ())) or None),
            context_length=shape("context_length"),
            rope_theta=shape("rope.freq_base", 10000.0),
            rms_norm_eps=shape("attention.layer_norm_rms_epsilon"),
            tie_word_embeddings="output.weight" not in file.tensors,
            bos_id=meta.get("tokenizer.ggml.bos_token_id"),
            eos_ids=eos_ids(meta),
            chat_template=meta.get("tokenizer.chat_template"),
        )


# Tokens that end a turn, by text: llama.cpp ends a generation at any of them too.
END_OF_TURN = {"<|im_end|>", "<|eot_id|>", "<|endoftext|>", "<|end|>", "<end_of_turn>", "</s>", "<|eom_id|>"}


def eos_ids(metadata: dict[str, Any]) -> tuple[int, ...]:
    """Ids that end a generation: the metadata's, and end-of-turn tokens of the vocabulary."""
    ids = {
        metadata[key]
        for key in (
            "tokenizer.ggml.eos_token_id",
            "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.eom_token_id",
        )
        if key in metadata
    }
    control = zip(
        metadata.get("tokenizer.ggml.tokens", ()), metadata.get("tokenizer.ggml.token_type", ()), strict=False
    )
    ids.update(i for i, (text, type) in enumerate(control) if type == 3 and text in END_OF_TURN)
    return tuple(sorted(ids))
