"""The panel's kernel side: what it sends, when it does not, and what it leaves behind."""

import threading
import time
from collections.abc import Callable, Iterator

import ipywidgets
import pytest
from IPython.core.interactiveshell import ExecutionResult, InteractiveShell
from ipywidgets.widgets.widget import _instances

from mlcrouter_nb.cluster import Cluster
from mlcrouter_nb.notebook.extension import find_session
from mlcrouter_nb.notebook.panel import Panel, open_panel
from mlcrouter_nb.notebook.panel.state import prompt_parts, tail
from mlcrouter_nb.notebook.panel.ticker import TICKER
from mlcrouter_nb.telemetry import CallTrace

Run = Callable[[str], ExecutionResult]


@pytest.fixture
def cluster(run: Run, paced_engines: Callable[..., list[str]]) -> Cluster:
    return run(f"%route up --roles 1P2D --endpoint-urls {' '.join(paced_engines(3, 200))}").result


@pytest.fixture
def panel(shell: InteractiveShell) -> Iterator[Panel]:
    panel = open_panel()
    panel._on_message(panel, {"do": "shown"}, None)
    yield panel
    panel.close()


@pytest.fixture
def sent(panel: Panel, monkeypatch: pytest.MonkeyPatch) -> list[dict]:
    """The messages that the panel sends from now on."""
    messages: list[dict] = []
    monkeypatch.setattr(panel, "_send", lambda content, buffers=None: messages.append(content))
    return messages


def eventually(true: Callable[[], object], seconds: float = 5.0) -> None:
    deadline = time.monotonic() + seconds
    while not true():
        assert time.monotonic() < deadline, "it did not come"
        time.sleep(0.02)


def slider(panel: Panel) -> ipywidgets.FloatSlider:
    return panel.controls._rows["pd_balance_factor"].control


def test_it_offers_to_boot_when_nothing_runs(panel: Panel) -> None:
    assert panel.state["phase"] == "off"
    assert panel.state["boot"] == {"model": "smollm2-135m", "roles": "1P2D"}


def test_it_follows_the_cluster_from_boot_to_stop(panel: Panel, cluster: Cluster, run: Run) -> None:
    eventually(lambda: panel.state["phase"] == "ready")
    assert [engine["role"] for engine in panel.state["engines"]] == ["prefill", "decode", "decode"]
    assert panel.controls._selector.value == "disagg"
    run("%%ask --max-tokens 3 --policy round-robin\nhello <b>")
    eventually(lambda: panel.state["streams"] and panel.state["streams"][0]["state"] == "finished")
    run("%route down")
    eventually(lambda: panel.state["phase"] == "off")


def test_five_to_ten_updates_a_second_while_something_happens_and_none_when_idle(
    panel: Panel, cluster: Cluster, sent: list[dict], run: Run
) -> None:
    eventually(lambda: panel.state["phase"] == "ready")
    time.sleep(0.6)
    sent.clear()
    time.sleep(1.5)
    assert sent == [], "idle"
    began = time.monotonic()
    run("%%ask --max-tokens 400 --policy round-robin\nhello")
    seconds = time.monotonic() - began
    time.sleep(0.3)
    updates = [message for message in sent if message.get("method") == "update"]
    assert 4 * seconds <= len(updates) <= 10 * seconds + 2
    assert all(set(message["state"]) == {"state"} for message in updates)
    assert max(len(repr(message)) for message in updates) < 10_000


def test_nothing_is_sent_while_no_view_shows_it(
    panel: Panel, cluster: Cluster, sent: list[dict], run: Run
) -> None:
    eventually(lambda: panel.state["phase"] == "ready")
    panel._on_message(panel, {"do": "hidden"}, None)
    time.sleep(0.3)
    sent.clear()
    run("%%ask --max-tokens 50 --policy round-robin\nhello")
    assert sent == []
    panel._on_message(panel, {"do": "shown"}, None)
    assert sent


def test_a_moved_slider_acts_from_any_thread_while_a_cell_runs(
    panel: Panel, cluster: Cluster, run: Run
) -> None:
    eventually(lambda: "pd_balance_factor" in panel.controls._rows)
    thread = threading.Thread(target=lambda: setattr(slider(panel), "value", 0.7))
    thread.start()
    thread.join(5)
    assert cluster.params.pd_balance_factor == 0.7
    time.sleep(0.4)
    assert slider(panel).value == 0.7, "the panel does not undo it"


