"""Loading and unloading the IPython extension: every hook that goes in comes out again."""

import weakref

from IPython.core.interactiveshell import InteractiveShell

from .completion import Completer
from .config import MlcRouter
from .display.status import register_formatters
from .magics import RouterMagics
from .policy_cells import lone_cell_magic
from .session import Session


class Extension:
    """The hooks of one shell; `unload` undoes all of them."""

    def __init__(self, shell: InteractiveShell) -> None:
        self.shell = shell
        self.config = MlcRouter(parent=shell)
        self.session = Session(self.config)
        self.magics = RouterMagics(shell, self.session)
        self.completer = Completer(self.session)
        shell.configurables.append(self.config)
        shell.register_magics(self.magics)
        shell.input_transformers_cleanup.append(lone_cell_magic)
        shell.Completer.custom_matchers.append(self.completer.matcher)
        self._unregister_formatters = register_formatters(shell)

    def unload(self) -> None:
        """Take the hooks out, close the panels and stop the cluster, saying so."""
        shell = self.shell
        self._unregister_formatters()
        _remove(shell.Completer.custom_matchers, self.completer.matcher)
        _remove(shell.input_transformers_cleanup, lone_cell_magic)
        _remove(shell.configurables, self.config)
        _remove(shell.configurables, self.magics)  # Magics adds itself
        for kind, names in self.magics.magics.items():
            for name in names:
                shell.magics_manager.magics[kind].pop(name, None)
        shell.magics_manager.registry.pop(type(self.magics).__name__, None)
        self.session.close()


_loaded: "weakref.WeakKeyDictionary[InteractiveShell, Extension]" = weakref.WeakKeyDictionary()


def load(shell: InteractiveShell) -> None:
    """Hook into a shell; a second time does nothing."""
    if shell not in _loaded:
        _loaded[shell] = Extension(shell)


def unload(shell: InteractiveShell) -> None:
    """Unhook, and stop the cluster that the shell started."""
    extension = _loaded.pop(shell, None)
    if extension is not None:
        extension.unload()


def find_session() -> Session | None:
    """The session of the shell that runs this code, where the extension is loaded."""
    shell = InteractiveShell._instance
    extension = _loaded.get(shell) if shell is not None else None
    return extension.session if extension is not None else None


def _remove(items: list, item: object) -> None:
    if item in items:
        items.remove(item)
