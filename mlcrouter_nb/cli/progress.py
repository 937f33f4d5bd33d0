"""Boot progress as lines on stderr."""

import sys
import time

from ..telemetry import Snapshot


class ProgressLines:
    """Boot progress on stderr: a line for each new stage of an engine, and every two seconds in between.

    What all engines say alike (the model's download) is one line."""

    PERIOD = 2.0

    def __init__(self) -> None:
        self._told: dict[str, tuple[str, float]] = {}

    def __call__(self, snapshot: Snapshot) -> None:
        texts = {engine.name: engine.detail or engine.state for engine in snapshot.engines}
        common = set(texts.values())
        if len(common) == 1 and all(self._is_news(name, *common) for name in texts):
            self._tell(", ".join(texts), *common)
            self._told |= dict.fromkeys(texts, (common.pop(), time.monotonic()))
        for name, text in texts.items():
            if self._is_news(name, text):
                self._tell(name, text)
                self._told[name] = (text, time.monotonic())

    def _is_news(self, name: str, text: str) -> bool:
        told, when = self._told.get(name, ("", 0.0))
        new_stage = text.partition(":")[0] != told.partition(":")[0]
        return new_stage or (text != told and time.monotonic() - when >= self.PERIOD)

    @staticmethod
    def _tell(who: str, text: str) -> None:
        first_line = text.partition("\n")[0]
        print(f"{who}: {first_line}", file=sys.stderr, flush=True)
