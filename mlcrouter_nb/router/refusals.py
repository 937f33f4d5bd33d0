"""What an engine says when it refuses a call."""

import json
from typing import Any

from ..protocol.errors import EngineError, error_body


def told(body: bytes) -> dict[str, Any] | None:
    """An engine's own error object; MLC sends it as a JSON string that holds JSON."""
    try:
        value = json.loads(body)
        if isinstance(value, str):
            value = json.loads(value)
    except ValueError:
        return None
    if not isinstance(value, dict):
        return None
    if isinstance(value.get("error"), dict):
        return value
    message = value.get("message") or value.get("detail")  # MLC and vLLM of old; FastAPI
    return error_body(message if isinstance(message, str) else json.dumps(message)) if message else None


def refusal(engine: str, verb: str, status: int, body: bytes, retry_after: str) -> EngineError:
    """`D1 refused start_generate: why`, in the engine's own words, of an answer with another status than 200."""
    reason = ((told(body) or {}).get("error") or {}).get("message")
    if not isinstance(reason, str) or not reason:
        text = body[:2000].decode(errors="replace").strip() or "no reason given"
        reason = f"status {status}, {text}"
    did = "refused" if 400 <= status < 500 else "failed"
    return EngineError(
        f"{engine} {did} {verb}: {reason}",
        engine=engine, verb=verb, status=status, body=body, retry_after=retry_after,
    )  # fmt: skip
