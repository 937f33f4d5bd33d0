"""The active policy and its parameters, as widgets: what a person moves, the next request sees."""

import contextlib
import threading
from collections.abc import Callable, Iterator
from html import escape
from typing import Any

import ipywidgets

from ...protocol.errors import MlcRouterError
from ...telemetry import ParameterView, PolicyView
from ..display.place import in_notebook
from ..session import Session
from .comms import hear_on_subshells


class PolicyControls(ipywidgets.VBox):
    """A selector, and a slider, menu or box for each parameter; in step with `%route use` and `%route set`.

    Callbacks arrive on any thread, also while a cell runs, and only hand a value to the session."""

    def __init__(self, session: Session, on_error: Callable[[str], None]) -> None:
        self._session = session
        self._on_error = on_error
        self.between_cells = False  # whether this front end delivers to the main shell, which cells block
        self._pushing: int | None = None
        self._shape: object = None
        self._rows: dict[str, _Row] = {}
        self._seen: dict[str, Any] = {}
        self._selector = ipywidgets.Dropdown(description="active", layout={"width": "auto"})
        self._selector.observe(self._on_select, "value")
        hear_on_subshells(self._selector)
        self._origin = ipywidgets.HTML()
        self._head = _line(self._selector, self._origin)
        super().__init__([self._head])
        self.add_class("mlcr-controls")

    def update(self, view: PolicyView | None, names: list[str]) -> None:
        """Show this policy; only what differs from before is sent."""
        with self._push():
            options = [(name, name) for name in names]
            if view is None:
                options.insert(0, ("what suits the roles", ""))
            if list(self._selector.options) != options:
                self._selector.options = options
            self._selector.value = view.name if view is not None else ""
            self._origin.value = f"<span>{escape(view.origin)}</span>" if view is not None else ""
            shape = None if view is None else (view.name, view.origin, tuple(map(_shape, view.parameters)))
            if shape != self._shape:
                self._shape = shape
                self._rebuild(view)
            for parameter in view.parameters if view is not None else ():
                # Only what changed at the other end is pushed: a value that is on its way from here is not undone.
                if self._seen.get(parameter.name) != parameter.value:
                    self._seen[parameter.name] = parameter.value
                    self._rows[parameter.name].control.value = parameter.value
                self._rows[parameter.name].show_used(parameter)

    def _rebuild(self, view: PolicyView | None) -> None:
        old = list(self._rows.values())
        parameters = view.parameters if view is not None else ()
        self._rows = {parameter.name: _Row(parameter, self._on_value) for parameter in parameters}
        self._seen = {parameter.name: parameter.value for parameter in parameters}
        self.children = [self._head, *(row.box for row in self._rows.values())]
        for row in old:
            row.close()

    def _on_select(self, change: dict[str, Any]) -> None:
        if self._is_pushed() or not change["new"]:
            return
        with self._reporting():
            self._session.use(self._session.book.get(change["new"]), {})

    def _on_value(self, name: str, value: Any) -> None:
        if self._is_pushed():
            return
        with self._reporting():
            self._seen[name] = value
            self._session.set({name: value})

    @contextlib.contextmanager
    def _reporting(self) -> Iterator[None]:
        self.between_cells = in_notebook() and threading.current_thread() is threading.main_thread()
        try:
            yield
            self._on_error("")
        except MlcRouterError as error:
            self._on_error(str(error))

    @contextlib.contextmanager
    def _push(self) -> Iterator[None]:
        """What this thread sets within is no user's doing."""
        self._pushing = threading.get_ident()
        try:
            yield
        finally:
            self._pushing = None

    def _is_pushed(self) -> bool:
        return self._pushing == threading.get_ident()

    def close(self) -> None:
        """Close all widgets, so that none stays in the kernel."""
        for row in self._rows.values():
            row.close()
        self._selector.unobserve_all()
        for widget in (self._selector, self._origin, self._head):
            close_wholly(widget)
        layout = self.layout
        super().close()
        layout.close()


class _Row:
    """A parameter: its name, its control, the value that the latest request saw."""

    def __init__(self, parameter: ParameterView, on_value: Callable[[str, Any], None]) -> None:
        self.control = _control(parameter)
        hear_on_subshells(self.control)
        self.control.observe(lambda change: on_value(parameter.name, change["new"]), "value")
        self.used = ipywidgets.HTML()
        self.box = _line(self.control, self.used)

    def show_used(self, parameter: ParameterView) -> None:
        """Say what the latest request saw."""
        used = parameter.last_used
        text = (
            ""
            if used is None
            else f"last used {used:.4g}"
            if isinstance(used, float)
            else f"last used {used}"
        )
        self.used.value = f"<span>{escape(text)}</span>" if text else ""

    def close(self) -> None:
        """Close the widgets of the row."""
        self.control.unobserve_all()
        for widget in (self.control, self.used, self.box):
            close_wholly(widget)


def close_wholly(widget: ipywidgets.Widget) -> None:
    """Close a widget, and its layout and style, which are widgets too."""
    parts = [getattr(widget, name, None) for name in ("layout", "style")]
    widget.close()
    for part in parts:
        if isinstance(part, ipywidgets.Widget):
            part.close()


def _control(parameter: ParameterView) -> ipywidgets.Widget:
    common: dict[str, Any] = {
        "value": parameter.value,
        "description": parameter.name,
        "tooltip": parameter.name,
        "layout": {"width": "auto"},
    }
    if parameter.kind == "choice":
        return ipywidgets.Dropdown(options=[(str(option), option) for option in parameter.options], **common)
    if parameter.kind == "switch":
        return ipywidgets.Checkbox(indent=False, **common)
    limits = {"min": parameter.low, "max": parameter.high, "step": parameter.step}
    if isinstance(parameter.value, int):
        return ipywidgets.IntSlider(**limits, **common)
    digits = 2 if (parameter.step or 0.01) >= 0.01 else 4
    return ipywidgets.FloatSlider(**limits, readout_format=f".{digits}f", **common)


def _line(*widgets: ipywidgets.Widget) -> ipywidgets.HBox:
    box = ipywidgets.HBox(widgets)
    box.add_class("mlcr-line")
    return box


def _shape(parameter: ParameterView) -> tuple[Any, ...]:
    return parameter.name, parameter.kind, parameter.low, parameter.high, parameter.step, parameter.options
