"""The whole engine against a plain float32 Llama on the same weights: int8 activations cost a little, nothing more."""

from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tvm")

from gguf import GGMLQuantizationType, quants

from mlcrouter_nb.engine.runner import ModelRunner
from mlcrouter_nb.engine.weights import GgufTensors, split_half_rows
from mlcrouter_nb.models.gguf import GgufFile, ModelConfig
from mlcrouter_nb.models.tokenizer import Tokenizer

TEXT = (
    "The sky is blue because the air scatters short waves of light more than long ones. In the evening the light "
    "takes a longer way through the air, and what is left of it is red. Nobody had said so before the nineteenth "
    "century, although everybody had seen it."
)


class PlainLlama:
    """Logits of every position, in numpy."""

    def __init__(self, path: Path) -> None:
        file = GgufFile.open(path)
        self.config = ModelConfig.from_gguf(file)
        self.tensors = GgufTensors(path, file)

    def matrix(self, name: str, heads: int = 0) -> np.ndarray:
        rows, _ = self.tensors.info(name).shape
        kind = getattr(GGMLQuantizationType, self.tensors.info(name).type)
        w = quants.dequantize(self.tensors.blocks(name).reshape(rows, -1), kind)
        return split_half_rows(w, heads) if heads else w

    def norm(self, x: np.ndarray, name: str) -> np.ndarray:
        scale = np.sqrt((x * x).mean(-1, keepdims=True) + self.config.rms_norm_eps)
        return x / scale * self.tensors.vector(name)

    def rotate(self, x: np.ndarray) -> np.ndarray:
        half = self.config.head_dim // 2
        angles = np.arange(len(x))[:, None] * self.config.rope_theta ** (-np.arange(half) / half)
        cosine, sine = np.cos(angles)[:, None], np.sin(angles)[:, None]
        first, second = x[..., :half], x[..., half:]
        return np.concatenate([first * cosine - second * sine, second * cosine + first * sine], -1)

    def logits(self, ids: list[int]) -> np.ndarray:
        config, n = self.config, len(ids)
        embedding = self.matrix("token_embd.weight")
        x = embedding[ids]
        hidden = np.tril(np.ones((n, n), bool))
        for i in range(config.num_layers):
            block = f"blk.{i}"
            normed = self.norm(x, f"{block}.attn_norm.weight")
            q, k, v = (
                (normed @ self.matrix(f"{block}.attn_{name}.weight", heads if turned else 0).T).reshape(
                    n, heads, -1
                )
                for name, heads, turned in (
                    ("q", config.num_heads, True),
                    ("k", config.num_kv_heads, True),
                    ("v", config.num_kv_heads, False),
                )
            )
            share = config.num_heads // config.num_kv_heads
            q, k, v = self.rotate(q), np.repeat(self.rotate(k), share, 1), np.repeat(v, share, 1)
            score = np.where(hidden, np.einsum("qhd,khd->hqk", q, k) * config.head_dim**-0.5, -np.inf)
            power = np.exp(score - score.max(-1, keepdims=True))
            mixed = np.einsum("hqk,khd->qhd", power / power.sum(-1, keepdims=True), v).reshape(n, -1)
            x = x + mixed @ self.matrix(f"{block}.attn_output.weight").T
            normed = self.norm(x, f"{block}.ffn_norm.weight")
            gate = normed @ self.matrix(f"{block}.ffn_gate.weight").T
            up = normed @ self.matrix(f"{block}.ffn_up.weight").T
            x = x + (gate / (1 + np.exp(-gate)) * up) @ self.matrix(f"{block}.ffn_down.weight").T
        return self.norm(x, "output_norm.weight") @ embedding.T


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64) - logits.max(-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(-1, keepdims=True))


@pytest.mark.engine
def test_distributions_are_those_of_float32(model_path: Path) -> None:
    ids = Tokenizer(model_path).encode(TEXT)
    assert len(ids) > 50
    expected = log_softmax(PlainLlama(model_path).logits(ids))
    runner = ModelRunner(model_path, max_total_tokens=512, num_threads=2)
    try:
        runner.add_sequence(0)
        got = log_softmax(np.concatenate([runner.forward([(0, [token])]) for token in ids]))
    finally:
        runner.close()
    divergence = (np.exp(expected) * (expected - got)).sum(-1)
    agreement = (expected.argmax(-1) == got.argmax(-1)).mean()
    assert divergence.mean() < 0.008  # 0.003 over longer texts
    assert agreement > 0.9
