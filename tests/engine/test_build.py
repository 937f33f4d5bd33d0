"""Compiling once, from several processes, without a C compiler; packed weights that lose nothing."""

import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

pytest.importorskip("tvm")

from gguf import GGMLQuantizationType, quants

from mlcrouter_nb.engine import build, weights
from mlcrouter_nb.engine.kernels.kernel_set import select_kernels
from mlcrouter_nb.models.gguf import GgufFile, ModelConfig
from mlcrouter_nb.protocol.errors import ArgumentError
from mlcrouter_nb.protocol.progress import Progress

BOOT = """
import sys
from pathlib import Path
from mlcrouter_nb.engine.runner import ModelRunner
runner = ModelRunner(Path(sys.argv[1]), max_total_tokens=256, num_threads=1, progress=lambda p: print(p, flush=True))
runner.add_sequence(0)
print("top", int(runner.forward([(0, [1, 2, 3])])[0].argmax()))
runner.close()
"""


@pytest.mark.engine
def test_three_processes_build_once_without_a_compiler(model_path: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "MLCROUTER_CACHE": str(tmp_path), "PATH": str(tmp_path), "CXX": ""}
    command = [sys.executable, "-c", BOOT, str(model_path)]
    engines = [
        subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)
        for _ in range(3)
    ]
    outputs = [engine.communicate(timeout=150) for engine in engines]
    assert [engine.returncode for engine in engines] == [0, 0, 0], outputs
    built = ["building kernels" in output for output, _ in outputs]
    packed = ["packing" in output for output, _ in outputs]
    assert (sum(built), sum(packed)) == (1, 1)
    assert len({output.split("top")[1] for output, _ in outputs}) == 1
    assert not [path for path in tmp_path.rglob("*") if ".tmp" in path.name]
    again = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=60, check=True)
    assert "building" not in again.stdout
    assert "packing" not in again.stdout


@pytest.fixture
def config(model_path: Path) -> ModelConfig:
    return ModelConfig.from_file(model_path)


@pytest.mark.engine
def test_what_changes_the_code_changes_the_key(config: ModelConfig) -> None:
    kernels = select_kernels("generic")
    bits = {"qkv": 4, "output": 4, "gate_up": 4, "down": 4, "head": 8}
    keys = {
        build._key(config, bits, kernels),
        build._key(replace(config, num_layers=2), bits, kernels),
        build._key(config, {**bits, "head": 4}, kernels),
        build._key(config, bits, replace(kernels, cpu="x86-64")),
        build._key(config, bits, select_kernels("auto")),
    }
    assert len(keys) == 4 + (select_kernels("auto").name != "generic")
    assert build._key(replace(config, chat_template=None, eos_ids=()), bits, kernels) in keys


@pytest.mark.engine
@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"architecture": "gemma3"}, "'gemma3', only 'llama'"),
        ({"head_dim": 80}, "80 features"),
        ({"num_kv_heads": 2}, "do not divide"),
        ({"hidden_size": 570}, "multiples of 32"),
    ],
)
def test_models_without_kernels_are_refused(config: ModelConfig, change: dict, message: str) -> None:
    with pytest.raises(ArgumentError, match=message):
        build.check_supported(Path("x.gguf"), replace(config, **change))


@pytest.mark.engine
@pytest.mark.parametrize("name", ["auto", "generic"])
def test_packed_weights_are_the_files(
    model_path: Path, config: ModelConfig, tmp_path: Path, name: str
) -> None:
    kernels = select_kernels(name)
    config = replace(config, num_layers=1)
    tensors = weights.GgufTensors(model_path, GgufFile.open(model_path))
    path = tmp_path / "packed.weights"
    weights.write_packed(path, tensors, config, kernels)
    packed = weights.read_packed(path)
    assert all(array.ctypes.data % 64 == 0 for array in packed.values())

    def original(tensor: str) -> np.ndarray:
        kind = getattr(GGMLQuantizationType, tensors.info(tensor).type)
        flat = tensors.blocks(tensor).reshape(tensors.info(tensor).shape[0], -1)
        return quants.dequantize(flat, kind)

    down = original("blk.0.ffn_down.weight")
    one_hot = np.zeros((4, config.intermediate_size), kernels.activation_dtype)
    columns = [0, 17, 500, config.intermediate_size - 1]
    one_hot[range(4), columns] = 1
    groups = config.intermediate_size // 32
    total = one_hot.reshape(4, groups, 32).sum(-1).astype(np.float32)
    y = np.zeros((4, config.hidden_size), np.float32)
    import tvm

    kernel = kernels.matmul(config.hidden_size, config.intermediate_size, 4, 4, False, "f")
    function = tvm.compile(tvm.IRModule({"f": kernel}), target=kernels.target)["f"]
    result = tvm.runtime.tensor(y)
    function(
        *(tvm.runtime.tensor(a) for a in (one_hot, np.ones((4, groups), np.float32), total)),
        *(
            tvm.runtime.tensor(np.array(packed[f"layers.0.down.{part}"]))
            for part in ("weight", "scale", "minimum")
        ),
        tvm.runtime.tensor(total),
        result,
    )
    assert np.allclose(result.numpy(), down[:, columns].T, rtol=1e-6, atol=1e-7)

    embedding = weights.Embedding(tensors)
    ids = np.array([0, 5, 49151, 5])
    assert np.array_equal(embedding.lookup(ids), original("token_embd.weight")[ids])


@pytest.mark.engine
def test_a_failed_build_leaves_nothing(
    config: ModelConfig, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(*_: object, **__: object) -> None:
        raise RuntimeError("no")

    monkeypatch.setattr(build.Llama, "export", fail)
    bits = {"qkv": 4, "output": 4, "gate_up": 4, "down": 4, "head": 8}
    stages: list[Progress] = []
    with pytest.raises(RuntimeError):
        build._compile(
            tmp_path / "kernels",
            replace(config, num_layers=1),
            bits,
            select_kernels("generic"),
            stages.append,
        )
    assert list(tmp_path.iterdir()) == []
    assert [str(stage) for stage in stages] == ["building kernels (generic): 0 of 4"]
