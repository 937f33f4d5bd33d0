"""Telling engines to free what they hold for an attempt that is over."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from ..protocol.errors import EngineError
from .call import Call

if TYPE_CHECKING:
    from .endpoint import Endpoint

ABORT_S = 5.0

Held = Sequence[tuple["Endpoint", Call | None]]  # engines with the transfer call that may be open on them


async def abandon(user: str, senders: Held, holders: Held) -> None:
    """Free an attempt's KV: first the engines that may still write into it, then those that hold it."""
    for group in (senders, holders):
        await asyncio.gather(*(abort(endpoint, user, call) for endpoint, call in group))


async def abort(endpoint: Endpoint, user: str, call: Call | None) -> None:
    """Abort until the call has ended, and once after that: the first may overtake the call on its way there."""
    body = json.dumps({"user": user}).encode()
    loop = asyncio.get_running_loop()
    deadline, pause = loop.time() + ABORT_S, 0.01
    try:
        while True:
            was_open = call is not None and not call.finished
            await endpoint.ask("/microserving/abort", body, ABORT_S)
            if call is None or not was_open or loop.time() > deadline:
                break
            if not call.finished:
                await asyncio.sleep(pause)
                pause = min(2 * pause, 0.5)
    except EngineError:
        pass  # it cannot be reached, or frees the KV at its own deadline
    finally:
        if call is not None:
            call.close()
