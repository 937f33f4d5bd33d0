"""Llama in `relax.frontend.nn`, on quantised matmuls and TVM's paged KV cache."""

from collections.abc import Callable
from typing import Any

from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from ...models.gguf import ModelConfig
from ..kernels.kernel_set import KernelSet
from ..kernels.quantize import quantize
from ..kernels.vector import GROUP, LANES

Activations = list[Tensor]  # int8 values, scales, scaled sums: see `kernels.quantize`


class QuantizedLinear(nn.Module):
    """`y = W x (+ residual)`, W in packed 4-bit or 8-bit blocks."""

    def __init__(self, kernels: KernelSet, columns: int, rows: int, bits: int) -> None:
        self.kernels, self.columns, self.rows, self.bits = kernels, columns, rows, bits
        blocks, groups = rows // LANES, columns // GROUP
        self.weight = nn.Parameter((blocks, groups, kernels.packed_width(bits)), dtype="uint8")
        self.scale = nn.Parameter((blocks, groups, LANES), dtype=kernels.scale_dtype)
        self.minimum = nn.Parameter((blocks, groups, LANES), dtype=kernels.scale_dtype)

    def forward(self, x: Activations, tile: int, residual: Tensor | None = None) -> Tensor:
        added = residual is not None
        name = f"matmul_{self.rows}x{self.columns}_{self.bits}bit_{tile}rows{'_residual' if added else ''}"
        kernel = self.kernels.matmul(self.rows, self.columns, self.bits, tile, added, name)
        arguments = [*x, self.weight, self.scale, self.minimum, residual if added else x[1]]
        return op.tensor_ir_op(kernel, name, arguments, Tensor.placeholder((x[0].shape[0], self.rows), "float32"))


def quantized(x: Tensor, columns: int, mode: str, weight: Tensor, epsilon: float = 0.0) -> Activations:
    """x through norm or gate, rounded: see `kernels.quantize`."""
    name = f"quantize_{mode}_{columns}"
    rows = x.shape[0]
    return op.tensor_ir_op(
        quantize(columns, mode, epsilon, name),
        name,
        [x, weight],
        [
            Tensor.placeholder((rows, columns), "int8"),
            Tensor.placeholder((rows, columns // GROUP), "float32"),
            Tensor.placeholder((rows, columns // GROUP), "float32"),
        ],
    )


def cached_attention(qkv: Tensor, cache: nn.Object, layer: int, config: ModelConfig) -> Tensor:
    """qkv `[M, (heads + 2 kv_heads) * head_dim]` through the cache: rope, append, KV transfer, attention."""
    rows = qkv.shape[0]
    heads, head_dim = config.num_heads, config.head_dim
    qkv = qkv.reshape(rows, heads + 2 * config.num_kv_heads, head_dim)
    call = relax.call_dps_packed(
        "vm.builtin.attention_kv_cache_attention_with_fused_qkv",
        [cache._expr, relax.prim_value(layer), relax.prim_value(head_dim**-0.5), qkv._expr],
        out_ty=relax.TensorType((rows, heads, head_dim), "float32"),
    )
    return Tensor(_expr=relax.BlockBuilder.current().emit(call)).reshape(rows, heads * head_dim)


class LlamaLayer(nn.Module):
    """Attention and gated MLP, each after a norm and added to its input."""

    def __init__(self, kernels: KernelSet, config: ModelConfig, bits: Callable[[str], int]) -> None:
        self.config = config
        hidden, inner = config.hidden_size, config.intermediate_size
        attended = config.num_heads * config.head_dim
        self.attention_norm = nn.Parameter((hidden,), dtype="float32")
        self.mlp_norm = nn.Parameter((hidden,), dtype="float32")
        qkv = attended + 2 * config.num_kv_heads * config.head_dim
        self.qkv = QuantizedLinear(kernels, hidden, qkv, bits("qkv"))
        self.output = QuantizedLinear(kernels, attended, hidden, bits("output"))
        self.gate_up = QuantizedLinear(kernels, hidden, 2 * inner, bits("gate_up"))
        self.down = QuantizedLinear(kernels, inner, hidden, bits("down"))

    def forward(self, x: Tensor, cache: nn.Object, layer: int, tile: int) -> Tensor:
        config = self.config
        hidden, inner, epsilon = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        normed = quantized(x, hidden, "rms_norm", self.attention_norm, epsilon)
        attended = cached_attention(self.qkv(normed, tile), cache, layer, config)
        width = config.num_heads * config.head_dim
        x = self.output(quantized(attended, width, "plain", self.attention_norm), tile, x)
        normed = quantized(x, hidden, "rms_norm", self.mlp_norm, epsilon)
        gated = quantized(self.gate_up(normed, tile), inner, "silu_gate", self.mlp_norm)
        return self.down(gated, tile, x)


class Llama(nn.Module):
    """Embeddings in, hidden states or logits out; one pair of functions for each row tile of the kernels."""

    def __init__(self, kernels: KernelSet, config: ModelConfig, bits: Callable[[str], int]) -> None:
        self.kernels, self.config = kernels, config
        self.layers = nn.ModuleList([LlamaLayer(kernels, config, bits) for _ in range(config.num_layers)])
        self.norm = nn.Parameter((config.hidden_size,), dtype="float32")
        self.head = QuantizedLinear(kernels, config.hidden_size, config.vocab_size, bits("head"))

    def decode_layers(self, x: Tensor, cache: nn.Object, tile: int) -> Tensor:
        """Hidden states `[M, hidden]` through all layers."""
        for i, layer in enumerate(self.layers):
            x = layer(x, cache, i, tile)
        return x

    def logits(self, x: Tensor, tile: int) -> Tensor:
        """Hidden states `[M, hidden]` to logits `[M, vocabulary]`."""
        config = self.config
        return self.head(quantized(x, config.hidden_size, "rms_norm", self.norm, config.rms_norm_eps), tile)

    def export(self) -> tuple[Any, list[str]]:
        """A Relax module with `layers_<tile>(x, cache, parameters)` and `logits_<tile>(x, parameters)` for each tile,
        and the parameters' names in their order."""
        modes = {"param_mode": "packed", "effect_mode": "none"}
        rows = lambda: nn.spec.Tensor(["rows", self.config.hidden_size], "float32")  # noqa: E731
        spec: dict[str, Any] = {}
        for tile in self.kernels.row_tiles:
            self.__dict__[f"layers_{tile}"] = _with_tile(self.decode_layers, tile)
            self.__dict__[f"logits_{tile}"] = _without_cache(self.logits, tile)
            cache = nn.spec.Object(object_type=nn.Object)
            spec[f"layers_{tile}"] = {"x": rows(), "cache": cache, "$": dict(modes)}
            spec[f"logits_{tile}"] = {"x": rows(), "$": dict(modes)}
        module, parameters = self.export_tvm(spec=nn.spec.ModuleSpec.from_raw(spec, self))
        return module, [name for name, _ in parameters]


def _with_tile(function: Callable[..., Tensor], tile: int) -> Callable[..., Tensor]:
    def layers(x: Tensor, cache: nn.Object) -> Tensor:
        return function(x, cache, tile)

    return layers


def _without_cache(function: Callable[..., Tensor], tile: int) -> Callable[..., Tensor]:
    def logits(x: Tensor) -> Tensor:
        return function(x, tile)

    return logits
