"""Compile a model for this machine, once: objects in the cache folder, a lock between processes, no C compiler.

TVM emits object files; apache-tvm-ffi-orcjit links them in memory."""

import json
import os
import platform
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import tvm
import tvm_ffi_orcjit
from tvm import relax

from ..models.cache import cache_dir, exclusive
from ..models.gguf import GgufFile, ModelConfig
from ..protocol.errors import ArgumentError
from ..protocol.progress import OnProgress, Progress, ignore_progress
from . import weights
from .architecture.llama import Llama
from .kernels.kernel_set import KernelSet

_STEPS = 4
_DEADLINE_S = 600.0
_SHAPE_FIELDS = [
    "architecture",
    "num_layers",
    "hidden_size",
    "intermediate_size",
    "num_heads",
    "num_kv_heads",
    "head_dim",
    "vocab_size",
    "rms_norm_eps",
]


@dataclass(frozen=True)
class BuiltModel:
    """A compiled model and its packed weights, as files. `parameters` are the names in the model's order."""

    model_objects: list[Path]
    cache_objects: list[Path]
    parameters: list[str]
    weights: Path

    def load(self) -> tuple[Any, Any]:
        """The Relax virtual machine and the module of the KV cache's kernels."""
        session = tvm_ffi_orcjit.default_session()
        # Our objects hold no C++; left to itself it would ask $CXX for its library, and fail where that is empty.
        model, cache = (session.load_module(o, cxx="c++") for o in (self.model_objects, self.cache_objects))
        return relax.VirtualMachine(model, tvm.cpu()), cache


def ensure_built(
    path: Path, file: GgufFile, config: ModelConfig, kernels: KernelSet, progress: OnProgress | None = None
) -> BuiltModel:
    """Compile the model of `path` and pack its weights, or find both in the cache.

    Of several processes one builds and the others wait. Raises `ArgumentError` for a model that has no kernels."""
    progress = progress or ignore_progress
    check_supported(path, config)
    tensors = weights.GgufTensors(path, file)
    bits = _matmul_bits(tensors, config)
    folder = _made(cache_dir() / "kernels") / _key(config, bits, kernels)
    packed = weights.packed_path(path, kernels, _made(cache_dir() / "weights"))
    if not (folder.exists() and packed.exists()):
        progress(Progress("waiting for the kernels"))
        with exclusive(folder.with_suffix(".lock"), _DEADLINE_S):
            if not folder.exists():
                _compile(folder, config, bits, kernels, progress)
            if not packed.exists():
                progress(Progress("packing the weights"))
                weights.write_packed(packed, tensors, config, kernels)
    index = json.loads((folder / "index.json").read_text())
    return BuiltModel(
        [folder / name for name in index["model"]],
        [folder / name for name in index["cache"]],
        index["parameters"],
        packed,
    )


def check_supported(path: Path, config: ModelConfig) -> None:
    """Raise `ArgumentError`, naming what is wrong, for a model that the kernels do not cover."""
    problem = None
    if config.architecture != "llama":
        problem = f"its architecture is '{config.architecture}', only 'llama' runs so far"
    elif config.num_heads % config.num_kv_heads:
        problem = f"{config.num_heads} heads do not divide among {config.num_kv_heads} key-value heads"
    elif config.head_dim % 32 or (config.head_dim > 64 and config.head_dim % 64):
        problem = f"a head has {config.head_dim} features; the kernels need 32 or a multiple of 64"
    elif config.hidden_size % 32 or config.intermediate_size % 32 or config.vocab_size % 16:
        problem = "its sizes are no multiples of 32 (hidden, intermediate) and 16 (vocabulary)"
    if problem:
        raise ArgumentError(f"The CPU engine cannot run {path}: {problem}.")


