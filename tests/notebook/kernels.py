"""A real kernel and a client of it, for tests."""

import contextlib
import os
import queue
import re
import socket
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import psutil
from jupyter_client import KernelManager
from jupyter_client.blocking import BlockingKernelClient


@dataclass
class Shown:
    """What one cell showed: streams and tracebacks in `pieces`, displays by id, and when its reply came."""

    pieces: list[str] = field(default_factory=list)
    displays: dict[object, dict[str, Any]] = field(default_factory=dict)
    updates: int = 0
    idle: bool = False
    reply: str | None = None
    ended: float = 0.0

    @property
    def text(self) -> str:
        """All of it, as text."""
        return "".join(self.pieces) + "\n".join(data.get("text/plain", "") for data in self.displays.values())


class Kernel:
    """`run` runs a cell; what other cells show meanwhile is kept under their own ids in `shown`."""

    def __init__(self, folder: Path) -> None:
        environment = dict(os.environ, IPYTHONDIR=str(folder / "ipython"))
        self.manager = KernelManager(kernel_name="python3", connection_file=str(folder / "connection.json"))
        self.manager.start_kernel(cwd=str(folder), env=environment)
        self.shown: dict[str, Shown] = {}
        self.client = self._connect()

    @property
    def pid(self) -> int:
        return int(self.manager.provisioner.pid)

    def start(self, source: str) -> str:
        """Send a cell; answers its id."""
        return self.client.execute(source)

    def run(self, source: str, timeout: float = 90.0) -> Shown:
        """Run a cell that must succeed."""
        shown = self.finish(self.start(source), timeout)
        assert shown.reply == "ok", shown.text
        return shown

    def finish(self, cell: str, timeout: float = 90.0) -> Shown:
        """Wait for the end of a cell, whatever it is."""
        shown = self.of(cell)
        deadline = time.monotonic() + timeout
        while not shown.idle or shown.reply is None:
            assert time.monotonic() < deadline, f"no end after {timeout} s; so far: {shown.text}"
            self._poll()
        return shown

    def wait_for(self, cell: str, text: str, timeout: float = 60.0) -> None:
        """Wait until a cell has shown a text."""
        deadline = time.monotonic() + timeout
        while text not in self.of(cell).text:
            assert time.monotonic() < deadline, f"no {text!r} after {timeout} s in: {self.of(cell).text}"
            self._poll()

    def of(self, cell: str) -> Shown:
        return self.shown.setdefault(cell, Shown())

    def restart(self) -> None:
        self.client.stop_channels()
        self.manager.restart_kernel(now=False)
        self.client = self._connect()

    def close(self) -> None:
        self.client.stop_channels()
        if self.manager.is_alive():
            self.manager.shutdown_kernel(now=False)
        self.manager.cleanup_resources()

    def _connect(self) -> BlockingKernelClient:
        client = self.manager.client()
        client.start_channels()
        client.wait_for_ready(timeout=60)
        return client

    def _poll(self) -> None:
        with contextlib.suppress(queue.Empty):
            self._take(self.client.get_iopub_msg(timeout=0.02))
        with contextlib.suppress(queue.Empty):
            message = self.client.get_shell_msg(timeout=0)
            if message["msg_type"] == "execute_reply":
                shown = self.of(message["parent_header"]["msg_id"])
                shown.reply, shown.ended = message["content"]["status"], time.monotonic()

    def _take(self, message: dict[str, Any]) -> None:
        content, kind = message["content"], message["msg_type"]
        shown = self.of(message["parent_header"].get("msg_id", ""))
        if kind == "stream":
            shown.pieces.append(content["text"])
        elif kind == "error":
            shown.pieces.append("\n".join(content["traceback"]))
        elif kind in ("display_data", "update_display_data", "execute_result"):
            place = content.get("transient", {}).get("display_id") or len(shown.displays)
            shown.displays[place] = content["data"]
            shown.updates += 1
        elif kind == "status" and content["execution_state"] == "idle":
            shown.idle = True


@dataclass
class Footprint:
    """What a cluster leaves on a machine: processes, ports, segments of shared memory."""

    processes: list[psutil.Process]
    ports: list[int]
    segments: set[str]

    def gone(self) -> bool:
        """Whether all of it has been removed."""
        return not self.left()

    def left(self) -> str:
        """What is still there."""
        alive = [p.pid for p in self.processes if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
        open_ports = [port for port in self.ports if answers(port)]
        segments = sorted(name for name in self.segments if Path("/dev/shm", name).exists())
        parts = {"processes": alive, "ports": open_ports, "segments": segments}
        return ", ".join(f"{name} {value}" for name, value in parts.items() if value)


def segments_of(processes: list[psutil.Process]) -> set[str]:
    """The shared-memory segments that these processes have mapped (Linux; elsewhere none can be told apart)."""
    maps = [Path(f"/proc/{process.pid}/maps") for process in processes]
    texts = [path.read_text() for path in maps if path.exists()]
    return {name for text in texts for name in re.findall(r"/dev/shm/(mlcrt-\S+)", text)}


def answers(port: int) -> bool:
    """Whether something accepts connections there."""
    with socket.socket() as probe:
        probe.settimeout(0.5)
        return probe.connect_ex(("127.0.0.1", port)) == 0
