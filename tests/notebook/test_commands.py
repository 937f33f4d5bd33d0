"""`%route` and its subcommands, in a terminal, on paced engines."""

from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from mlcrouter_nb.cluster import Cluster, current
from mlcrouter_nb.notebook.words import RESERVED, SUBCOMMANDS
from mlcrouter_nb.protocol.errors import BootError

Run = Callable[[str], ExecutionResult]
Fails = Callable[[str], str]
Engines = Callable[..., list[str]]
Capture = pytest.CaptureFixture[str]


@pytest.fixture
def up(run: Run, paced_engines: Engines) -> Callable[[str], Cluster]:
    """`up("1P2D")` boots a cluster on paced engines."""

    def boot(roles: str = "1P2D") -> Cluster:
        count = sum(int(digit) for digit in roles if digit.isdigit())
        return run(f"%route up --roles {roles} --endpoint-urls {' '.join(paced_engines(count))}").result

    return boot


def test_status_without_a_cluster_names_what_boots_one(run: Run, capsys: Capture) -> None:
    run("%route")
    assert "%route up" in capsys.readouterr().out


@pytest.mark.parametrize("word", RESERVED)
def test_reserved_words_are_not_there_yet(fails: Fails, word: str) -> None:
    assert f"%route {word} is not there yet" in fails(f"%route {word} x")


def test_a_typo_is_answered_with_the_nearest_word(fails: Fails) -> None:
    assert "Did you mean 'panel'?" in fails("%route pannel")


@pytest.mark.parametrize("word", SUBCOMMANDS)
def test_every_subcommand_explains_itself(run: Run, capsys: Capture, word: str) -> None:
    run(f"%route {word} --help")
    assert f"usage: %route {word}" in capsys.readouterr().out


def test_the_question_mark_shows_subcommands_and_a_policy(shell: InteractiveShell) -> None:
    text = shell.inspector.info(shell.find_line_magic("route"))["docstring"]
    assert "%route panel" in text and "async def route(request, engines)" in text


def test_help_names_every_engine_kind(run: Run, capsys: Capture) -> None:
    run("%route help")
    assert "cpu|mlc|attach" in capsys.readouterr().out


def test_help_lists_them_all(run: Run, capsys: Capture) -> None:
    run("%route help")
    text = capsys.readouterr().out
    assert all(f"%route {word}" in text for word in SUBCOMMANDS)


def test_up_returns_the_cluster_and_twice_is_once(
    up: Callable[[str], Cluster], run: Run, fails: Fails, capsys: Capture
) -> None:
    cluster = up("1P2D")
    assert isinstance(cluster, Cluster) and cluster.url.endswith("/v1")
    capsys.readouterr()
    assert run("%route up").result is cluster
    assert "already running" in capsys.readouterr().out
    run("c = %route up")
    text = fails("%route up --roles 2")
    assert "UsageError" in text and "%route down" in text
    assert current.find() is cluster


def test_status_shows_engines_policy_and_address(
    up: Callable[[str], Cluster], run: Run, capsys: Capture
) -> None:
    cluster = up("1P2D")
    capsys.readouterr()
    run("%route")
    text = capsys.readouterr().out
    for word in (
        "P0",
        "prefill",
        "D1",
        "D2",
        "decode",
        "ready",
        cluster.url,
        "policy   disagg",
        "0 in flight",
    ):
        assert word in text


def test_a_cell_that_ends_with_a_cluster_shows_the_status_as_html_too(
    up: Callable[[str], Cluster], shell: object, monkeypatch: pytest.MonkeyPatch
) -> None:
    cluster = up("2")
    formatters = shell.display_formatter.formatters  # type: ignore[attr-defined]
    assert "E1" in formatters["text/plain"](cluster)
    monkeypatch.setattr(formatters["text/html"], "enabled", True)
    html = formatters["text/html"](cluster)
    assert "<table" in html and cluster.url in html


