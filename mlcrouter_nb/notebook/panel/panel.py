"""The panel's widget: draws what the telemetry says, boots a cluster, stops it."""

import secrets
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import anywidget
import ipywidgets
import traitlets
from IPython.display import display

from ...cluster.functions import find_same
from ...protocol.errors import MlcRouterError
from ..display.place import in_notebook
from ..display.status import Status
from ..session import Session
from .comms import hear_on_subshells
from .controls import PolicyControls
from .state import panel_state
from .ticker import TICKER

if TYPE_CHECKING:
    from ...cluster import Cluster

HERE = Path(__file__).parent
BETWEEN_CELLS = "In this front end the controls act between cells. To steer while answers stream, ask with %%ask --no-wait."


class Panel(anywidget.AnyWidget):
    """The live panel of a session; any number of views may show it, `close` ends it.

    `state` is all that a view draws: it is sent when it changes, and not while nobody looks."""

    _esm = HERE / "panel.js"
    _css = HERE / "panel.css"
    state = traitlets.Dict().tag(sync=True)
    mark = traitlets.Unicode().tag(sync=True)  # in the class of the table that a live view replaces
    controls = traitlets.Instance(ipywidgets.Widget).tag(sync=True, **ipywidgets.widget_serialization)

    def __init__(self, session: Session) -> None:
        self.session = session
        self.closed = False
        self._error = ""
        self._seen: tuple[object, ...] = ()
        self._picture: dict[str, Any] = {}
        self._views = 0
        self._refreshing = threading.Lock()
        super().__init__(mark=secrets.token_hex(4), controls=PolicyControls(session, self._show_error))
        self.on_msg(self._on_message)
        hear_on_subshells(self)
        self._refresh()
        TICKER.add(self)

    @property
    def rate(self) -> float:
        """Looks per second."""
        return self.session.config.refresh_rate

    def look(self) -> None:
        """Send the news, if there is any and somebody sees it; called on the ticker's thread."""
        if self._views > 0 and not self.closed:
            self._refresh()

    def close(self) -> None:
        """Take the panel out of all cells; leaves no callback behind."""
        if self.closed:
            return
        self.closed = True
        TICKER.discard(self)
        self.on_msg(self._on_message, remove=True)
        controls, layout = self.controls, self.layout
        super().close()
        controls.close()
        layout.close()

    def _refresh(self) -> None:
        with self._refreshing:
            self._refresh_once()

    def _refresh_once(self) -> None:
        cluster = self.session.cluster
        view = self.session.view()
        waits = self.controls.between_cells
        seen = (cluster, cluster.telemetry.version if cluster is not None else 0, view, self._error, waits)
        if seen == self._seen:
            return
        self._seen = seen
        self.controls.update(view, self.session.book.names())
        snapshot = cluster.status() if cluster is not None else None
        picture = panel_state(cluster, snapshot)
        picture["error"] = self._error or (snapshot.problem if snapshot is not None else "")
        picture["hint"] = BETWEEN_CELLS if waits else ""
        if cluster is None:
            picture["boot"] = {"model": self.session.config.model, "roles": self.session.config.roles}
        if picture != self._picture:
            self._picture = picture
            self.state = {**picture, "now": time.time()}

    # What views send

    def _on_message(self, _: object, content: Mapping[str, Any], buffers: object) -> None:
        """Arrives on any thread, also while a cell runs; what takes long gets a thread of its own."""
        match content.get("do"):
            case "shown":
                self._views += 1
                self._refresh()
            case "hidden":
                self._views = max(0, self._views - 1)
            case "boot":
                self._background(self._boot, str(content.get("model", "")), str(content.get("roles", "")))
            case "stop":
                self._background(self._stop)

    def _background(self, work: Any, *args: str) -> None:
        threading.Thread(target=work, args=args, name="mlcrouter-panel-boot", daemon=True).start()

    def _boot(self, model: str, roles: str) -> None:
        self._error = ""
        config = self.session.config
        try:
            self.session.let_go()
            cluster = self.session.new_cluster(
                model.strip() or config.model,
                roles=roles.strip() or config.roles,
                engine=config.engine or None,
            )
            if find_same(cluster) is None:
                cluster.start_blocking()
                self.session.catch_up(cluster)
        except MlcRouterError as error:
            self._show_error(str(error))

    def _stop(self) -> None:
        cluster = self.session.cluster
        try:
            if cluster is not None:
                cluster.down_blocking()
        except (MlcRouterError, TimeoutError) as error:
            self._show_error(str(error))

    def _show_error(self, text: str) -> None:
        self._error = text

    # What places without widgets show

    def __repr__(self) -> str:
        cluster = self.session.cluster
        return repr(Status(cluster.status() if cluster is not None else None, self.session.view()))

    def _repr_html_(self) -> str:
        cluster = self.session.cluster
        return Status(cluster.status() if cluster is not None else None, self.session.view())._repr_html_()

    def _repr_mimebundle_(self, **kwargs: Any) -> Any:
        bundle = super()._repr_mimebundle_(**kwargs)
        data, metadata = bundle if isinstance(bundle, tuple) else (bundle, {})
        return {**(data or {}), "text/plain": repr(self), "text/html": self._repr_html_()}, metadata

    def _ipython_display_(self) -> None:
        """Show the view, and below it the table for pages where no view comes to life; a live view hides it.

        One output with both would not do: nbconvert takes the view of it, which stays empty without its scripts."""
        if not in_notebook():
            print(repr(self))
            return
        data, metadata = self._repr_mimebundle_()
        display({**data, "text/plain": "", "text/html": ""}, metadata=metadata, raw=True)
        table = f'<div class="mlcr-static-{self.mark}">{self._repr_html_()}</div>'
        display({"text/plain": repr(self), "text/html": table}, raw=True)


def open_panel(cluster: "Cluster | None" = None) -> Panel:
    """A panel of the notebook's session; it follows whatever cluster runs, `cluster` among them."""
    from ..extension import find_session

    session = find_session()
    return Panel(session if session is not None else Session())
