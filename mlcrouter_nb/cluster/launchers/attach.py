"""Engines that already run: any OpenAI server, or MicroServing engines; we only keep their addresses."""

from urllib.parse import urlsplit

import aiohttp

from ...protocol.errors import ArgumentError
from .base import Engine, EngineSpec, Launcher, Report

PROBE_S = 2.0  # in which an engine must answer something


class AttachLauncher(Launcher):
    """Takes engines as they are."""

    kind = "attach"

    def launch(self, spec: EngineSpec) -> "AttachedEngine":
        return AttachedEngine(spec)


class AttachedEngine(Engine):
    """An engine that somebody else started and stops."""

    async def wait_ready(self, report: Report) -> None:
        """Any HTTP answer will do; raises `ArgumentError` where none comes."""
        url = self.spec.url or ""
        report("asking for a sign of life", None)
        try:
            async with (
                aiohttp.ClientSession(timeout=aiohttp.ClientTimeout(total=PROBE_S)) as session,
                session.get(f"{url}/v1/models"),
            ):
                self.url = url
        except (aiohttp.ClientError, TimeoutError, UnicodeError) as error:
            reason = "no answer" if isinstance(error, TimeoutError) else str(error)
            raise ArgumentError(
                f"No engine answers at {url} ({reason}): start it there first, or correct the address."
            ) from error

    async def stop(self, grace: float) -> None:
        """It is not ours to stop."""


def check_url(url: str) -> str:
    """An engine's address without a trailing slash or `/v1`; raises `ArgumentError` for what is no address."""
    text = url.strip().rstrip("/").removesuffix("/v1")
    try:
        parts = urlsplit(text)
        good = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError:
        good = False
    if not good:
        raise ArgumentError(f"endpoint URL {url!r} is not an address: write it like http://127.0.0.1:8080.")
    return text
