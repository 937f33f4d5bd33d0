"""A real JupyterLab with a notebook open in a real browser, for tests."""

import contextlib
import json
import os
import shutil
import socket
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

CHROMIUM = next(
    (path for name in ("chromium", "chromium-browser", "google-chrome") if (path := shutil.which(name))), None
)
FLAGS = [
    "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--no-first-run", "--disable-sync",
    "--disable-background-networking", "--disable-component-update",
]  # fmt: skip
RUN = """async (index) => {
    const notebook = window.jupyterapp.shell.currentWidget.content;
    notebook.deselectAll();
    notebook.activeCellIndex = index;
    await window.jupyterapp.commands.execute("notebook:run-cell");
}"""


@contextlib.contextmanager
def jupyterlab(folder: Path, root: Path) -> Iterator[str]:
    """A server whose settings and state lie in `folder`; answers its address."""
    settings = folder / "settings"
    quiet = settings / "@jupyterlab" / "apputils-extension" / "notification.jupyterlab-settings"
    quiet.parent.mkdir(parents=True)
    quiet.write_text(json.dumps({"fetchNews": "false", "checkForUpdates": False, "doNotDisturbMode": True}))
    places = {
        "JUPYTER_CONFIG_DIR": "config", "JUPYTER_DATA_DIR": "data", "JUPYTER_RUNTIME_DIR": "runtime",
        "JUPYTERLAB_WORKSPACES_DIR": "workspaces", "IPYTHONDIR": "ipython",
    }  # fmt: skip
    environment = os.environ | {name: str(folder / place) for name, place in places.items()}
    environment["JUPYTERLAB_SETTINGS_DIR"] = str(settings)
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable, "-m", "jupyterlab", "--no-browser", "--allow-root", "--IdentityProvider.token=t",
        "--ServerApp.port_retries=0", "--LabApp.news_url=", "--LabApp.expose_app_in_browser=True",
        f"--ServerApp.port={port}", f"--ServerApp.root_dir={root}",
    ]  # fmt: skip
    with (folder / "log").open("w") as log:
        server = subprocess.Popen(command, env=environment, stdout=log, stderr=log, start_new_session=True)
        try:
            wait_until_served(f"http://127.0.0.1:{port}/api?token=t", server)
            yield f"http://127.0.0.1:{port}"
        finally:
            server.terminate()
            try:
                server.wait(15)
            except subprocess.TimeoutExpired:
                server.kill()
                server.wait()


def wait_until_served(url: str, server: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + 60
    while True:
        try:
            urllib.request.urlopen(url, timeout=2).close()
            return
        except (urllib.error.URLError, OSError):
            assert server.poll() is None and time.monotonic() < deadline, "JupyterLab did not start"
            time.sleep(0.2)


class Page:
    """An open notebook: cells are run by their place, outputs read as text."""

    def __init__(self, page: Any, address: str, notebook: str) -> None:
        self.page = page
        self.errors: list[str] = []
        page.on("pageerror", lambda error: self.errors.append(str(error)))
        page.goto(f"{address}/lab/tree/{notebook}?token=t&reset")
        page.wait_for_selector(".jp-Notebook .jp-Cell", timeout=60_000)
        page.wait_for_function(
            "() => window.jupyterapp?.shell.currentWidget?.sessionContext?.session?.kernel?.status === 'idle'",
            timeout=60_000,
        )
        for dialog in page.query_selector_all(".jp-Dialog .jp-mod-reject"):
            dialog.click()
        page.evaluate("() => window.jupyterapp.commands.execute('application:toggle-left-area')")

    def run(self, index: int, timeout: float = 120) -> str:
        """Run a cell to its end; answers its output."""
        self.page.set_default_timeout(timeout * 1000)
        self.page.evaluate(RUN, index)
        return self.output(index)

    def start(self, index: int) -> None:
        """Start a cell without waiting for it."""
        self.page.evaluate(f"(index) => {{ ({RUN})(index); }}", index)

    def output(self, index: int) -> str:
        cell = self.page.query_selector_all(".jp-Notebook .jp-Cell")[index]
        return "\n".join(node.inner_text() for node in cell.query_selector_all(".jp-OutputArea-output"))

    def until(self, javascript: str, timeout: float = 30) -> None:
        """Wait until an expression is true."""
        self.page.wait_for_function(javascript, timeout=timeout * 1000)


@contextlib.contextmanager
def browser(width: int, height: int) -> Iterator[Any]:
    """A page of a headless Chromium."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        chromium = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        try:
            yield chromium.new_page(viewport={"width": width, "height": height})
        finally:
            chromium.close()
