"""Validation of OpenAI bodies."""

import json

import pytest

from mlcrouter_nb.protocol.errors import RequestError
from mlcrouter_nb.protocol.openai import ChatCompletionRequest, CompletionRequest, misspelt, parse_body


def completion(**fields: object) -> CompletionRequest:
    return parse_body(CompletionRequest, json.dumps({"prompt": "Hi", **fields}).encode())


@pytest.mark.parametrize("prompt", ["text", [1, 2, 3], ["a", "b"], [[1, 2], [3]]])
def test_prompts_of_every_form(prompt: object) -> None:
    assert completion(prompt=prompt).prompt == prompt


def test_unknown_fields_travel_on() -> None:
    assert completion(guided_json={"a": 1}).model_dump()["guided_json"] == {"a": 1}


@pytest.mark.parametrize(
    ("field", "value"),
    [("temperature", 9), ("max_tokens", 0), ("max_tokens", -1), ("top_p", 0), ("prompt", [-1]), ("n", 0)],
)
def test_a_bad_field_is_named(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        completion(**{field: value})
    assert caught.value.status == 400
    assert caught.value.body()["error"]["param"] == field


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b"\xff"])
def test_a_malformed_body_is_refused(body: bytes) -> None:
    with pytest.raises(RequestError):
        parse_body(CompletionRequest, body)


def test_a_chat_needs_a_message() -> None:
    with pytest.raises(RequestError, match="messages"):
        parse_body(ChatCompletionRequest, b'{"messages": []}')


@pytest.mark.parametrize(
    ("field", "meant"),
    [
        ("max_token", "max_tokens"),
        ("maxtokens", "max_tokens"),
        ("temprature", "temperature"),
        ("top_P", "top_p"),
        ("stops", "stop"),
        ("min_tokens", None),
        ("min_p", None),
        ("prompt_logprobs", None),
        ("best_of", None),
        ("chat_template_kwargs", None),
    ],
)
def test_slips_are_told_from_fields_that_only_engines_know(field, meant):
    assert misspelt(["prompt", field]) == (None if meant is None else (field, meant))
