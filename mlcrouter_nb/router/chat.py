"""Completion chunks as chat chunks: for a chat that a policy served as a plain prompt."""

from typing import Any


def chat_event(event: dict[str, Any], first: bool) -> dict[str, Any]:
    """The chat chunk of a completion chunk; the first one also says who speaks.

    Source: https://platform.openai.com/docs/api-reference/chat-streaming"""
    choices = []
    for choice in event.get("choices") or ():
        delta: dict[str, Any] = {"role": "assistant"} if first else {}
        if choice.get("text") or first:
            delta["content"] = choice.get("text") or ""
        choices.append(
            {
                "index": choice.get("index", 0),
                "delta": delta,
                "logprobs": None,
                "finish_reason": choice.get("finish_reason"),
            }
        )
    return {**event, "object": "chat.completion.chunk", "choices": choices}
