"""The notebook's side: magics, completion, what cells show, and the panel."""

from IPython.core.interactiveshell import InteractiveShell


def load_ipython_extension(shell: InteractiveShell) -> None:
    """Hook into a shell; a second time does nothing."""
    from .extension import load

    load(shell)


def unload_ipython_extension(shell: InteractiveShell) -> None:
    """Take the hooks out again, and stop the cluster."""
    from .extension import unload

    unload(shell)
