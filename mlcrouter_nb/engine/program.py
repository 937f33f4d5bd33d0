"""The engine as a program: arguments, life and death of the process. Nothing heavy is imported before `main` says so."""

import argparse
import asyncio
import json
import logging
import os
import signal
import sys
import threading
from collections.abc import Callable, Sequence
from typing import Any

from ..protocol.errors import ArgumentError, MlcRouterError
from ..protocol.progress import Progress
from ..version import __version__

GRACE_S = 10.0  # for streams, after a signal
_log = logging.getLogger(__name__)


WORLD_HELP = """\
Engines send KV to each other when they are started as one world on one machine: each with the same "uid" (any numbers,
new ones for each world), "npes" the number of engines, and its own place "pe_start", counted in the order in which the
router lists them, prefill engines first:
  MLC_NVSHMEM_INIT_CONFIG_JSON_STR='{"uid": [3, 1, 4], "npes": 2, "pe_start": 0}' mlcrouter-nb serve smollm2-135m --port 9001 &
  MLC_NVSHMEM_INIT_CONFIG_JSON_STR='{"uid": [3, 1, 4], "npes": 2, "pe_start": 1}' mlcrouter-nb serve smollm2-135m --port 9002 &
  mlcrouter-nb router smollm2-135m --roles 1P1D --endpoint-urls http://127.0.0.1:9001 http://127.0.0.1:9002
Engines started without it serve policies that use one engine for a request: --policy round-robin.
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The engine's arguments, shared with `mlcrouter-nb serve`."""
    add = parser.add_argument
    add("model", metavar="MODEL", help="smollm2-135m, or a path to a .gguf file")
    add("--host", default="127.0.0.1", help="address to listen on (default: %(default)s)")
    add("--port", type=_between(0, 65535), default=0, help="port; 0, the default, takes a free one")
    add(
        "--role",
        choices=("prefill", "decode"),
        help="what it is used for; shown in /metrics, changes nothing",
    )
    add("--enable-prefix-cache", action="store_true", help="keep KV of finished requests for later prompts")
    add("--threads", type=_between(1, 1024), metavar="N", help="threads (default: one per core)")
    add(
        "--kernels",
        default="auto",
        choices=("auto", "avx512-vnni", "generic"),
        help="which kernels to run (default: the best that this CPU can)",
    )
    add(
        "--max-total-seq-length",
        type=_between(32, 1 << 24),
        default=8192,
        metavar="N",
        help="tokens in the KV cache, all requests together; smollm2-135m takes 46 KB each (default: %(default)s)",
    )
    add(
        "--max-num-sequence",
        type=_between(1, 256),
        default=16,
        metavar="N",
        help="requests computed at once (default: %(default)s)",
    )
    add(
        "--prefill-chunk-size",
        type=_between(16, 8192),
        default=256,
        metavar="N",
        help="tokens in one forward pass: more is a little faster, less disturbs streams less (default: %(default)s)",
    )
    add("--served-model-name", metavar="ID", help="the model's id in /v1/models (default: MODEL's own)")
    add("--exit-on-stdin-eof", action="store_true", help="end when stdin is closed; for launchers")
    add(
        "--report-json",
        action="store_true",
        help="progress and readiness as JSON lines on stdout; for launchers",
    )


