"""The command line: help, exit codes, what goes where, and how signals end it. Engines are attached stand-ins."""

import contextlib
import os
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mlcrouter_nb import cli
from mlcrouter_nb.cli.router import make_cluster
from mlcrouter_nb.cluster.roles import parse_roles
from mlcrouter_nb.engine.program import WORLD_HELP

STAND_IN = Path(__file__).with_name("stand_in_engine.py")
COMMAND = [sys.executable, "-m", "mlcrouter_nb.cli"]


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return int(probe.getsockname()[1])


@pytest.fixture
def engine_url() -> Iterator[str]:
    """A stand-in engine that runs already."""
    with subprocess.Popen([sys.executable, str(STAND_IN), "ok", "none"], stdout=subprocess.PIPE) as process:
        for line in process.stdout:
            if match := re.search(rb"http://127\.0\.0\.1:\d+", line):
                break
        yield match[0].decode()
        process.kill()


@contextlib.contextmanager
def router(*arguments: str) -> Iterator[tuple[subprocess.Popen[bytes], str]]:
    """A running `mlcrouter-nb router`, and the last line of its stdout."""
    with subprocess.Popen(
        [*COMMAND, "router", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        stdin=subprocess.DEVNULL,
    ) as process:
        try:
            yield process, process.stdout.readline().decode().strip()
        finally:
            if process.poll() is None:
                process.kill()


def run(*arguments: str, **options: Any) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*COMMAND, *arguments], capture_output=True, text=True, timeout=60, **options)


def test_help_names_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(["router", "--help"])
    assert ended.value.code == 0
    text = capsys.readouterr().out
    mlc = ["--model-lib", "--router-mode", "--router-host", "--router-port", "--endpoint-hosts", "--endpoint-ports",
           "--endpoint-num-gpus", "--enable-prefix-cache", "--pd-balance-factor"]  # fmt: skip
    ours = [
        "--engine",
        "--roles",
        "--endpoint-urls",
        "--policy",
        "--api-key-file",
        "--tokenizer",
        "--mlc-python",
    ]
    assert [option for option in mlc + ours if option not in text] == []
    assert "8000" in text


def test_help_of_the_whole_and_of_serve(capsys: pytest.CaptureFixture[str]) -> None:
    for arguments, said in (["--help"], "serve"), (["serve", "--help"], "--exit-on-stdin-eof"):
        with pytest.raises(SystemExit) as ended:
            cli.main(arguments)
        assert ended.value.code == 0
        assert said in capsys.readouterr().out


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["m", "--roles", "0P1D"], "roles '0P1D'"),
        (["m", "--roles", "nonsense"], "roles 'nonsense'"),
        (["smollm2-135m", "--pd-balance-factor", "1.2"], "1.2"),
        (["smollm2-135m", "--pd-balance-factor", "-0.1"], "-0.1"),
        (["m", "--engine", "abacus"], "abacus"),
        (["m", "--engine", "mlc"], "MLC-LLM"),
        (["m", "--engine", "attach"], "--endpoint-urls"),
        (["m", "--policy", "nobody"], "nobody"),
        (["m", "--policy", "/nowhere/policy.py"], "/nowhere/policy.py"),
        (["m", "--policy", "disagg", "--router-mode", "round-robin"], "differ"),
        (["m", "--router-mode", "round-robin", "--pd-balance-factor", "0.5"], "pd_balance_factor"),
        (["m", "--router-mode", "disagg", "--endpoint-ports", "9001"], "disagg needs"),
        (["m", "--api-key-file", "/nowhere/key"], "/nowhere/key"),
        (["nobody/knows-this", "--router-port", "0"], "nobody/knows-this"),
        (["m", "--router-port", "70000"], "70000"),
        (["m", "--endpoint-hosts", "a,b", "--endpoint-ports", "1"], "differ in length"),
    ],
)
def test_a_wrong_argument_is_one_line_and_exit_code_2(
    arguments: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["router", *arguments]) == 2
    captured = capsys.readouterr()
    assert captured.out == ""
    assert said in captured.err
    assert captured.err.startswith("mlcrouter-nb: ")
    assert captured.err.count("\n") == 1


