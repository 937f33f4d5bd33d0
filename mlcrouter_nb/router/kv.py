"""Room for a prompt's KV on a decode engine, as `prep_recv` answers it."""

from __future__ import annotations

import operator
from typing import TYPE_CHECKING, Any

from ..protocol.errors import MlcRouterError, RequestError
from ..protocol.microserving import PrepRecvResponse, decode_kv_metadata
from .guard import Lease

if TYPE_CHECKING:
    from .endpoint import Endpoint


class KV:
    """Room that a decode engine has reserved for a prompt's KV: positions [prefix_matched_length, end).

    Both are token counts and never negative; `endpoint` is the engine that holds it."""

    def __init__(self, endpoint: Endpoint, matched: int, end: int, metadata: str, lease: Lease) -> None:
        self.endpoint = endpoint
        self.prefix_matched_length = matched
        self.end = end
        self.metadata = metadata
        self.lease = lease
        self.started = False  # start_generate has been called
        self.consumed = False  # the engine has taken it over and ended with it

    def __repr__(self) -> str:
        return f"<KV on {self.endpoint.name}: [{self.prefix_matched_length}, {self.end})>"


def whole(verb: str, name: str, value: Any) -> int:
    """A window's border as an int; raises `MlcRouterError` for a float, which `/` gives even where nothing is left over."""
    try:
        return operator.index(value)
    except TypeError:
        hint = "; write // instead of /" if isinstance(value, float) else ""
        raise MlcRouterError(f"{verb}: {name}={value!r} must be a whole number{hint}.") from None


def check_reserved(answer: dict[str, Any], stop: int, length: int) -> PrepRecvResponse:
    """prep_recv's answer for the window [0, stop) of a prompt of `length` tokens, for a wrong window kills an engine.

    Raises `ValueError` where it is not one."""
    told = PrepRecvResponse.model_validate(answer)
    window = max(stop - told.prefix_matched_length, 0)
    try:
        expected = sum(size for _, size in decode_kv_metadata(told.kv_append_metadata))
    except RequestError:
        expected = window  # another engine's own format: opaque to us
    if not 0 <= told.prefix_matched_length < length or expected != window:
        raise ValueError("the window is not what was asked for")
    return told
