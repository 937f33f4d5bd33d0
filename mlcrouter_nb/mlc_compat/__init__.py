"""MLC-LLM's names for scripts written against its router: only their imports change.

`Router` stands for `mlc_llm.router.Router`, `serve` for `mlc_llm.interface.router.serve`, the two modules for
`mlc_llm.protocol.openai_api_protocol` and `mlc_llm.serve.entrypoints.microserving_entrypoints`."""

from . import microserving_entrypoints, openai_api_protocol
from .router import Router
from .serve import serve

__all__ = ["Router", "microserving_entrypoints", "openai_api_protocol", "serve"]
