"""The bodies of the three calls, as `mlc_llm.serve.entrypoints.microserving_entrypoints` names them."""

from ..protocol.microserving import PrepRecvRequest, PrepRecvResponse, RemoteSendRequest, StartGenerateRequest

__all__ = ["PrepRecvRequest", "PrepRecvResponse", "RemoteSendRequest", "StartGenerateRequest"]
