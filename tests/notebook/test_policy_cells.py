"""`%%route NAME`."""

from collections.abc import Callable

import pytest
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from mlcrouter_nb.cluster import Cluster

Run = Callable[[str], ExecutionResult]
Fails = Callable[[str], str]
Capture = pytest.CaptureFixture[str]

FIRST = """\
%%route first
async def route(request, engines):
    return engines.all[0].complete(request)
"""


@pytest.fixture
def cluster(run: Run, paced_engines: Callable[..., list[str]]) -> Cluster:
    return run(f"%route up --roles 1P2D --endpoint-urls {' '.join(paced_engines(3))}").result


def active(cluster: Cluster) -> str:
    policy = cluster.status().policy
    assert policy is not None
    return policy.name


def test_a_cell_becomes_the_active_policy_and_says_where_it_came_from(
    cluster: Cluster, run: Run, capsys: Capture
) -> None:
    result = run(FIRST)
    assert active(cluster) == "first"
    assert f"first (cell [{result.execution_count}])" in capsys.readouterr().out


@pytest.mark.parametrize("source", ["%%route disagg", "%%route disagg\n", "%%route disagg\n\n# nothing\n"])
def test_a_lone_name_activates_the_built_in(cluster: Cluster, run: Run, source: str) -> None:
    run("%route use round-robin")
    run(source)
    assert active(cluster) == "disagg"


def test_parameters_only_give_the_built_in_other_ranges_and_values(cluster: Cluster, run: Run) -> None:
    run("%%route disagg\npd_balance_factor = slider(0.0, 0.5, value=0.1)\n")
    assert active(cluster) == "disagg" and cluster.params.pd_balance_factor == 0.1
    run("%route set pd_balance_factor=0.5")


@pytest.mark.parametrize(
    ("body", "line", "why"),
    [
        ("async def route(request, engines)\n    pass\n", "async def route(request, engines)", "SyntaxError"),
        ("x = slider(0, 1)\n", "", "no policy|defines no 'route'"),
        ("async def route(request):\n    pass\n", "async def route(request):", "two arguments"),
        (
            "async def route(request, engines):\n    return nonsense\n",
            "return nonsense",
            "name 'nonsense' is not defined",
        ),
        (
            "async def route(request, engines):\n    d = engines.decode[0]\n    return d.complte(request)\n",
            "return d.complte(request)",
            "complte",
        ),
    ],
)
def test_a_faulty_cell_leaves_the_old_policy_and_shows_the_line(
    cluster: Cluster, run: Run, fails: Fails, body: str, line: str, why: str
) -> None:
    run(FIRST)
    text = fails(f"%%route faulty\n{body}")
    assert line in text
    assert any(reason in text for reason in why.split("|"))
    assert active(cluster) == "first"
    assert text.rstrip().endswith("'first' stays active.")
    assert "mlcrouter_nb/" not in text, "no stack of ours"


def test_a_cell_that_takes_a_built_ins_name_says_so_and_undo_gives_it_back(
    cluster: Cluster, run: Run, capsys: Capture
) -> None:
    run("%route use round-robin")
    run(FIRST.replace("first", "disagg"))
    assert "replaces the built-in disagg, %route undo brings it back" in capsys.readouterr().out
    run(FIRST.replace("first", "disagg"))
    assert "replaces" not in capsys.readouterr().out, "the second time it replaces the user's own"
    run("%route undo\n%route undo")
    assert active(cluster) == "round-robin"
    run("%route use disagg")
    assert "pd_balance_factor" in capsys.readouterr().out and cluster.book.get("disagg").origin == "built-in"


def test_undo_of_the_first_choice_before_a_cluster_leaves_none(run: Run, capsys: Capture) -> None:
    run(FIRST.replace("first", "disagg"))
    run("%route undo")
    assert "No policy is chosen any more." in capsys.readouterr().out
    run("%route show disagg")
    assert "(built-in)" in capsys.readouterr().out


def test_undo_on_a_cluster_of_a_choice_made_before_it(
    run: Run, fails: Fails, paced_engines: Callable[..., list[str]]
) -> None:
    run(FIRST.replace("first", "disagg"))
    cluster = run(f"%route up --roles 1P2D --endpoint-urls {' '.join(paced_engines(3))}").result
    run("%route undo")
    assert active(cluster) == "disagg" and cluster.status().policy.origin == "built-in"
    assert "nothing to undo" in fails("%route undo")


@pytest.mark.parametrize("colours", ["nocolor", "linux"])
def test_errors_have_colours_where_the_shell_has(
    shell: InteractiveShell, fails: Fails, cluster: Cluster, colours: str
) -> None:
    before = shell.colors
    shell.run_line_magic("colors", colours)
    try:
        text = fails("%%route faulty\nasync def route(request, engines):\n    return nonsense\n")
        assert ("\x1b[" in text) is (colours != "nocolor")
    finally:
        shell.run_line_magic("colors", before)


@pytest.mark.parametrize("name", ["up", "save", "a b", "3x", "../x", ""])
def test_some_names_are_refused(fails: Fails, name: str) -> None:
    assert "UsageError" in fails(f"%%route {name}\nasync def route(request, engines): ...\n")


def test_cells_work_before_the_cluster_is_up_and_hold_once_it_is(
    run: Run, paced_engines: Callable[..., list[str]]
) -> None:
    run(FIRST)
    cluster = run(f"%route up --roles 1P2D --endpoint-urls {' '.join(paced_engines(3))}").result
    assert active(cluster) == "first"
    run("%route use disagg")
    run("%route use first")


@pytest.mark.parametrize("source", ["%%route --help\n# nothing", "%%route --help"])
def test_the_help_shows_how_a_policy_looks(run: Run, capsys: Capture, source: str) -> None:
    run(source)
    assert "async def route(request, engines)" in capsys.readouterr().out
