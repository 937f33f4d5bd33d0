"""Errors as clients see them: an HTTP status and OpenAI's error object."""

import logging
from typing import Any

from ..protocol.errors import (
    ArgumentError,
    EngineError,
    MlcRouterError,
    PolicyError,
    RequestError,
    error_body,
)
from .refusals import told

log = logging.getLogger(__name__)


def problem(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body of the answer to a request that failed."""
    if isinstance(error, RequestError):
        return error.status, error.body()
    if isinstance(error, EngineError):
        return _of_engine(error)
    if isinstance(error, PolicyError):
        return 500, error_body(str(error), type="policy_error", code="policy_error")
    if isinstance(error, ArgumentError):
        return 400, error_body(str(error))
    if isinstance(error, MlcRouterError):
        return 500, error_body(str(error), type="server_error")
    log.error("a request failed by a fault of the router", exc_info=error)
    return 500, error_body("The router failed; its log says more.", type="server_error")


def _of_engine(error: EngineError) -> tuple[int, dict[str, Any]]:
    """What an engine says about the client's request goes on to the client; its own faults are a bad gateway's."""
    if 400 <= error.status < 500 and error.status not in (401, 403, 499):
        return error.status, told(error.body) or error_body(str(error))
    status = error.status if error.status in (501, 503, 504) else 502
    return status, error_body(str(error), type="server_error", code="engine_error")
