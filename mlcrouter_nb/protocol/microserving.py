"""MicroServing: `prep_recv`, `remote_send`, `start_generate`, as MLC-LLM's engines speak them.

Each body is a completion request plus the fields below; the request's id travels in `user`, the same in all three.
Source: MLC-LLM, `mlc_llm.serve.entrypoints.microserving_entrypoints`."""

import base64
import binascii
import json

from pydantic import BaseModel

from .errors import RequestError
from .openai import CompletionRequest


class PrepRecvRequest(CompletionRequest):
    """Reserve KV on a decode engine for the window `[0, end)`; a negative `end` counts from the prompt's end."""

    end: int


class PrepRecvResponse(BaseModel):
    """Where the KV goes (opaque to the router) and how many leading tokens the engine already holds."""

    kv_append_metadata: str
    prefix_matched_length: int


class RemoteSendRequest(CompletionRequest):
    """Prefill `[begin, end)` and write its KV into the peer `recv_rank` at `kv_addr_info`."""

    begin: int
    end: int
    kv_addr_info: str
    recv_rank: int


class StartGenerateRequest(CompletionRequest):
    """Prefill `prompt[begin:]` on the decode engine and generate."""

    begin: int


def kv_window_end(prompt_length: int, pd_balance_factor: float) -> int:
    """The window's end for a balance factor in 0 to 1: -1 for |f| < 1e-5, else `int((1 - f) * prompt_length)`."""
    if not 0.0 <= pd_balance_factor <= 1.0:
        raise RequestError(
            f"pd_balance_factor is {pd_balance_factor}; it must lie between 0 (the prefill engine does it all) "
            "and 1 (the decode engine does it all).",
            param="pd_balance_factor",
        )
    return -1 if pd_balance_factor < 1e-5 else int((1 - pd_balance_factor) * prompt_length)


def encode_kv_metadata(segments: list[int]) -> str:
    """`[count, position, length, ...]` as it travels: base64 of an 8-byte little-endian length and JSON text."""
    text = json.dumps(segments, separators=(",", ":")).encode()
    return base64.b64encode(len(text).to_bytes(8, "little") + text).decode()


def decode_kv_metadata(metadata: str) -> list[tuple[int, int]]:
    """The `(position, length)` segments of a `kv_append_metadata`; raises `RequestError` if it is not one."""
    try:
        raw = base64.b64decode(metadata, validate=True)
        text = raw[8:]
        if int.from_bytes(raw[:8], "little") != len(text):
            raise ValueError("wrong length")
        numbers = json.loads(text)
        if not numbers or not all(type(x) is int and x >= 0 for x in numbers):
            raise ValueError("not a list of numbers")
        segments = list(zip(numbers[1::2], numbers[2::2], strict=True))
        if len(segments) != numbers[0]:
            raise ValueError("wrong count")
    except (ValueError, TypeError, binascii.Error) as error:
        raise RequestError(
            "kv_addr_info is not the kv_append_metadata that prep_recv answered; pass that string on unchanged.",
            param="kv_addr_info",
        ) from error
    return segments
