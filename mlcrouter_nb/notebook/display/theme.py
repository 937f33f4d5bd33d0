"""Colours: JupyterLab's own variables, with values for places that do not know them."""

INK = "var(--jp-ui-font-color1, #1f2328)"
MUTED = "var(--jp-ui-font-color2, #5b6470)"
LINE = "var(--jp-border-color2, #d5dae1)"
FONT = "var(--jp-ui-font-family, system-ui, sans-serif)"
MONO = "var(--jp-code-font-family, ui-monospace, monospace)"
ERROR = "var(--jp-error-color1, #c62828)"

# Hues of the engines; they differ for colour-blind eyes too, and reach a contrast of 3 on light and dark ground.
ENGINES = ("#3d7be0", "#c96a12", "#1b8f80", "#b8489a", "#8b7500", "#7d63cf", "#cf4b42", "#6a7a8c")


def engine_colour(index: int) -> str:
    """The hue of the engine at this place."""
    return ENGINES[index % len(ENGINES)]
