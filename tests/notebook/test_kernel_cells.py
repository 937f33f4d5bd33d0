"""In a real kernel, on paced engines: which cell gets what, interrupts, asyncio beside a running cluster."""

import re
import time
from collections.abc import Callable
from typing import Any

import nbformat
import pytest
from nbconvert import HTMLExporter

pytestmark = pytest.mark.kernel


@pytest.fixture
def urls(paced_engines: Callable[..., list[str]]) -> list[str]:
    return paced_engines(2, 40)


@pytest.fixture
def kernel(start_kernel: Callable[[], Any], urls: list[str]) -> Any:
    kernel = start_kernel()
    kernel.run(f"%route up --roles 2 --endpoint-urls {' '.join(urls)}")
    return kernel


def test_each_stream_lands_in_the_cell_that_asked(kernel: Any) -> None:
    first = kernel.start("%%ask --no-wait --max-tokens 40\nfirst")
    kernel.finish(first)
    second = kernel.start("%%ask --no-wait --max-tokens 20\nsecond")
    kernel.finish(second)
    third = kernel.run("import time\nfor _ in range(15):\n    print('mine'); time.sleep(0.1)")
    assert third.text.replace("mine", "").strip() == ""
    for cell, tokens in ((first, "40 out"), (second, "20 out")):
        kernel.wait_for(cell, tokens)
        shown = kernel.of(cell)
        assert shown.text.startswith("The tide comes in")
        assert len(shown.displays) == 1, "one display, redrawn in place"
        assert shown.updates <= 20 * 1.5 + 2, "coalesced"


def test_an_interrupt_stops_the_request_within_half_a_second_and_leaves_the_cluster(
    kernel: Any, urls: list[str], engine_state: Callable[[str], dict[str, Any]]
) -> None:
    cell = kernel.start("%%ask --max-tokens 4000\nlong")
    kernel.wait_for(cell, "The tide")
    kernel.manager.interrupt_kernel()
    began = time.monotonic()
    shown = kernel.finish(cell, 5)
    assert shown.reply == "error" and shown.ended - began < 0.5
    assert "Interrupted" in shown.text and "Traceback" not in shown.text
    deadline = time.monotonic() + 0.5
    while any(engine_state(url)["running"] for url in urls):
        assert time.monotonic() < deadline, "the engine still works for nobody"
    assert "0 in flight" in kernel.run("%route").text
    assert "5 out" in kernel.run("%%ask --max-tokens 5\nagain").text


def test_an_interrupt_of_an_await_stops_its_request_too(
    kernel: Any, urls: list[str], engine_state: Callable[[str], dict[str, Any]]
) -> None:
    cell = kernel.start("import mlcrouter_nb\nawait mlcrouter_nb.ask('long', max_tokens=4000)")
    deadline = time.monotonic() + 10
    while not any(engine_state(url)["running"] for url in urls):
        assert time.monotonic() < deadline
    kernel.manager.interrupt_kernel()
    assert kernel.finish(cell, 5).reply == "error"
    deadline = time.monotonic() + 1
    while any(engine_state(url)["running"] for url in urls):
        assert time.monotonic() < deadline
    assert "5 out" in kernel.run("%%ask --max-tokens 5\nagain").text


def test_asyncio_run_works_beside_a_running_cluster_when_asked_for(kernel: Any) -> None:
    source = "import asyncio\nasync def f():\n    await asyncio.sleep(0.05)\n    return 'done'\nprint(asyncio.run(f()))"
    refused = kernel.finish(kernel.start(source))
    assert refused.reply == "error" and "asyncio.run() cannot be called" in refused.text, (
        "nothing is patched unasked"
    )
    kernel.run("%config MlcRouter.nest_asyncio = True")
    assert "done" in kernel.run(source).text
    nested = (
        "import asyncio, mlcrouter_nb\nasync def g():\n    return await mlcrouter_nb.ask('hello', max_tokens=5)\n"
        "print(asyncio.run(g()))"
    )
    assert "The tide comes in twice" in kernel.run(nested).text
    assert "5 out" in kernel.run("%%ask --max-tokens 5\nagain").text
    assert "done" in kernel.run(source).text


def test_the_boot_is_one_display_and_the_status_comes_as_html(
    start_kernel: Callable[[], Any], urls: list[str]
) -> None:
    kernel = start_kernel()
    shown = kernel.run(f"%route up --roles 2 --endpoint-urls {' '.join(urls)}")
    assert re.search(r"2 engines ready in [\d.]+ s", shown.text)
    assert any("<table" in data.get("text/html", "") for data in shown.displays.values())
    silent = kernel.run("cluster = %route up")
    assert silent.text == "smollm2-135m on attach: already running"
    assert "E1" in kernel.run("%route").text


def test_the_panel_has_text_and_html_below_its_view(kernel: Any) -> None:
    view, table = kernel.run("%route panel").displays.values()
    assert "application/vnd.jupyter.widget-view+json" in view and "application" not in str(list(table))
    assert "E0" in table["text/plain"] and "<table" in table["text/html"]
    outputs = [nbformat.v4.new_output("display_data", data) for data in (view, table)]
    cell = nbformat.v4.new_code_cell("%route panel", outputs=outputs)
    page, _ = HTMLExporter().from_notebook_node(nbformat.v4.new_notebook(cells=[cell]))
    assert page.count(">E0</th>") == 1, "nbconvert shows the table, once"


def test_a_faulty_policy_shows_the_users_line_and_no_stack_of_ours(kernel: Any) -> None:
    shown = kernel.finish(
        kernel.start("%%route bad\nasync def route(request, engines):\n    return enginess[0]\n")
    )
    assert shown.reply == "error"
    assert "return enginess[0]" in shown.text and "mlcrouter_nb/" not in shown.text
    assert "round-robin" in kernel.run("%route").text
