"""Who may talk to the gateway: the Host header, origins of web pages, and the key."""

import hmac
import ipaddress
from collections.abc import Sequence
from urllib.parse import urlsplit

from ..protocol.errors import RequestError
from .reply import HttpRequest

PREFLIGHT_AGE_S = 600


def is_this_machine(host: str | None) -> bool:
    """Whether a host name means this machine without asking anybody: localhost and the loopback addresses."""
    if not host:
        return False
    if host == "localhost" or host.endswith(".localhost"):
        return True
    try:
        return ipaddress.ip_address(host).is_loopback
    except ValueError:
        return False


class Access:
    """Checks each request before anything else looks at it.

    On loopback only this machine's names are taken as Host, so that no web page reaches the gateway through a name
    that it made to point here (DNS rebinding). `origins` may use it from a browser besides pages of this machine."""

    def __init__(self, host: str, api_key: str | None, origins: Sequence[str] = ()) -> None:
        self._loopback = is_this_machine(host.strip("[]"))
        self._key = api_key.encode() if api_key else None
        self._origins = frozenset(origins)

    def check(self, request: HttpRequest) -> list[tuple[str, str]]:
        """The CORS headers of the answer; raises `RequestError` for a foreign Host or origin."""
        host = request.headers.get("host")
        if self._loopback and host is not None and not is_this_machine(_name(f"//{host}")):
            raise RequestError(
                f"'{host[:100]}' is not a name of this machine.", status=403, code="wrong_host"
            )
        origin = request.headers.get("origin")
        if origin is None:
            return []
        if "*" in self._origins or origin in self._origins or is_this_machine(_name(origin)):
            return [("Access-Control-Allow-Origin", origin), ("Vary", "Origin")]
        if self._loopback:
            raise RequestError(
                f"Pages of '{origin[:100]}' may not use this server.", status=403, code="wrong_origin"
            )
        return []

    def check_key(self, request: HttpRequest) -> None:
        """Raise `RequestError` (401) unless the request carries the key."""
        if self._key is None:
            return
        scheme, _, given = request.headers.get("authorization", "").partition(" ")
        same = hmac.compare_digest(given.strip().encode("latin-1", "replace"), self._key)
        if scheme.lower() != "bearer" or not same:
            raise RequestError(
                "Incorrect API key: send 'Authorization: Bearer KEY'.", status=401, code="invalid_api_key"
            )


def preflight(request: HttpRequest) -> list[tuple[str, str]]:
    """What a browser wants to know before it sends the real request; no key is asked for it."""
    wanted = request.headers.get("access-control-request-headers", "")
    safe = "".join(c for c in wanted if c.isalnum() or c in "-_, ")
    headers = [
        ("Access-Control-Allow-Methods", "GET, POST, OPTIONS"),
        ("Access-Control-Allow-Headers", safe or "authorization, content-type"),
        ("Access-Control-Max-Age", str(PREFLIGHT_AGE_S)),
    ]
    if request.headers.get("access-control-request-private-network"):
        headers.append(("Access-Control-Allow-Private-Network", "true"))
    return headers


def _name(url: str) -> str | None:
    try:
        return urlsplit(url).hostname
    except ValueError:
        return None
