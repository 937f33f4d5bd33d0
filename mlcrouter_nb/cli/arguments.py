"""The arguments of `mlcrouter-nb router`; those that MLC-LLM has are spelled as `mlc_llm router` spells them."""

import argparse

from ..engine.program import WORLD_HELP
from ..version import __version__

EPILOG = f"""\
exit codes: 0 ended as asked, 1 a fault while running, 2 a wrong argument.

examples:
  mlcrouter-nb router smollm2-135m
  mlcrouter-nb router smollm2-135m --roles 2P2D --pd-balance-factor 0.1
  mlcrouter-nb router smollm2-135m --endpoint-hosts 127.0.0.1,127.0.0.1 --endpoint-ports 9001 9002
  mlcrouter-nb router my-model --policy round-robin --endpoint-urls http://127.0.0.1:9001 http://127.0.0.1:9002
  mlcrouter-nb serve smollm2-135m --port 9001

{WORLD_HELP}"""


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
