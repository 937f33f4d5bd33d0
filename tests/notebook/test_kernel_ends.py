"""However a kernel ends, nothing of its cluster stays: real kernels, real engines."""

import re
import time
import urllib.request
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest

pytestmark = [pytest.mark.kernel, pytest.mark.engine, pytest.mark.timeout(240)]

UP = "import mlcrouter_nb\ncluster = %route up --roles 1P1D"
PORTS = (
    "from urllib.parse import urlsplit\n"
    "print(*[urlsplit(e.url).port for e in cluster.status().engines], urlsplit(cluster.url).port)"
)


def boot(kernel: Any, kernels: Any, roles: str = "1P1D") -> Any:
    """Boot engines in the kernel and take down what there is of them."""
    kernel.run(UP.replace("1P1D", roles), timeout=150)
    ports = [int(port) for port in kernel.run(PORTS).text.split()]
    processes = psutil.Process(kernel.pid).children(recursive=True)
    engines = [p for p in processes if "mlcrouter_nb.engine" in " ".join(p.cmdline())]
    assert len(engines) == len(ports) - 1
    assert all(kernels.answers(port) for port in ports)
    segments = kernels.segments_of(engines)
    assert len(segments) == len(engines) or not Path("/proc/self/maps").exists()
    return kernels.Footprint(processes, ports, segments)


def gone_within(footprint: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not footprint.gone():
        assert time.monotonic() < deadline, f"left after {seconds} s: {footprint.left()}"
        time.sleep(0.05)


def test_an_interrupt_leaves_the_engines_alive(start_kernel: Callable[[], Any], kernels: Any) -> None:
    kernel = start_kernel()
    footprint = boot(kernel, kernels)
    kernel.manager.interrupt_kernel()
    cell = kernel.start("import time\ntime.sleep(30)")
    time.sleep(0.5)
    kernel.manager.interrupt_kernel()
    kernel.finish(cell, 10)
    assert all(process.is_running() for process in footprint.processes)
    cell = kernel.start("%%ask --max-tokens 1500 --raw\nOnce upon a time")
    kernel.wait_for(cell, "e")
    kernel.manager.interrupt_kernel()
    began = time.monotonic()
    shown = kernel.finish(cell, 5)
    assert shown.reply == "error" and shown.ended - began < 0.5
    all_pages_come_back(footprint.ports[:2])
    assert "out" in kernel.run("%%ask --max-tokens 4\nhello").text
    kernel.run("%route down")
    gone_within(footprint, 5)


def all_pages_come_back(ports: list[int], seconds: float = 1.0) -> None:
    """Every KV page of every engine is free or only in the prefix cache."""
    deadline = time.monotonic() + seconds
    for port in ports:
        while True:
            with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as page:
                text = page.read().decode()
            free, cached, total = (
                float(re.search(rf"^mlcrouter_engine_kv_pages_{name} (\S+)", text, re.M)[1])  # type: ignore[index]
                for name in ("free", "cached", "total")
            )
            if free + cached == total:
                break
            assert time.monotonic() < deadline, f"{total - free - cached} pages are still held"
            time.sleep(0.05)


def restart(kernel: Any) -> None:
    kernel.restart()


def shut_down(kernel: Any) -> None:
    kernel.manager.shutdown_kernel(now=False)


def kill(kernel: Any) -> None:
    psutil.Process(kernel.pid).kill()


def unload(kernel: Any) -> None:
    kernel.run("%unload_ext mlcrouter_nb")


@pytest.mark.parametrize("end", [restart, shut_down, kill, unload])
def test_nothing_is_left_five_seconds_after_the_end(
    start_kernel: Callable[[], Any], kernels: Any, end: Callable[[Any], None]
) -> None:
    kernel = start_kernel()
    footprint = boot(kernel, kernels)
    end(kernel)
    gone_within(footprint, 5)


def test_an_interrupted_boot_leaves_nothing(start_kernel: Callable[[], Any], kernels: Any) -> None:
    kernel = start_kernel()
    cell = kernel.start(UP)
    deadline = time.monotonic() + 30
    while not (children := psutil.Process(kernel.pid).children(recursive=True)):
        assert time.monotonic() < deadline
    time.sleep(0.3)
    kernel.manager.interrupt_kernel()
    shown = kernel.finish(cell, 15)
    assert shown.reply == "error" and "Traceback" not in shown.text
    gone_within(kernels.Footprint(children, [], set()), 5)
    assert "No cluster is running" in kernel.run("%route").text


def test_two_kernels_at_once(start_kernel: Callable[[], Any], kernels: Any) -> None:
    first, second = start_kernel(), start_kernel()
    one, two = boot(first, kernels), boot(second, kernels)
    assert not set(one.ports) & set(two.ports)
    asked = [kernel.start("%%ask --max-tokens 8\nhello") for kernel in (first, second)]
    for kernel, cell in zip((first, second), asked, strict=True):
        assert "P0 prefill" in kernel.finish(cell).text
    psutil.Process(first.pid).kill()
    gone_within(one, 5)
    assert "8 out" in second.run("%%ask --max-tokens 8\nstill there?").text
    second.run("%route down")
    gone_within(two, 5)
