"""Loading, unloading, reloading; `%config MlcRouter`."""

import threading
from collections.abc import Callable

import pytest
from IPython.core.error import UsageError
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell

from mlcrouter_nb.cluster import current

Run = Callable[[str], ExecutionResult]


def hooks(shell: InteractiveShell) -> list[object]:
    magics = shell.magics_manager.magics
    text, html = (
        shell.display_formatter.formatters[kind].type_printers for kind in ("text/plain", "text/html")
    )
    return [
        sorted(magics["line"]), sorted(magics["cell"]), sorted(shell.magics_manager.registry),
        len(shell.input_transformers_cleanup), len(shell.Completer.custom_matchers), len(shell.configurables),
        sorted(map(str, text)), sorted(map(str, html)), len(shell.events.callbacks["pre_run_cell"]),
    ]  # fmt: skip


def test_unloading_undoes_every_hook_and_reloading_brings_them_back(
    terminal: InteractiveShell, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(UsageError):  # IPython itself hooks this magic in when it is first used
        terminal.run_line_magic("load_ext", "")
    before = hooks(terminal)
    terminal.run_line_magic("load_ext", "mlcrouter_nb")
    loaded = hooks(terminal)
    assert loaded != before and "route" in loaded[0] and "ask" in loaded[1]
    terminal.run_line_magic("load_ext", "mlcrouter_nb")
    assert hooks(terminal) == loaded, "a second %load_ext does nothing"
    terminal.run_line_magic("reload_ext", "mlcrouter_nb")
    assert hooks(terminal) == loaded
    terminal.run_line_magic("unload_ext", "mlcrouter_nb")
    assert hooks(terminal) == before
    assert not terminal.run_cell("%route").success


def test_unloading_stops_the_cluster_and_says_so(
    shell: InteractiveShell,
    run: Run,
    paced_engines: Callable[..., list[str]],
    capsys: pytest.CaptureFixture[str],
) -> None:
    run(f"%route up --roles 1 --endpoint-urls {paced_engines(1)[0]}")
    run("%%ask --no-wait --max-tokens 500\nhello")
    assert current.find() is not None
    run("%unload_ext mlcrouter_nb")
    assert current.find() is None
    assert "The cluster is stopped." in capsys.readouterr().out
    assert not [
        t for t in threading.enumerate() if t.name.startswith("mlcrouter") and t.name != "mlcrouter-ask"
    ]


def test_config_holds_the_defaults(
    run: Run, fails: Callable[[str], str], capsys: pytest.CaptureFixture[str]
) -> None:
    run("%config MlcRouter")
    text = capsys.readouterr().out
    for name in ("model", "roles", "engine", "refresh_rate", "nest_asyncio"):
        assert f"MlcRouter.{name}=" in text
    run("%config MlcRouter.roles = '0P1D'")
    assert "0P1D" in fails("%route up")
    run("%config MlcRouter.roles = '1P2D'")