def _between(low: int, high: int) -> Callable[[str], int]:
    def number(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = low - 1
        if not low <= value <= high:
            raise argparse.ArgumentTypeError(f"{text!r} is not a number from {low} to {high}")
        return value

    return number


def main(argv: Sequence[str] | None = None, *, prog: str = "python -m mlcrouter_nb.engine") -> int:
    """Run until a signal comes. Returns the exit code: 0, 1 a fault while running, 2 a wrong argument."""
    parser = argparse.ArgumentParser(
        prog=prog,
        description="Serve one model on this machine's CPUs.",
        epilog=WORLD_HELP,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_arguments(parser)
    parser.add_argument("--version", action="version", version=__version__)
    return run(parser.parse_args(argv))


def run(arguments: argparse.Namespace) -> int:
    """The same with parsed arguments."""
    if arguments.exit_on_stdin_eof:
        threading.Thread(target=_end_with_stdin, name="stdin", daemon=True).start()
    logging.basicConfig(stream=sys.stderr, level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s")
    report = _Report(as_json=arguments.report_json)
    try:
        with asyncio.Runner(loop_factory=_new_loop) as runner:
            return runner.run(_serve(arguments, report))
    except ArgumentError as error:
        print(error, file=sys.stderr)
        return 2
    except ImportError as error:
        print(f"The CPU engine needs the extra 'cpu' ({error}): pip install '.[cpu]'.", file=sys.stderr)
        return 2
    except (MlcRouterError, OSError) as error:
        print(error, file=sys.stderr)
        return 1


def _new_loop() -> asyncio.AbstractEventLoop:
    """uvloop's where there is one: the loop shares few cores with the model."""
    try:
        import uvloop
    except ImportError:
        return asyncio.new_event_loop()
    return uvloop.new_event_loop()


class _Report:
    """Progress and readiness, for people or for a launcher."""

    def __init__(self, *, as_json: bool) -> None:
        self._as_json = as_json
        self._shown = ""

    def progress(self, progress: Progress) -> None:
        """Called from any thread."""
        if self._as_json:
            self._line(
                {"event": "progress", "stage": progress.stage, "done": progress.done, "total": progress.total}
            )
        elif (line := f"{progress.stage} {int(10 * (progress.fraction or 0))}") != self._shown:
            self._shown = line
            print(progress, file=sys.stderr, flush=True)

    def ready(self, **facts: Any) -> None:
        if self._as_json:
            self._line({"event": "ready", **facts})
            _log.info(
                "%s is ready at %s: %s kernels, %d KV pages of %d tokens",
                *(facts[name] for name in ("model", "url", "kernels", "kv_pages", "page_size")),
            )  # the launcher keeps stderr as the engine's log
        else:
            print(f"{facts['model']} with {facts['kernels']} kernels is ready.", file=sys.stderr)
            print(facts["url"], flush=True)

    def _line(self, content: dict[str, Any]) -> None:
        try:
            print(json.dumps(content), flush=True)
        except (BrokenPipeError, ValueError):
            pass  # the launcher does not listen any more; --exit-on-stdin-eof ends us where it is gone


async def _serve(arguments: argparse.Namespace, report: _Report) -> int:
    """Boot, listen, wait for a signal, let streams end."""
    ended = asyncio.Event()
    for number in (signal.SIGINT, signal.SIGTERM):
        asyncio.get_running_loop().add_signal_handler(number, _on_signal, ended)
    from .boot import boot  # from here on it is heavy

    booting = asyncio.ensure_future(boot(arguments, report.progress))
    waiting = asyncio.ensure_future(ended.wait())
    await asyncio.wait({booting, waiting}, return_when=asyncio.FIRST_COMPLETED)
    if not booting.done():
        _leave(0)  # a build cannot be interrupted; nothing is served yet
    engine = await booting
    try:
        port = await engine.listen(arguments.host, arguments.port, grace_s=GRACE_S)
        host = f"[{arguments.host}]" if ":" in arguments.host else arguments.host
        report.ready(url=f"http://{host}:{port}", port=port, **engine.facts())
        await waiting
        _log.info("Stopping: streams get %.0f s", GRACE_S)
    finally:
        waiting.cancel()
        stopped = await engine.stop()
    if not stopped:
        _log.error("The engine thread did not end in time")
        _leave(1)
    return 0


def _on_signal(ended: asyncio.Event) -> None:
    if ended.is_set():
        _leave(1)  # asked twice
    ended.set()


def _end_with_stdin() -> None:
    """Whoever started us keeps our stdin open; however it dies, the system closes it."""
    try:
        while os.read(sys.stdin.fileno(), 4096):
            pass
    except (OSError, ValueError):
        pass
    _leave(0)


def _leave(code: int) -> None:
    """End at once, but leave no shared memory behind."""
    try:
        from ..nvshmem import unlink_own

        unlink_own()
    finally:
        sys.stdout.flush()
        os._exit(code)