def test_policies_are_used_set_undone_listed_and_shown(
    up: Callable[[str], Cluster], run: Run, fails: Fails, capsys: Capture
) -> None:
    cluster = up("1P2D")
    run("%route use disagg pd_balance_factor=0.3")
    assert cluster.params.pd_balance_factor == 0.3
    run("%route set pd_balance_factor = 0.5")
    assert cluster.params.pd_balance_factor == 0.5
    run("%route undo")
    assert cluster.params.pd_balance_factor == 0.3
    assert "between 0.0 and 1.0" in fails("%route set pd_balance_factor=1.2")
    assert "no parameter 'factor'" in fails("%route set factor=0.1")
    assert cluster.params.pd_balance_factor == 0.3
    run("%route use round-robin")
    assert cluster.status().policy.name == "round-robin"  # type: ignore[union-attr]
    run("%route undo")
    assert cluster.params.pd_balance_factor == 0.3
    assert "Did you mean 'disagg'?" in fails("%route use disag")
    capsys.readouterr()
    run("%route list\n%route show disagg")
    text = capsys.readouterr().out
    assert "round-robin" in text and "least-loaded" in text and "async def route(request, engines)" in text


def test_a_policy_chosen_before_the_cluster_holds_once_it_is_up(
    up: Callable[[str], Cluster], run: Run
) -> None:
    run("%route use disagg pd_balance_factor=0.4")
    cluster = up("1P2D")
    assert cluster.params.pd_balance_factor == 0.4


def test_undo_without_a_past_and_set_without_a_policy_say_so(fails: Fails) -> None:
    assert "nothing to undo" in fails("%route undo")
    assert "%route use" in fails("%route set f=1")


def test_only_what_is_required_is_said_to_be(fails: Fails) -> None:
    text = fails("%route use")
    assert "required: name." in text and "parameter" not in text


def test_show_without_a_name_shows_the_active_policy(
    up: Callable[[str], Cluster], run: Run, fails: Fails, capsys: Capture
) -> None:
    assert "%route show NAME" in fails("%route show")
    up("1P2D")
    capsys.readouterr()
    run("%route show")
    assert "# disagg" in capsys.readouterr().out


def test_logs_without_a_name_are_those_of_all_and_an_empty_one_says_where_it_is(
    up: Callable[[str], Cluster], run: Run, fails: Fails, capsys: Capture, tmp_path: Path
) -> None:
    cluster = up("1P1D")
    assert "started elsewhere" in fails("%route logs")
    empty, full = tmp_path / "P0.log", tmp_path / "D1.log"
    empty.touch()
    full.write_text("".join(f"line {i}\n" for i in range(100)))
    for engine, path in zip(cluster.engines, (empty, full), strict=True):
        engine.log_path = path
    capsys.readouterr()
    run("%route logs")
    text = capsys.readouterr().out
    assert f"P0:\nThe log is empty: {empty}" in text and "D1:\nline 90\n" in text
    run("%route logs D1 --lines 2")
    assert capsys.readouterr().out == "line 98\nline 99\n"


@pytest.mark.parametrize("interrupt", [True, False])
def test_an_ended_boot_is_said_once(fails: Fails, monkeypatch: pytest.MonkeyPatch, interrupt: bool) -> None:
    error = KeyboardInterrupt() if interrupt else BootError("P0 did not start.")
    monkeypatch.setattr(Cluster, "start_blocking", Mock(side_effect=error))
    text = fails("%route up")
    assert text.count("interrupted" if interrupt else "did not start") <= 1
    assert text.count("that had started is stopped") == 1


def test_logs_names_the_engines_that_there_are(up: Callable[[str], Cluster], fails: Fails) -> None:
    assert "%route up" in fails("%route logs D1")
    up("1P1D")
    assert "P0, D1" in fails("%route logs D7")


def test_down_stops_and_twice_is_once(up: Callable[[str], Cluster], run: Run, capsys: Capture) -> None:
    up("1")
    run("%route down")
    assert current.find() is None
    run("%route down")
    assert "No cluster is running" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("options", "what"),
    [
        ("--roles 0P1D", "prefill"),
        ("--roles xyz", "1P2D"),
        ("--engine gpu", "cpu"),
        ("--engine attach", "--endpoint-urls"),
        ("no-such-model", "no-such-model"),
        ("--port 99999", "99999"),
        ("--policy nope", "nope"),
    ],
)
def test_wrong_arguments_are_one_line_with_the_remedy(fails: Fails, options: str, what: str) -> None:
    text = fails(f"%route up {options}")
    assert "UsageError" in text and what in text
    assert current.find() is None