def test_where_controls_act_between_cells_only_the_panel_says_so(
    panel: Panel, cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mlcrouter_nb.notebook.panel.controls.in_notebook", lambda: True)
    eventually(lambda: "pd_balance_factor" in panel.controls._rows)
    slider(panel).value = 0.6  # on the main thread, as where there are no subshells
    eventually(lambda: "--no-wait" in panel.state["hint"])
    thread = threading.Thread(target=lambda: setattr(slider(panel), "value", 0.7))
    thread.start()
    thread.join(5)
    eventually(lambda: panel.state["hint"] == "")


def test_route_set_moves_the_slider_and_the_selector_changes_the_policy(
    panel: Panel, cluster: Cluster, run: Run
) -> None:
    eventually(lambda: "pd_balance_factor" in panel.controls._rows)
    run("%route set pd_balance_factor=0.3")
    eventually(lambda: slider(panel).value == 0.3)
    panel.controls._selector.value = "round-robin"
    assert cluster.status().policy.name == "round-robin"  # type: ignore[union-attr]
    eventually(lambda: not panel.controls._rows)
    run("%route undo")
    eventually(lambda: "pd_balance_factor" in panel.controls._rows and slider(panel).value == 0.3)


def test_each_kind_of_parameter_has_its_control(panel: Panel, cluster: Cluster, run: Run) -> None:
    run(
        "%%route many\nshare = slider(0.0, 1.0, value=0.25)\nlong = slider(0, 2048, value=512)\n"
        "mode = choice(['a', 'b'])\non = switch(True)\n\n"
        "async def route(request, engines):\n    return engines.all.random().complete(request)\n"
    )
    eventually(lambda: "on" in panel.controls._rows)
    controls = {name: row.control for name, row in panel.controls._rows.items()}
    kinds = {name: type(control).__name__ for name, control in controls.items()}
    assert kinds == {"share": "FloatSlider", "long": "IntSlider", "mode": "Dropdown", "on": "Checkbox"}
    controls["mode"].value = "b"
    controls["on"].value = False
    controls["long"].value = 1024
    assert {name: cluster.params[name] for name in kinds} == {
        "share": 0.25,
        "long": 1024,
        "mode": "b",
        "on": False,
    }
    run("%%ask --max-tokens 2\nhello")
    eventually(lambda: "1024" in panel.controls._rows["long"].used.value)


@pytest.mark.parametrize(("model", "roles"), [("no-such-model", "1P2D"), ("smollm2-135m", "0P1D")])
def test_a_boot_that_cannot_be_shows_why(panel: Panel, model: str, roles: str) -> None:
    panel._on_message(panel, {"do": "boot", "model": model, "roles": roles}, None)
    eventually(lambda: (model if model != "smollm2-135m" else roles) in panel.state["error"])
    assert panel.state["phase"] == "off"


def test_a_policy_that_blocks_the_router_is_shown(panel: Panel, cluster: Cluster) -> None:
    cluster.telemetry.emit("router_blocked", place="policy 'spin', line 3", since=time.time() - 5)
    eventually(lambda: "policy 'spin', line 3, has blocked the router" in panel.state["error"])
    cluster.telemetry.emit("router_answers")
    eventually(lambda: not panel.state["error"])


def test_stop_stops_the_cluster(panel: Panel, cluster: Cluster) -> None:
    panel._on_message(panel, {"do": "stop"}, None)
    eventually(lambda: panel.state["phase"] == "off")


def test_several_may_be_open_and_closing_leaves_nothing_behind(
    shell: InteractiveShell, cluster: Cluster
) -> None:
    before = set(_instances)
    subscribers = len(cluster.telemetry._subscribers)
    panels = [open_panel(), open_panel()]
    for panel in panels:
        panel._on_message(panel, {"do": "shown"}, None)
    assert set(panels) <= set(TICKER.watchers)
    panels[0].close()
    assert panels[1] in TICKER.watchers and panels[0] not in TICKER.watchers
    panels[1].close()
    panels[1].close()
    eventually(lambda: not [t for t in threading.enumerate() if t.name == "mlcrouter-panel"])
    assert len(cluster.telemetry._subscribers) == subscribers
    assert set(_instances) == before, "no widget stays in the kernel"


def test_text_and_html_stand_beside_the_view(panel: Panel, cluster: Cluster, run: Run) -> None:
    data, _ = panel._repr_mimebundle_()
    assert "application/vnd.jupyter.widget-view+json" in data
    assert "P0" in data["text/plain"] and "<table" in data["text/html"]
    run("%route panel")
    assert find_session().panel is not None  # type: ignore[union-attr]


def test_prompt_parts_say_who_prefilled_what() -> None:
    calls = [
        CallTrace("prep_recv", "D1", 0.0, window=(0, 90)),
        CallTrace("remote_send", "P0", 0.0, window=(16, 90)),
        CallTrace("start_generate", "D1", 0.0, window=(90, 100)),
    ]
    assert prompt_parts(100, calls) == [("", 16), ("P0", 74), ("D1", 10)]
    assert prompt_parts(None, calls) == []


def test_long_texts_are_cut_at_a_word() -> None:
    assert tail("short") == "short"
    text = tail("word " * 200)
    assert text.startswith("… word") and len(text) < 300
