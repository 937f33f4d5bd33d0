"""A segment: the memory of one PE that others may write, as a file in /dev/shm (that is POSIX shared memory).

Where /dev/shm is missing (macOS) or too small (containers give it 64 MB), the file lies in the temporary folder. Its
owner holds a lock on it for as long as it lives, so anybody can tell a segment whose owner was killed."""

import atexit
import fcntl
import json
import mmap
import os
import struct
import tempfile
import time
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path

PREFIX = "mlcrt-"
HEADER_BYTES = 4096
_MAGIC = b"MLCRT\x00\x00\x01"
_YOUNG_S = 10.0  # a segment this young may not be locked yet

_own: set[Path] = set()  # of this process


def folders() -> list[Path]:
    """Where segments may lie, the best place first."""
    places = [Path("/dev/shm"), Path(tempfile.gettempdir())]
    return [place for place in places if place.is_dir() and os.access(place, os.W_OK)]


def segment_name(uid: list[int], pe: int) -> str:
    """At most 30 characters, the limit of some systems."""
    return f"{PREFIX}{sha256(json.dumps(list(uid)).encode()).hexdigest()[:16]}-{pe}"


@dataclass(frozen=True)
class PageLayout:
    """The KV pages of an engine: `shape` is `[layers, pages, 2, kv heads, page size, head_dim]`.

    `layer_stride` is the distance between layers in bytes."""

    shape: tuple[int, ...]
    dtype: str
    layer_stride: int

    @property
    def slots(self) -> int:
        """Tokens that the pages hold."""
        return self.shape[1] * self.shape[4]

    def fits(self, other: "PageLayout") -> bool:
        """Whether a layer here can be written from one there: all but the number of pages is equal."""
        return (
            self.dtype == other.dtype
            and self.shape[0] == other.shape[0]
            and self.shape[2:] == other.shape[2:]
        )


class Segment:
    """A mapped segment: a header that says its layout, and the pages behind it."""

    def __init__(self, path: Path, file: int, layout: PageLayout, generation: bytes) -> None:
        self.path = path
        self.layout = layout
        self.generation = generation
        self._file = file
        self.memory = mmap.mmap(file, 0)

    @classmethod
    def create(cls, name: str, layout: PageLayout, size: int) -> "Segment":
        """A new segment of `size` bytes of zeros, owned by this process until `unlink`.

        Replaces one whose owner is dead; raises `OSError` where a living engine has it."""
        generation = os.urandom(16)
        path = _roomiest(HEADER_BYTES + size) / name
        for folder in folders():
            if (folder / name).exists() and not _unlink_if_dead(folder / name, young_s=0.0):
                raise FileExistsError(
                    f"The shared memory {folder / name} belongs to a running engine; give each engine its own "
                    "uid and pe_start."
                )
        file = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            _own.add(path)
            os.ftruncate(file, HEADER_BYTES + size)
            text = json.dumps([list(layout.shape), layout.dtype, layout.layer_stride]).encode()
            os.pwrite(file, generation + struct.pack("<I", len(text)) + text, len(_MAGIC))
            os.pwrite(file, _MAGIC, 0)
            return cls(path, file, layout, generation)
        except BaseException:
            os.close(file)
            path.unlink(missing_ok=True)
            _own.discard(path)
            raise

    @classmethod
    def open(cls, name: str) -> "Segment":
        """Map a segment of another engine; raises `FileNotFoundError` where there is none that is alive."""
        for folder in folders():
            path = folder / name
            try:
                file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
            except FileNotFoundError:
                continue
            header = _read_header(file)
            if header is None or not _is_alive(file):
                os.close(file)
                continue
            layout, generation = header
            return cls(path, file, layout, generation)
        raise FileNotFoundError(f"There is no shared memory {name}: that engine is not running.")

    def is_current(self) -> bool:
        """Whether the name still leads to this very memory, and its owner lives."""
        try:
            there, here = os.stat(self.path), os.fstat(self._file)
        except OSError:
            return False
        return (there.st_dev, there.st_ino) == (here.st_dev, here.st_ino) and _is_alive(self._file)

    def unlink(self) -> None:
        """Remove the name; the memory goes when the last engine that maps it does."""
        self.path.unlink(missing_ok=True)
        _own.discard(self.path)

    def close(self) -> None:
        """Give the mapping back, unless arrays still look at it: then the last of those does."""
        try:
            self.memory.close()
        except BufferError:
            pass
        os.close(self._file)


def unlink_own() -> None:
    """Remove the names of all segments of this process; also runs at exit."""
    for path in list(_own):
        path.unlink(missing_ok=True)
        _own.discard(path)


atexit.register(unlink_own)


def unlink_all(uid: list[int], npes: int) -> int:
    """Remove the segments of a whole world, when its engines have ended; returns how many there were."""
    count = 0
    for pe in range(npes):
        for folder in folders():
            try:
                (folder / segment_name(uid, pe)).unlink()
                count += 1
            except OSError:
                pass
    return count


def sweep() -> int:
    """Remove segments of dead owners, of any world; returns how many there were."""
    return sum(
        _unlink_if_dead(path, young_s=_YOUNG_S) for folder in folders() for path in folder.glob(f"{PREFIX}*")
    )


def _roomiest(size: int) -> Path:
    """The first folder with room for `size` bytes, else the one with the most: pages take memory as they fill."""
    places = folders()
    if not places:
        raise OSError("Neither /dev/shm nor the temporary folder can be written; engines cannot share KV.")
    free = {place: (lambda s: s.f_bavail * s.f_frsize)(os.statvfs(place)) for place in places}
    return next((place for place in places if free[place] >= size), max(places, key=free.__getitem__))


def _read_header(file: int) -> tuple[PageLayout, bytes] | None:
    raw = os.pread(file, HEADER_BYTES, 0)
    if len(raw) < HEADER_BYTES or not raw.startswith(_MAGIC) or os.fstat(file).st_uid != os.getuid():
        return None
    start = len(_MAGIC)
    generation = raw[start : start + 16]
    (length,) = struct.unpack_from("<I", raw, start + 16)
    try:
        shape, dtype, stride = json.loads(raw[start + 20 : start + 20 + length])
    except ValueError:
        return None
    return PageLayout(tuple(shape), dtype, stride), generation


def _is_alive(file: int) -> bool:
    """Whether somebody else holds the owner's lock."""
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except OSError:
        return True
    fcntl.flock(file, fcntl.LOCK_UN)
    return False


def _unlink_if_dead(path: Path, young_s: float) -> bool:
    try:
        file = os.open(path, os.O_RDWR | os.O_NOFOLLOW | os.O_CLOEXEC)
    except FileNotFoundError:
        return True
    except OSError:
        return False
    try:
        if time.time() - os.fstat(file).st_mtime < young_s or _is_alive(file):
            return False
        path.unlink(missing_ok=True)
        return True
    finally:
        os.close(file)
