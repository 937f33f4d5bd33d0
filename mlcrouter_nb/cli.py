"""The command `mlcrouter-nb`: `router` boots engines and routes to them, `serve` is one engine."""

import argparse
import contextlib
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from .protocol.errors import ArgumentError, MlcRouterError
from .version import __version__

if TYPE_CHECKING:
    from .cluster import Cluster
    from .router.policy import Policy, PolicyBook
    from .telemetry import Snapshot

STREAM_GRACE = 10.0  # seconds that running streams get after SIGINT or SIGTERM

EPILOG = """\
exit codes: 0 ended as asked, 1 a fault while running, 2 a wrong argument.

examples:
  mlcrouter-nb router smollm2-135m
  mlcrouter-nb router smollm2-135m --roles 2P2D --pd-balance-factor 0.1
  mlcrouter-nb router smollm2-135m --endpoint-hosts 127.0.0.1,127.0.0.1 --endpoint-ports 9001 9002
  mlcrouter-nb router my-model --engine attach --endpoint-urls http://127.0.0.1:9001 http://127.0.0.1:9002
  mlcrouter-nb serve smollm2-135m --port 9001
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    try:
        if arguments[:1] == ["serve"]:
            return _serve(arguments[1:])
        options = make_parser().parse_args(arguments)
        return _router(options)
    except ArgumentError as error:
        print(f"mlcrouter-nb: {error}", file=sys.stderr)
        return 2
    except MlcRouterError as error:
        print(f"mlcrouter-nb: {error}", file=sys.stderr)
        return 1


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command; `serve` is only named here, its arguments are the engine's."""
    parser = argparse.ArgumentParser(
        "mlcrouter-nb",
        description="Boot LLM engines and route OpenAI requests to them.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    router = commands.add_parser(
        "router",
        help="boot engines, or attach to some, and serve an OpenAI endpoint that routes to them",
        description="Boot engines, or attach to some, and serve an OpenAI endpoint that routes to them. The options "
        "are spelled as those of `mlc_llm router`; without --endpoint-* the engines take free ports.",
        epilog=EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_model(router)
    _add_endpoints(router)
    _add_policy(router)
    _add_surface(router)
    commands.add_parser(
        "serve",
        help="one engine, the same as python -m mlcrouter_nb.engine; see mlcrouter-nb serve --help",
        add_help=False,
    )
    return parser


def _add_model(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "model", metavar="MODEL", help="smollm2-135m, or a path to a .gguf file; with attach its name"
    )
    parser.add_argument(
        "--model-lib",
        metavar="PATH",
        help="the compiled model library of an mlc engine (other engines need none)",
    )
    parser.add_argument(
        "--enable-prefix-cache",
        action="store_true",
        help="engines keep the KV of earlier prompts (default: off)",
    )
    parser.add_argument(
        "--tokenizer",
        metavar="PATH",
        help="a tokenizer.json or .gguf for policies that look at tokens (default: the model's own)",
    )


def _add_endpoints(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("engines")
    group.add_argument(
        "--engine",
        metavar="KIND",
        help="cpu: our own; mlc: MLC-LLM's, on GPUs (not in this version); attach: engines that run already, at "
        "--endpoint-urls (default: $MLCROUTER_ENGINE, else mlc for a model compiled for MLC-LLM where that is "
        "installed, else cpu)",
    )
    group.add_argument(
        "--roles",
        metavar="xPyD|N",
        help="x prefill and y decode engines, or N engines that do both (default: 1P2D, 2 for round-robin; of listed "
        "endpoints the first is for prefill)",
    )
    group.add_argument(
        "--endpoint-hosts",
        metavar="HOST,HOST",
        type=_comma_list,
        help="host of each engine (default: 127.0.0.1)",
    )
    group.add_argument(
        "--endpoint-ports",
        metavar="PORT",
        type=int,
        nargs="+",
        help="port of each engine (default: free ones)",
    )
    group.add_argument(
        "--endpoint-num-gpus",
        metavar="N",
        type=int,
        nargs="+",
        help="GPUs, or workers, of each engine (default: 1)",
    )
    group.add_argument(
        "--endpoint-urls", metavar="URL", nargs="+", help="addresses of engines that run already"
    )
    group.add_argument(
        "--mlc-python", metavar="PATH", help="the Python that has mlc_llm (default: $MLCROUTER_MLC_PYTHON)"
    )


def _add_policy(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("policy")
    group.add_argument(
        "--policy",
        metavar="NAME|FILE",
        help="a built-in policy (disagg, round-robin, least-loaded) or a .py file with `async def route(request, "
        "engines)` (default: disagg, or round-robin on engines without roles)",
    )
    group.add_argument(
        "--router-mode", choices=["disagg", "round-robin"], help="the same as --policy, for these two"
    )
    group.add_argument(
        "--pd-balance-factor",
        metavar="F",
        type=float,
        help="the share of a prompt that the decode engine prefills, 0 to 1 (default: 0)",
    )


def _add_surface(parser: argparse.ArgumentParser) -> None:
    group = parser.add_argument_group("the OpenAI endpoint")
    group.add_argument("--router-host", metavar="HOST", default="127.0.0.1", help="(default: %(default)s)")
    group.add_argument(
        "--router-port",
        metavar="PORT",
        type=int,
        default=8000,
        help="0 takes any free one (default: %(default)s)",
    )
    group.add_argument(
        "--api-key-file",
        metavar="FILE",
        help="holds the key that clients must send (default: $MLCROUTER_API_KEY, else none)",
    )


def _comma_list(text: str) -> list[str]:
    return [host.strip() for host in text.split(",") if host.strip()]


def _serve(arguments: list[str]) -> int:
    """One engine: the engine's own program."""
    from .engine.program import main as engine_main

    return engine_main(arguments, prog="mlcrouter-nb serve")


def _router(options: argparse.Namespace) -> int:
    """Boot, serve until a signal comes, stop."""
    cluster = _make_cluster(options)
    with _signals_interrupt():
        try:
            cluster.start_blocking(_ProgressLines())
        except KeyboardInterrupt:
            print("Stopped while booting.", file=sys.stderr)
            return 0
        print(cluster.url, flush=True)
        try:
            code = _watch(cluster)
        except KeyboardInterrupt:
            code = 0
            print(f"Stopping: running streams get {STREAM_GRACE:g} s.", file=sys.stderr, flush=True)
        try:
            cluster.down_blocking(grace=STREAM_GRACE)
        except KeyboardInterrupt:
            _leave()
    return code


@contextlib.contextmanager
def _signals_interrupt() -> Iterator[None]:
    """SIGINT and SIGTERM raise KeyboardInterrupt, also where SIGINT came in ignored (a shell's background job)."""
    before = {number: signal.signal(number, _interrupt) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)


def _make_cluster(options: argparse.Namespace) -> "Cluster":
    from .cluster import Cluster
    from .router.policy import PolicyBook

    book = PolicyBook()
    policy = _policy(options, book)
    roles = options.roles
    listed = (
        options.endpoint_hosts or options.endpoint_ports or options.endpoint_num_gpus or options.endpoint_urls
    )
    if roles is None and not listed and policy == "round-robin":
        roles = "2"
    parameters = {} if options.pd_balance_factor is None else {"pd_balance_factor": options.pd_balance_factor}
    return Cluster(
        options.model,
        roles=roles,
        engine=options.engine,
        endpoint_urls=options.endpoint_urls or (),
        endpoint_hosts=options.endpoint_hosts,
        endpoint_ports=options.endpoint_ports,
        endpoint_num_gpus=options.endpoint_num_gpus,
        host=options.router_host,
        port=options.router_port,
        policy=policy,
        parameters=parameters,
        book=book,
        prefix_cache=options.enable_prefix_cache,
        tokenizer=options.tokenizer,
        api_key=_api_key(options.api_key_file),
    )


def _policy(options: argparse.Namespace, book: "PolicyBook") -> "str | Policy | None":
    """The policy that --policy or --router-mode names; a file is compiled and put in the book."""
    if options.policy and options.router_mode and options.policy != options.router_mode:
        raise ArgumentError(
            f"--policy {options.policy} and --router-mode {options.router_mode} differ: give one of them."
        )
    chosen: str | None = options.policy or options.router_mode
    if chosen is None or chosen in book.names():
        return chosen
    path = Path(chosen).expanduser()
    if path.suffix != ".py":
        book.get(chosen)  # raises, and lists what there is
    try:
        source = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"The policy file {path} cannot be read: {error}.") from error
    return book.define(book.compile(path.stem.replace("_", "-"), source, str(path), str(path)))


def _api_key(path: str | None) -> str | None:
    if path is None:
        return None
    try:
        key = Path(path).expanduser().read_text(encoding="utf-8").strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ArgumentError(f"The key file {path} cannot be read: {error}.") from error
    if not key:
        raise ArgumentError(f"The key file {path} is empty: write the key into it.")
    return key


def _watch(cluster: "Cluster") -> int:
    """Wait for a KeyboardInterrupt; returns 1 when all engines have ended by themselves."""
    idle = threading.Event()
    told: set[str] = set()
    while True:
        idle.wait(0.5)
        engines = cluster.status().engines
        for engine in engines:
            if engine.state == "failed" and engine.name not in told:
                told.add(engine.name)
                print(f"{engine.name} {engine.detail}", file=sys.stderr, flush=True)
        if cluster.options.kind != "attach" and all(engine.state == "failed" for engine in engines):
            print("mlcrouter-nb: all engines have ended.", file=sys.stderr)
            return 1


def _interrupt(number: int, frame: FrameType | None) -> NoReturn:
    raise KeyboardInterrupt


def _leave() -> NoReturn:
    """A second signal while stopping: leave at once; engines end with our end of their pipes."""
    import os

    print("Leaving at once.", file=sys.stderr, flush=True)
    os._exit(1)


class _ProgressLines:
    """Boot progress on stderr: a line for each new stage of an engine, and every two seconds in between."""

    PERIOD = 2.0

    def __init__(self) -> None:
        self._shown: dict[str, tuple[str, float]] = {}

    def __call__(self, snapshot: "Snapshot") -> None:
        now = time.monotonic()
        texts = {engine.name: engine.detail or engine.state for engine in snapshot.engines}
        if len(texts) > 1 and len(set(texts.values())) == 1:
            texts = {"all": next(iter(texts.values()))}
        for name, text in texts.items():
            stage = text.partition(":")[0]
            shown, when = self._shown.get(name, ("", 0.0))
            if stage != shown or (now - when >= self.PERIOD and text != shown):
                self._shown[name] = (stage, now)
                first = text.partition("\n")[0]
                print(f"{snapshot.model if name == 'all' else name}: {first}", file=sys.stderr, flush=True)


if __name__ == "__main__":
    sys.exit(main())
