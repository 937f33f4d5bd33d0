"""A program that runs a cluster until it is killed: `python parent.py stand-in|real [returns|spins]`; says pids, ports and URL as JSON."""

import json
import signal
import sys
import time
from pathlib import Path
from typing import Any

from mlcrouter_nb.cluster import Cluster, service
from mlcrouter_nb.cluster.launchers.cpu import CpuLauncher, CpuOptions
from mlcrouter_nb.cluster.model import Model


class Words:
    """A tokenizer whose tokens are characters."""

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        return [ord(c) for c in text]

    def decode(self, ids: list[int]) -> str:
        return "".join(map(chr, ids))


def use_stand_ins(mode: str = "deaf") -> None:
    async def find_model(options: Any, telemetry: Any) -> Model:
        return Model("stand-in", None, Words(), None)

    def make_launcher(options: Any, model: Model) -> CpuLauncher:
        command = (sys.executable, str(Path(__file__).with_name("stand_in_engine.py")), mode)
        return CpuLauncher(CpuOptions(Path("none.gguf"), "stand-in", command=command), options.new_world())

    service.find_model = find_model
    service.make_launcher = make_launcher


SPIN = """\
async def route(request, engines):
    while True:
        pass
    return engines.all[0].complete(request)
"""


def spin(cluster: Cluster) -> None:
    """Let a policy block the router's loop."""
    cluster.use(cluster.book.compile("spin", SPIN, "test", "spin.py"))
    cluster.submit("Who?")
    while cluster.loop_thread.blocked is None:
        time.sleep(0.01)


def main() -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.argv[1] == "stand-in":
        use_stand_ins()
    model = "stand-in" if sys.argv[1] == "stand-in" else "smollm2-135m"
    cluster = Cluster(model, engine="cpu", roles="1P1D").start_blocking()
    engines = [{"pid": engine.pid, "url": engine.url} for engine in cluster.engines]
    uid = list(cluster.service.launcher.world.uid)
    print(json.dumps({"engines": engines, "url": cluster.url, "uid": uid}), flush=True)
    if sys.argv[2:] == ["returns"]:
        return
    if sys.argv[2:] == ["spins"]:
        spin(cluster)
        return
    time.sleep(600)


if __name__ == "__main__":
    main()
