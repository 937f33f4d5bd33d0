"""A boot's progress: one line per engine, redrawn in a notebook, printed when it changes in a terminal."""

import re
import time
from html import escape

from ...telemetry import EngineView, Snapshot
from .place import Place, in_notebook
from .theme import FONT, INK, LINE, MUTED, engine_colour


class BootDisplay:
    """Draws snapshots while a cluster boots, and one line once it is up."""

    def __init__(self, title: str) -> None:
        self.title = title
        self._began = time.monotonic()
        self._place = Place() if in_notebook() else None
        self._printed: dict[str, str] = {}

    def update(self, snapshot: Snapshot) -> None:
        """Show how far each engine is."""
        if self._place is None:
            for engine in snapshot.engines:
                self._print(engine)
            return
        lines = [f"Booting {self.title} ..."]
        lines += [f"  {engine.name}  {stage(engine)}" for engine in snapshot.engines]
        self._place.draw("\n".join(lines), self._html(snapshot))

    def done(self, snapshot: Snapshot) -> None:
        """All engines answer."""
        count = len(snapshot.engines)
        text = f"{self.title}: {count} engine{'s' if count != 1 else ''} ready in {self.seconds:.1f} s"
        if self._place is None:
            print(text)
        else:
            self._place.draw(
                text, f'<div style="font-family:{FONT};color:{MUTED};font-size:13px">{escape(text)}</div>'
            )

    def failed(self, how: str) -> None:
        """Nothing is running any more; the error that follows says why, and in a terminal that is all."""
        text = f"Booting {self.title}: {how} after {self.seconds:.1f} s"
        if self._place is not None:
            self._place.draw(
                text, f'<div style="font-family:{FONT};color:{INK};font-size:13px">{escape(text)}</div>'
            )

    @property
    def seconds(self) -> float:
        """Since the boot began."""
        return time.monotonic() - self._began

    def _print(self, engine: EngineView) -> None:
        """A line when an engine enters another stage; counts alone make none."""
        text = stage(engine)
        key = re.sub(r"[\d.,]+", "#", text)
        if self._printed.get(engine.name) != key:
            self._printed[engine.name] = key
            print(f"{engine.name}  {text}", flush=True)

    def _html(self, snapshot: Snapshot) -> str:
        rows = ""
        for place, engine in enumerate(snapshot.engines):
            done = 1.0 if engine.state in ("ready", "busy") else engine.progress
            width = 0 if done is None else round(100 * done)
            bar = (
                f'<div role="progressbar" aria-label="{escape(engine.name)}" aria-valuenow="{width}" aria-valuemin="0" '
                f'aria-valuemax="100" style="width:160px;height:6px;border-radius:3px;background:{LINE}">'
                f'<div style="width:{width}%;height:6px;border-radius:3px;background:{engine_colour(place)}"></div></div>'
            )
            rows += (
                f'<div style="display:flex;gap:10px;align-items:center;padding:1px 0"><b style="width:36px">'
                f"{escape(engine.name)}</b>{bar}<span>{escape(stage(engine))}</span></div>"
            )
        return (
            f'<div style="font-family:{FONT};color:{INK};font-size:13px" aria-live="polite"><div style="color:{MUTED}">'
            f"Booting {escape(self.title)} · {self.seconds:.0f} s</div>{rows}</div>"
        )


def stage(engine: EngineView) -> str:
    """Where an engine is: its state, and what it says about it (the first line)."""
    if engine.state in ("ready", "busy"):
        return "ready"
    detail = engine.detail.partition("\n")[0] or engine.state
    return detail if engine.state == "failed" else f"{detail} ..."
