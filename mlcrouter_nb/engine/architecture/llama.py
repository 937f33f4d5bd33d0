"""Llama in `relax.frontend.nn`, on quantised matmuls and TVM's paged KV cache."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tvm import relax
from tvm.relax.frontend import nn
from tvm.relax.frontend.nn import Tensor, op

from ...models.gguf import ModelConfig
from ..kernels.attention import attention
from ..kernels.kernel_set import KernelSet
from ..kernels.paging import PAGE_SIZE
from ..kernels.quantize import quantize
from ..kernels.vector import GROUP, LANES

Activations = list[Tensor]  # 8-bit values, scales, scaled sums: see `kernels.quantize`


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
        return op.tensor_ir_op(
            kernel, name, arguments, Tensor.placeholder((x[0].shape[0], self.rows), "float32")
        )


def quantized(
    kernels: KernelSet, x: Tensor, columns: int, mode: str, weight: Tensor, epsilon: float = 0.0
) -> Activations:
    """x through norm or gate, rounded: see `kernels.quantize`."""
    name = f"quantize_{mode}_{columns}"
    rows = x.shape[0]
    return op.tensor_ir_op(
        quantize(columns, mode, epsilon, kernels.activation_dtype, name),
        name,
        [x, weight],
        [
            Tensor.placeholder((rows, columns), kernels.activation_dtype),
            Tensor.placeholder((rows, columns // GROUP), "float32"),
            Tensor.placeholder((rows, columns // GROUP), "float32"),
        ],
    )


@dataclass(frozen=True)
class Batch:
    """Where a batch's keys and values lie: see `kernels.attention`; `pages` has one tensor per layer."""

    cache: nn.Object
    pages: list[Tensor]
    singles: Tensor
    chunks: Tensor
    table: Tensor


def cached_attention(qkv: Tensor, batch: Batch, layer: int, config: ModelConfig, rows_at_once: int) -> Tensor:
    """qkv `[M, (heads + 2 kv_heads) * head_dim]` to attended values `[M, heads * head_dim]`.

    TVM's cache rotates, appends to the pages, writes to peers, and returns the rotated queries (`kernels.hooks`)."""
    rows = qkv.shape[0]
    heads, head_dim = config.num_heads, config.head_dim
    qkv = qkv.reshape(rows, heads + 2 * config.num_kv_heads, head_dim)
    call = relax.call_dps_packed(
        "vm.builtin.attention_kv_cache_attention_with_fused_qkv",
        [batch.cache._expr, relax.prim_value(layer), relax.prim_value(head_dim**-0.5), qkv._expr],
        out_ty=relax.TensorType((rows, heads, head_dim), "float32"),
    )
    rotated = Tensor(_expr=relax.BlockBuilder.current().emit(call))
    name = f"attention_{rows_at_once}rows"
    kernel = attention(heads, config.num_kv_heads, head_dim, rows_at_once, name)
    arguments = [rotated, batch.pages[layer], batch.singles, batch.chunks, batch.table]
    return op.tensor_ir_op(kernel, name, arguments, rotated).reshape(rows, heads * head_dim)


class LlamaLayer(nn.Module):
    """Attention and gated MLP, each after a norm and added to its input."""

    def __init__(self, kernels: KernelSet, config: ModelConfig, bits: Callable[[str], int]) -> None:
        self.kernels, self.config = kernels, config
        hidden, inner = config.hidden_size, config.intermediate_size
        attended = config.num_heads * config.head_dim
        self.attention_norm = nn.Parameter((hidden,), dtype="float32")
        self.mlp_norm = nn.Parameter((hidden,), dtype="float32")
        qkv = attended + 2 * config.num_kv_heads * config.head_dim
        self.qkv = QuantizedLinear(kernels, hidden, qkv, bits("qkv"))
        self.output = QuantizedLinear(kernels, attended, hidden, bits("output"))
        self.gate_up = QuantizedLinear(kernels, hidden, 2 * inner, bits("gate_up"))
        self.down = QuantizedLinear(kernels, inner, hidden, bits("down"))

    def forward(self, x: Tensor, batch: Batch, layer: int, tile: int) -> Tensor:
        config = self.config
        hidden, inner, epsilon = config.hidden_size, config.intermediate_size, config.rms_norm_eps
        normed = quantized(self.kernels, x, hidden, "rms_norm", self.attention_norm, epsilon)
        attended = cached_attention(self.qkv(normed, tile), batch, layer, config, self.kernels.attention_rows)
        width = config.num_heads * config.head_dim
        x = self.output(quantized(self.kernels, attended, width, "plain", self.attention_norm), tile, x)
        normed = quantized(self.kernels, x, hidden, "rms_norm", self.mlp_norm, epsilon)
        gated = quantized(self.kernels, self.gate_up(normed, tile), inner, "silu_gate", self.mlp_norm)
        return self.down(gated, tile, x)


