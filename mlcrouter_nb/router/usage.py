"""OpenAI's usage object, summed over the attempts of a request."""

from typing import Any

from .guard import Guard


class UsageSum:
    """What the engines told, leg by leg; the prompt counts once."""

    def __init__(self) -> None:
        self.told: dict[str, Any] | None = None  # by the leg that runs
        self.prompt_tokens: int | None = None
        self.cached_tokens: int | None = None
        self.sent = 0  # tokens of earlier legs

    def tell(self, usage: dict[str, Any], guard: Guard) -> None:
        """A leg's usage; the latest of one leg counts."""
        self.told = usage
        if self.prompt_tokens is None:
            prompt = usage.get("prompt_tokens")
            if isinstance(prompt, int):
                self.prompt_tokens = prompt - self.sent  # what was sent is part of a later leg's prompt
            self.cached_tokens = _cached(usage, guard, self.prompt_tokens)

    def next_leg(self, sent: int) -> None:
        """Another leg begins after `sent` tokens in all."""
        self.told, self.sent = None, sent

    def total(self, counted: int, prompt_tokens: int | None) -> dict[str, Any]:
        """The usage of the request; `counted` and `prompt_tokens` stand in for what no engine told."""
        prompt = (prompt_tokens if self.prompt_tokens is None else self.prompt_tokens) or 0
        completion = counted
        if self.told is not None and isinstance(self.told.get("completion_tokens"), int):
            completion = self.sent + self.told["completion_tokens"]
        # The engine's other fields (MLC's `extra`) describe one leg; they go on where there was only one.
        rest = self.told if self.told is not None and not self.sent else {}
        details = {**(rest.get("prompt_tokens_details") or {}), "cached_tokens": self.cached_tokens or 0}
        return {
            **rest,
            "prompt_tokens": prompt,
            "completion_tokens": completion,
            "total_tokens": prompt + completion,
            "prompt_tokens_details": details,
        }


def _cached(usage: dict[str, Any], guard: Guard, prompt_tokens: int | None) -> int | None:
    """Prompt tokens that an engine held already.

    After a transfer the decode engine may call all that it received cached: what it held before counts."""
    cached: Any = (usage.get("prompt_tokens_details") or {}).get("cached_tokens")
    if guard.reserved:
        cached = max(kv.prefix_matched_length for kv in guard.reserved.values())
    elif not isinstance(cached, int):
        prefilled = (usage.get("extra") or {}).get("prefill_tokens")  # MLC counts these instead
        cached = (
            prompt_tokens - prefilled if isinstance(prefilled, int) and prompt_tokens is not None else None
        )
    if not isinstance(cached, int):
        return None
    return max(cached if prompt_tokens is None else min(cached, prompt_tokens), 0)
