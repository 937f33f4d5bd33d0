"""The status as text and as HTML."""

from mlcrouter_nb.notebook.display.status import status_html, status_text
from mlcrouter_nb.telemetry import Telemetry


def test_a_policy_that_blocks_the_router_is_said() -> None:
    telemetry = Telemetry()
    telemetry.emit("cluster_state", state="ready")
    before = status_text(telemetry.snapshot()), status_html(telemetry.snapshot())
    telemetry.emit("router_blocked", place="policy '<spin>', line 3", since=telemetry.snapshot().time - 5)
    text, html = status_text(telemetry.snapshot()), status_html(telemetry.snapshot())
    assert "policy '<spin>', line 3, has blocked the router for 5 s" in text
    assert "policy &#x27;&lt;spin&gt;&#x27;, line 3, has blocked" in html
    assert not any("blocked" in shown for shown in before)
