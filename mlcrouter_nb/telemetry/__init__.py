"""What happens, for everybody who looks: the panel, the status, the metrics page and the trace export."""

from .telemetry import Event, Telemetry
from .traces import CallTrace, RequestTrace
from .views import EngineView, HistoryPoint, ParameterView, PolicyView, Snapshot, StreamView

__all__ = [
    "CallTrace",
    "EngineView",
    "Event",
    "HistoryPoint",
    "ParameterView",
    "PolicyView",
    "RequestTrace",
    "Snapshot",
    "StreamView",
    "Telemetry",
]
