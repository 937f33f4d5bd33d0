"""`%config MlcRouter.*`: the defaults of a notebook."""

from traitlets import Bool, Float, Unicode, observe
from traitlets.config import Configurable


class MlcRouter(Configurable):
    """Defaults of `%route up`, and how the notebook behaves."""

    model = Unicode(
        "smollm2-135m", help="The model that %route up boots: a name or the path of a .gguf file."
    ).tag(config=True)
    roles = Unicode(
        "1P2D", help="The engines that %route up boots: xPyD, or a number of engines without roles."
    ).tag(config=True)
    engine = Unicode(
        "", help="The engine kind: cpu, mlc or attach; empty: MLCROUTER_ENGINE, else what fits."
    ).tag(config=True)
    refresh_rate = Float(
        8.0, min=1.0, max=10.0, help="Updates of the panel per second while something happens."
    ).tag(config=True)
    nest_asyncio = Bool(
        False,
        help="Let asyncio.run and run_until_complete work in cells, by nest_asyncio2. It patches asyncio for the "
        "whole kernel and stays until the kernel restarts.",
    ).tag(config=True)

    @observe("nest_asyncio")
    def _patch(self, change: dict) -> None:
        if change["new"]:
            import nest_asyncio2

            nest_asyncio2.apply()
        else:
            print("asyncio stays patched until the kernel restarts.")
