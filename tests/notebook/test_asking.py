"""`%%ask` in a terminal."""

import signal
import threading
import time
from collections.abc import Callable
from typing import Any

import pytest
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from mlcrouter_nb.cluster import Cluster

Run = Callable[[str], ExecutionResult]
Fails = Callable[[str], str]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def urls(paced_engines: Callable[..., list[str]]) -> list[str]:
    return paced_engines(3, pace=100)


@pytest.fixture
def cluster(run: Run, urls: list[str]) -> Cluster:
    return run(f"%route up --roles 1P2D --endpoint-urls {' '.join(urls)} --policy round-robin").result


def test_without_a_cluster_it_names_what_boots_one(fails: Fails) -> None:
    text = fails("%%ask\nhello")
    assert "UsageError" in text and "%route up" in text


def test_the_answer_and_one_line_below(cluster: Cluster, run: Run, capsys: Capture) -> None:
    capsys.readouterr()
    run("%%ask --max-tokens 5 --raw\nhello")
    answer, line = capsys.readouterr().out.strip().splitlines()
    assert answer.strip() == "The tide comes in twice"
    for part in ("prefill + decode", "9 tokens in", "5 out", "TTFT", "ITL"):
        assert part in line


def test_options_reach_the_engine_and_one_request_can_have_its_own_policy(
    cluster: Cluster, run: Run, urls: list[str], engine_state: Callable[[str], dict[str, Any]]
) -> None:
    run("%%ask --max-tokens 2 --chat --temperature 0 --seed 3\nhello")
    run("%%route last\nasync def route(request, engines):\n    return engines.all[2].complete(request)\n")
    run("%route use round-robin")
    before = len(engine_state(urls[2])["log"])
    run("%%ask --max-tokens 2 --policy last\nhello")
    assert len(engine_state(urls[2])["log"]) == before + 1
    assert cluster.status().policy.name == "round-robin"  # type: ignore[union-attr]


def test_sampling_stops_and_the_system_message_are_sent(
    cluster: Cluster, run: Run, urls: list[str], engine_state: Callable[[str], dict[str, Any]]
) -> None:
    run("%%route first\nasync def route(request, engines):\n    return engines.all[0].complete(request)\n")
    run(r"%%ask --top-p 0.5 --stop END --stop '\n\n' --system 'You are a pirate.' --max-tokens 2" + "\nhello")
    sent = engine_state(urls[0])["last"]
    assert sent["top_p"] == 0.5 and sent["stop"] == ["END", "\n\n"]
    assert sent["messages"] == [
        {"role": "system", "content": "You are a pirate."},
        {"role": "user", "content": "hello"},
    ]


def test_a_raw_text_has_no_system_message(cluster: Cluster, fails: Fails) -> None:
    assert "--system belongs to a chat" in fails("%%ask --raw --system x\nhello")


def test_texts_of_several_words_need_quotes(cluster: Cluster, fails: Fails) -> None:
    text = fails("%%ask --system You are a pirate.\nhello")
    assert "quotes" in text and ".." not in text


def test_an_interrupt_that_nobody_confirms_does_not_say_that_the_request_is_stopped(
    cluster: Cluster, fails: Fails, run: Run
) -> None:
    run("%%route spin\nimport time\nasync def route(request, engines):\n    time.sleep(2)\n")
    threading.Timer(0.7, signal.raise_signal, [signal.SIGINT]).start()
    text = fails("%%ask --max-tokens 2\nhello")
    assert "policy 'spin', line 3" in text
    assert "is stopped" not in text and "no engine" not in text


@pytest.mark.parametrize(
    "options", ["--max-tokens 0", "--max-tokens -3", "--temperature 9", "--policy nope", "--sed 3"]
)
def test_wrong_options_are_usage_errors(cluster: Cluster, fails: Fails, options: str) -> None:
    assert "UsageError" in fails(f"%%ask {options}\nhello")


@pytest.mark.parametrize("source", ["%%ask --help", "%%ask -h\n", "%ask --help", "%%ask --help\nhello"])
def test_help_needs_no_question(run: Run, capsys: Capture, source: str) -> None:
    run(source)
    text = capsys.readouterr().out
    assert "usage: %%ask" in text and "--max-tokens" in text


def test_the_question_mark_shows_the_options(shell: InteractiveShell) -> None:
    assert "--max-tokens" in shell.inspector.info(shell.find_cell_magic("ask"))["docstring"]


def test_the_line_magic_points_to_the_cell_magic(fails: Fails) -> None:
    assert "write %%ask, and the question below it" in fails("%ask Why is the sky blue")


def test_an_empty_question_is_a_usage_error(cluster: Cluster, fails: Fails) -> None:
    assert "UsageError" in fails("%%ask\n   \n")


def test_no_wait_returns_at_once_and_the_answer_comes(cluster: Cluster, run: Run, capsys: Capture) -> None:
    began = time.monotonic()
    run("%%ask --no-wait --max-tokens 30\nhello")
    assert time.monotonic() - began < 0.2
    time.sleep(0.15)
    assert capsys.readouterr().out == "", "what comes in pieces would mix with the next prompt"
    wait_for_threads()
    text = capsys.readouterr().out
    assert text.startswith("\nThe tide") and "30 out" in text


def test_a_failing_policy_fails_its_request_with_the_users_line(
    cluster: Cluster, run: Run, fails: Fails, capsys: Capture
) -> None:
    run("%%route broken\nasync def route(request, engines):\n    return {}['nothing']\n")
    text = fails("%%ask\nhello")
    assert "return {}['nothing']" in text and "KeyError" in text
    run("%%ask --no-wait\nhello")
    wait_for_threads()
    assert "return {}['nothing']" in capsys.readouterr().out
    run("%%ask --policy round-robin --max-tokens 2\nhello")


def wait_for_threads() -> None:
    for thread in threading.enumerate():
        if thread.name == "mlcrouter-ask":
            thread.join(5)