def _matmul_bits(tensors: weights.GgufTensors, config: ModelConfig) -> dict[str, int]:
    """Bits per quant of each kind of matrix; all layers must agree."""
    sources = {
        "qkv": ("attn_q", "attn_k", "attn_v"),
        "output": ("attn_output",),
        "gate_up": ("ffn_gate", "ffn_up"),
        "down": ("ffn_down",),
    }
    bits = {}
    for kind, names in sources.items():
        found = {tensors.bits(f"blk.{i}.{name}.weight") for i in range(config.num_layers) for name in names}
        if len(found) > 1:
            raise ArgumentError(
                f"{tensors.path} mixes 4-bit and 8-bit matrices of one kind ({', '.join(names)}); "
                "use a file with one type for all layers."
            )
        bits[kind] = found.pop()
    bits["head"] = tensors.bits("token_embd.weight" if config.tie_word_embeddings else "output.weight")
    return bits


def _key(config: ModelConfig, bits: dict[str, int], kernels: KernelSet) -> str:
    """A folder name from everything that the compiled code depends on."""
    here = Path(__file__).parent
    sources = sorted([*here.glob("kernels/*.py"), *here.glob("architecture/*.py"), Path(__file__)])
    digest = sha256()
    shape = {name: value for name, value in asdict(config).items() if name in _SHAPE_FIELDS}
    digest.update(json.dumps([shape, bits, kernels.cpu, tvm.__version__, platform.machine()]).encode())
    for source in sources:
        digest.update(source.read_bytes())
    return f"{config.architecture}-{config.hidden_size}x{config.num_layers}-{kernels.name}-{digest.hexdigest()[:16]}"


def _compile(
    folder: Path, config: ModelConfig, bits: dict[str, int], kernels: KernelSet, progress: OnProgress
) -> None:
    """Fill `folder` with objects and an index; it appears whole or not at all."""
    stage = f"building kernels ({kernels.name})"
    temporary = folder.with_suffix(f".{os.getpid()}.tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        progress(Progress(stage, 0, _STEPS))
        model, parameters = Llama(kernels, config, bits.__getitem__).export()
        progress(Progress(stage, 1, _STEPS))
        pipeline = tvm.ir.transform.Sequential([relax.get_pipeline("default"), _promise_no_alias])
        built = relax.build(model, target=kernels.target, relax_pipeline=pipeline)
        progress(Progress(stage, 2, _STEPS))
        of_model = _save_objects(built.export_library, temporary, "model")
        functions = kernels.cache_kernels(config.num_heads, config.num_kv_heads, config.head_dim)
        built = tvm.compile(tvm.IRModule(functions), target=kernels.target)
        progress(Progress(stage, 3, _STEPS))
        of_cache = _save_objects(built.export_library, temporary, "cache")
        index = {"model": of_model, "cache": of_cache, "parameters": parameters}
        (temporary / "index.json").write_text(json.dumps(index))
        temporary.rename(folder)
        progress(Progress(stage, _STEPS, _STEPS))
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


@tvm.transform.module_pass(opt_level=0)
def _promise_no_alias(module: tvm.IRModule, _: Any) -> tvm.IRModule:
    """Mark TVM's own helpers too: a single function without the mark costs all others in the module theirs, and the
    attention's accumulators their registers (2 to 3 times slower)."""
    for variable, function in list(module.functions.items()):
        if isinstance(function, tvm.tirx.PrimFunc):
            module[variable] = function.with_attr("tirx.noalias", True)
    return module


def _save_objects(export_library: Callable[..., Any], folder: Path, prefix: str) -> list[str]:
    """Keep the object files that TVM would hand to a linker; returns their names."""
    names: list[str] = []

    def keep(_: str, files: list[str], **options: Any) -> None:
        for file in files:
            names.append(f"{prefix}-{Path(file).name}")
            shutil.copyfile(file, folder / names[-1])

    keep.object_format = "o"  # type: ignore[attr-defined]
    export_library(str(folder / f"{prefix}.so"), fcompile=keep)
    return names


def _made(folder: Path) -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    return folder
