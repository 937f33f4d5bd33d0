import struct
from pathlib import Path
from typing import Any

import pytest

from mlcrouter_nb.models.gguf import GgufFile, ModelConfig, TensorInfo, read_metadata
from mlcrouter_nb.protocol.errors import ArgumentError

STRING, ARRAY, U32, F32 = 8, 9, 4, 6


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def entry(key: str, value: Any) -> bytes:
    def body(value: Any) -> tuple[int, bytes]:
        if isinstance(value, str):
            return STRING, text(value)
        if isinstance(value, float):
            return F32, struct.pack("<f", value)
        if isinstance(value, list):
            inner = [body(item) for item in value]
            return ARRAY, struct.pack("<IQ", inner[0][0], len(value)) + b"".join(raw for _, raw in inner)
        return U32, struct.pack("<I", value)

    type, raw = body(value)
    return text(key) + struct.pack("<I", type) + raw


def small_file(path: Path, metadata: dict[str, Any]) -> Path:
    tensor = text("output_norm.weight") + struct.pack("<IQIQ", 1, 4, 0, 0)
    head = b"GGUF" + struct.pack("<IQQ", 3, 1, len(metadata))
    head += b"".join(entry(key, value) for key, value in metadata.items()) + tensor
    path.write_bytes(head + b"\0" * (-len(head) % 32) + struct.pack("<4f", 1, 2, 3, 4))
    return path


SHAPE = {
    "general.architecture": "llama",
    "llama.block_count": 2,
    "llama.embedding_length": 64,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.head_count_kv": 2,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.context_length": 128,
    "tokenizer.ggml.tokens": ["a", "ü", "<|im_end|>"],
    "tokenizer.ggml.token_type": [1, 1, 3],
    "tokenizer.ggml.eos_token_id": 1,
}


def test_metadata_and_tensors_are_read(tmp_path: Path) -> None:
    path = small_file(tmp_path / "m.gguf", SHAPE)
    file = GgufFile.open(path)
    assert file.metadata["tokenizer.ggml.tokens"] == ["a", "ü", "<|im_end|>"]
    assert file.metadata["llama.attention.layer_norm_rms_epsilon"] == pytest.approx(1e-5)
    (tensor,) = file.tensors.values()
    assert tensor == TensorInfo("output_norm.weight", (4,), "F32", path.stat().st_size - 16)


def test_the_shape_has_sensible_defaults(tmp_path: Path) -> None:
    config = ModelConfig.from_file(small_file(tmp_path / "m.gguf", SHAPE))
    assert (config.num_layers, config.num_heads, config.num_kv_heads, config.head_dim) == (2, 4, 2, 16)
    assert (config.vocab_size, config.rope_theta, config.chat_template) == (3, 10000.0, None)
    assert config.eos_ids == (1, 2), "the metadata's, and the end of a turn"


def test_a_missing_key_is_named(tmp_path: Path) -> None:
    without = {key: value for key, value in SHAPE.items() if key != "llama.block_count"}
    with pytest.raises(ArgumentError, match=r"llama\.block_count"):
        ModelConfig.from_file(small_file(tmp_path / "m.gguf", without))


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no file"):
        read_metadata(tmp_path / "absent.gguf")
    whole = small_file(tmp_path / "m.gguf", SHAPE).read_bytes()
    for number, content in enumerate((b"", b"GG", b"something else", whole[:40], whole[:150], whole[:300])):
        path = tmp_path / f"{number}.gguf"
        path.write_bytes(content)
        with pytest.raises(ArgumentError, match="not a complete GGUF file"):
            read_metadata(path)


@pytest.mark.engine
def test_the_same_as_the_gguf_package(model_path: Path) -> None:
    gguf = pytest.importorskip("gguf")
    reader, ours = gguf.GGUFReader(model_path), GgufFile.open(model_path)
    theirs = {key: field.contents() for key, field in reader.fields.items() if not key.startswith("GGUF.")}
    assert ours.metadata == theirs
    assert list(ours.tensors.values()) == [
        TensorInfo(t.name, tuple(t.shape.tolist())[::-1], t.tensor_type.name, t.data_offset)
        for t in reader.tensors
    ]