@pytest.mark.parametrize(
    "arguments", [[], ["router"], ["router", "m", "--no-such"], ["router", "m", "--router-port", "x"]]
)
def test_what_argparse_refuses_is_exit_code_2(
    arguments: list[str], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as ended:
        cli.main(arguments)
    assert ended.value.code == 2
    assert "usage:" in capsys.readouterr().err


def test_a_taken_port_is_exit_code_2_before_the_boot(capsys: pytest.CaptureFixture[str]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        assert cli.main(["router", "smollm2-135m", "--router-port", port]) == 2
    assert port in capsys.readouterr().err


def test_mlcs_spelling_of_lists() -> None:
    options = cli.make_parser().parse_args(
        [
            "router",
            "m",
            "--endpoint-hosts",
            "127.0.0.1,127.0.0.1",
            "--endpoint-ports",
            "9001",
            "9002",
            "--endpoint-num-gpus",
            "2",
            "2",
        ]
    )
    cluster = make_cluster(options)
    assert [(spec.name, spec.port, spec.rank) for spec in cluster.options.specs()] == [
        ("P0", 9001, 0),
        ("D1", 9002, 2),
    ]
    assert not cluster.options.prefix_cache


@pytest.mark.parametrize(
    ("arguments", "roles", "policy"),
    [
        ([], "1P2D", "disagg"),
        (["--router-mode", "round-robin"], "2", "round-robin"),
        (["--roles", "3"], "3", "round-robin"),
        (["--roles", "2P2D", "--policy", "least-loaded"], "2P2D", "least-loaded"),
    ],
)
def test_defaults(arguments: list[str], roles: str, policy: str) -> None:
    cluster = make_cluster(cli.make_parser().parse_args(["router", "m", *arguments]))
    assert cluster.options.slots == tuple(parse_roles(roles))
    assert cluster._first_policy.name == policy


def test_a_policy_from_a_file(tmp_path: Path) -> None:
    path = tmp_path / "first_engine.py"
    path.write_text("async def route(request, engines):\n    return engines.all[0].complete(request)\n")
    cluster = make_cluster(cli.make_parser().parse_args(["router", "m", "--policy", str(path)]))
    assert cluster._first_policy.name == "first-engine"
    assert cluster.book.get("first-engine").origin == str(path)


def test_attach_serves_and_says_its_address_last(engine_url: str) -> None:
    port = free_port()
    arguments = ["my-model", "--engine", "attach", "--endpoint-urls", engine_url, "--router-port", str(port)]
    with router(*arguments) as (process, url):
        assert url == f"http://127.0.0.1:{port}/v1"
        with urllib.request.urlopen(f"{url}/models", timeout=5) as answer:
            assert answer.status == 200
        begin = time.monotonic()
        process.send_signal(signal.SIGTERM)
        assert process.wait(10) == 0
        assert time.monotonic() - begin < 3, "idle"
        assert process.stdout.read() == b""
        assert process.stderr.read().endswith(b"Stopping.\nStopped.\n")


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_a_running_stream_ends_before_the_router_does(engine_url: str, number: signal.Signals) -> None:
    arguments = ["my-model", "--endpoint-urls", engine_url, "--router-port", "0"]
    with router(*arguments) as (process, url):
        body = b'{"model": "any", "prompt": "Who?", "max_tokens": 11, "stream": true}'
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=10) as answer:
            first = answer.readline()
            process.send_signal(number)
            text = first + answer.read()
        assert text.count(b'"text"') == 11
        assert text.rstrip().endswith(b"data: [DONE]")
        assert process.wait(10) == 0
        assert process.stderr.read().endswith(b"Stopping: 1 running request gets 10 s.\nStopped.\n")


def test_a_signal_while_booting_stops_everything(stand_in_cpu: Callable[..., list[str]]) -> None:
    with subprocess.Popen(stand_in_cpu("silent"), stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        while b"building kernels" not in process.stderr.readline():
            pass
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert time.monotonic() - begin < 5
        assert process.stdout.read() == b"", "no address was promised"


def test_a_failed_boot_is_exit_code_1(stand_in_cpu: Callable[..., list[str]]) -> None:
    result = subprocess.run(stand_in_cpu("exits"), capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "exit code 3" in result.stderr
    assert "vpdpbusd" in result.stderr
    assert "Traceback" not in result.stderr
    assert result.stdout == ""


def test_all_engines_dead_is_exit_code_1(stand_in_cpu: Callable[..., list[str]]) -> None:
    result = subprocess.run(stand_in_cpu("dies"), capture_output=True, text=True, timeout=60)
    assert result.returncode == 1
    assert "out of cheese" in result.stderr
    assert "all engines have ended" in result.stderr


@pytest.fixture
def stand_in_cpu(tmp_path: Path) -> Callable[..., list[str]]:
    """The command line of a router whose CPU engines are stand-ins of some mode."""

    def make(mode: str) -> list[str]:
        script = tmp_path / "router.py"
        script.write_text(
            f"import sys; sys.path.insert(0, {str(STAND_IN.parent)!r})\n"
            f"import parent; parent.use_stand_ins({mode!r})\n"
            "from mlcrouter_nb import cli; sys.exit(cli.main(['router', 'm', '--router-port', '0', '--roles', '1P1D']))\n"
        )
        return [sys.executable, str(script)]

    return make


@pytest.mark.engine
def test_serve_is_the_engine() -> None:
    with subprocess.Popen(
        [*COMMAND, "serve", "smollm2-135m", "--port", "0"], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL
    ) as process:
        try:
            url = process.stdout.readline().decode().strip()
            with urllib.request.urlopen(f"{url}/v1/models", timeout=10) as answer:
                assert b"smollm2-135m" in answer.read()
            process.send_signal(signal.SIGTERM)
            assert process.wait(10) == 0
        finally:
            if process.poll() is None:
                process.kill()


@pytest.mark.engine
def test_the_router_with_real_engines() -> None:
    with router("smollm2-135m", "--router-port", "0", "--roles", "1P1D") as (process, url):
        body = b'{"model": "smollm2-135m", "prompt": "Hi", "max_tokens": 4}'
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert b'"completion_tokens":4' in answer.read().replace(b": ", b":")
        begin = time.monotonic()
        process.send_signal(signal.SIGINT)
        assert process.wait(10) == 0
        assert time.monotonic() - begin < 3, "idle"
        assert process.stdout.read() == b""
        progress = process.stderr.read().decode()
        assert "Traceback" not in progress
        assert "D1" in progress


@contextlib.contextmanager
def command_of_the_help(line: str, ports: dict[str, str]) -> Iterator[str]:
    """Run a command line of `WORLD_HELP`, with other ports; gives the address that it says last."""
    for port, free in ports.items():
        line = line.replace(port, free)
    words = shlex.split(line.removesuffix("&"))
    environment = dict(word.split("=", 1) for word in words[: words.index("mlcrouter-nb")])
    command = COMMAND + words[words.index("mlcrouter-nb") + 1 :]
    command += ["--router-port", "0"] if "router" in words else ["--threads", "1"]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, env={**os.environ, **environment}
    ) as process:
        try:
            yield process.stdout.readline().decode().strip()
            process.terminate()
            process.wait(10)
        finally:
            process.kill()


@pytest.mark.engine
def test_the_example_of_engines_started_by_hand_works() -> None:
    lines = [line.strip() for line in WORLD_HELP.splitlines() if line.startswith("  ")]
    assert [re.findall("mlcrouter-nb (router|serve)", line) for line in lines] == [
        ["serve"],
        ["serve"],
        ["router"],
    ]
    ports = {"9001": str(free_port()), "9002": str(free_port())}
    with contextlib.ExitStack() as stack:
        url = [stack.enter_context(command_of_the_help(line, ports)) for line in lines][-1]
        body = b'{"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 4}'
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with urllib.request.urlopen(request, timeout=30) as answer:
            assert b"Paris" in answer.read()


@pytest.mark.engine
def test_engines_that_cannot_send_kv_say_what_to_do() -> None:
    lines = [line.strip() for line in WORLD_HELP.splitlines() if line.startswith("  ")]
    alone = [line[line.index("mlcrouter-nb") :] for line in lines]
    ports = {"9001": str(free_port()), "9002": str(free_port())}
    with contextlib.ExitStack() as stack:
        url = [stack.enter_context(command_of_the_help(line, ports)) for line in alone][-1]
        body = b'{"model": "smollm2-135m", "prompt": "The capital of France is", "max_tokens": 4}'
        request = urllib.request.Request(f"{url}/completions", body, {"Content-Type": "application/json"})
        with pytest.raises(urllib.error.HTTPError) as caught:
            urllib.request.urlopen(request, timeout=30)
        with caught.value as error:
            text = error.read().decode()
        assert "round-robin" in text
        assert "serve --help" in text
