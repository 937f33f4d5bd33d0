"""The live panel: one anywidget that draws, ipywidgets for the policy's parameters, one thread that looks."""

from .panel import Panel, open_panel

__all__ = ["Panel", "open_panel"]
