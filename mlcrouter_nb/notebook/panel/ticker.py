"""One thread that looks for news on behalf of all open panels, and ends with the last of them."""

import logging
import threading
import time
from typing import Protocol


class Watcher(Protocol):
    """Who wants to look."""

    @property
    def rate(self) -> float:
        """Looks per second."""

    def look(self) -> None:
        """Look for news; called on the ticker's thread."""


class Ticker:
    """Calls `look` of each watcher, `rate` times a second."""

    def __init__(self) -> None:
        self._watchers: list[Watcher] = []
        self._lock = threading.Lock()
        self._thread: threading.Thread | None = None

    @property
    def watchers(self) -> tuple[Watcher, ...]:
        """Who is looked for now."""
        return tuple(self._watchers)

    def add(self, watcher: Watcher) -> None:
        """Begin to look for a watcher."""
        with self._lock:
            self._watchers.append(watcher)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="mlcrouter-panel", daemon=True)
                self._thread.start()

    def discard(self, watcher: Watcher) -> None:
        """Stop looking for a watcher."""
        with self._lock:
            if watcher in self._watchers:
                self._watchers.remove(watcher)

    def _run(self) -> None:
        while True:
            with self._lock:
                watchers = tuple(self._watchers)
                if not watchers:
                    self._thread = None
                    return
            for watcher in watchers:
                try:
                    watcher.look()
                except Exception:  # one panel's fault must not blind the others
                    logging.getLogger(__name__).exception("A panel failed and is no longer updated.")
                    self.discard(watcher)
            time.sleep(1 / max(watcher.rate for watcher in watchers))


TICKER = Ticker()
