"""The engine as a process: arguments, readiness, signals, the end of its parent."""

import json
import os
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ENGINE = [sys.executable, "-m", "mlcrouter_nb.engine"]


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*ENGINE, *arguments], capture_output=True, text=True, timeout=60, stdin=subprocess.DEVNULL
    )


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ((), "MODEL"),
        (("no-such-model",), "smollm2-135m and paths"),
        (("smollm2-135m", "--port", "99999"), "99999"),
        (("smollm2-135m", "--port", "x"), "not a number"),
        (("smollm2-135m", "--kernels", "fast"), "fast"),
        (("smollm2-135m", "--role", "both"), "both"),
        (("smollm2-135m", "--unknown"), "--unknown"),
        (("smollm2-135m", "--max-num-sequence", "64", "--prefill-chunk-size", "64"), "must be more than"),
    ],
)
def test_a_wrong_argument_is_exit_code_2_and_a_sentence(arguments: tuple[str, ...], says: str) -> None:
    done = run(*arguments)
    assert done.returncode == 2 and says in done.stderr and "Traceback" not in done.stderr
    assert done.stdout == ""


def test_help_is_quick_and_names_everything() -> None:
    began = time.monotonic()
    done = run("--help")
    assert time.monotonic() - began < 5.0
    assert done.returncode == 0
    for option in (
        "--host",
        "--port",
        "--enable-prefix-cache",
        "--max-total-seq-length",
        "46 KB",
        "--threads",
    ):
        assert option in done.stdout


def test_stdin_s_end_is_noticed_before_anything_heavy() -> None:
    began = time.monotonic()
    done = run("smollm2-135m", "--exit-on-stdin-eof")
    assert done.returncode == 0 and time.monotonic() - began < 5.0


@pytest.mark.engine
def test_ready_facts_and_a_quiet_end(spawn_engine) -> None:  # type: ignore[no-untyped-def]
    engine = spawn_engine("--max-total-seq-length", "1024", "--served-model-name", "mine")
    assert set(engine.facts) >= {"url", "port", "kernels", "kv_pages", "page_size", "context_length", "model"}
    assert (engine.facts["model"], engine.facts["context_length"], engine.facts["page_size"]) == (
        "mine",
        1024,
        16,
    )
    assert (
        f"{engine.url}: {engine.facts['kernels']} kernels, {engine.facts['kv_pages']} KV pages"
        in engine.log.read_text()
    )
    stages = [event["stage"] for event in engine._lines if event["event"] == "progress"]
    assert stages, "progress was reported"
    with urllib.request.urlopen(f"{engine.url}/v1/models", timeout=5) as answer:
        assert json.load(answer)["data"][0]["id"] == "mine"
    taken = run("smollm2-135m", "--port", str(engine.facts["port"]), "--max-total-seq-length", "64")
    assert taken.returncode == 2 and "is taken" in taken.stderr and "Traceback" not in taken.stderr
    began = time.monotonic()
    assert engine.stop() == 0
    assert time.monotonic() - began < 3.0
    assert "Traceback" not in engine.log.read_text()


@pytest.mark.engine
def test_streams_end_before_the_engine_does(spawn_engine) -> None:  # type: ignore[no-untyped-def]
    engine = spawn_engine("--max-total-seq-length", "1024")
    body = {"prompt": "Once", "max_tokens": 60, "ignore_eos": True, "stream": True, "temperature": 0}
    request = urllib.request.Request(f"{engine.url}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=20) as answer:
        answer.readline()
        engine.process.send_signal(signal.SIGTERM)
        rest = answer.read()
    assert rest.endswith(b"data: [DONE]\n\n")
    assert engine.process.wait(10) == 0


@pytest.mark.engine
def test_it_dies_with_whoever_holds_its_stdin(spawn_world) -> None:  # type: ignore[no-untyped-def]
    engines = spawn_world(2, "--max-total-seq-length", "256")
    segments = (
        [name for name in os.listdir("/dev/shm") if name.startswith("mlcrt-")]
        if os.path.isdir("/dev/shm")
        else []
    )
    for engine in engines:
        engine.process.stdin.close()
    for engine in engines:
        assert engine.process.wait(3) == 0
        engine.process.stdin = None
    if segments:
        assert not {name for name in segments if str(engines[0].process.pid) in name}
        assert len([name for name in os.listdir("/dev/shm") if name in segments]) <= len(segments) - 2


@pytest.mark.engine
def test_a_file_that_is_no_model_is_named(tmp_path: Path) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    done = run(str(tmp_path / "x.gguf"))
    assert (
        done.returncode == 2 and "not a complete GGUF file" in done.stderr and "Traceback" not in done.stderr
    )