class Llama(nn.Module):
    """Embeddings in, hidden states or logits out; one pair of functions for each row tile of the kernels."""

    def __init__(self, kernels: KernelSet, config: ModelConfig, bits: Callable[[str], int]) -> None:
        self.kernels, self.config = kernels, config
        self.layers = nn.ModuleList([LlamaLayer(kernels, config, bits) for _ in range(config.num_layers)])
        self.norm = nn.Parameter((config.hidden_size,), dtype="float32")
        self.head = QuantizedLinear(kernels, config.hidden_size, config.vocab_size, bits("head"))

    def decode_layers(self, x: Tensor, batch: Batch, tile: int) -> Tensor:
        """Hidden states `[M, hidden]` through all layers."""
        for i, layer in enumerate(self.layers):
            x = layer(x, batch, i, tile)
        return x

    def logits(self, x: Tensor, tile: int) -> Tensor:
        """Hidden states `[M, hidden]` to logits `[M, vocabulary]`."""
        config = self.config
        return self.head(
            quantized(self.kernels, x, config.hidden_size, "rms_norm", self.norm, config.rms_norm_eps), tile
        )

    def export(self) -> tuple[Any, list[str]]:
        """A Relax module with `layers_<tile>(x, cache, pages, singles, chunks, table, parameters)` and `logits_<tile>(x, parameters)` for each tile,
        and the parameters' names in their order."""
        config = self.config
        modes = {"param_mode": "packed", "effect_mode": "none"}
        page = ["num_pages", 2, config.num_kv_heads, PAGE_SIZE, config.head_dim]
        spec: dict[str, Any] = {}
        for tile in self.kernels.row_tiles:
            self.__dict__[f"layers_{tile}"] = _layers_function(self, tile)
            self.__dict__[f"logits_{tile}"] = _logits_function(self, tile)
            x = nn.spec.Tensor(["rows", config.hidden_size], "float32")
            spec[f"layers_{tile}"] = {
                "x": x,
                "cache": nn.spec.Object(object_type=nn.Object),
                "pages": [nn.spec.Tensor(page, "float32")] * config.num_layers,
                "singles": nn.spec.Tensor(["num_singles", 4], "int32"),
                "chunks": nn.spec.Tensor(["num_chunks", 4], "int32"),
                "table": nn.spec.Tensor(["num_sequences", "longest"], "int32"),
                "$": dict(modes),
            }
            spec[f"logits_{tile}"] = {"x": x, "$": dict(modes)}
        module, parameters = self.export_tvm(spec=nn.spec.ModuleSpec.from_raw(spec, self))
        return module, [name for name, _ in parameters]


def _layers_function(model: Llama, tile: int) -> Callable[..., Tensor]:
    def layers(
        x: Tensor, cache: nn.Object, pages: list[Tensor], singles: Tensor, chunks: Tensor, table: Tensor
    ) -> Tensor:
        return model.decode_layers(x, Batch(cache, pages, singles, chunks, table), tile)

    return layers


def _logits_function(model: Llama, tile: int) -> Callable[..., Tensor]:
    def logits(x: Tensor) -> Tensor:
        return model.logits(x, tile)

    return logits
