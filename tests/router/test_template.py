import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from mlcrouter_nb.router.chunks import Chunk
from mlcrouter_nb.router.template import Template

CHOICE = {"index": 0, "logprobs": None, "finish_reason": None}


def completion(text: str, **more) -> dict:
    return {"id": "c-1", "model": 'the "text":"model"', "choices": [{**CHOICE, "text": text, **more}]}


def chat(text: str, **more) -> dict:
    return {"id": "c-1", "choices": [{**CHOICE, "delta": {"content": text}, **more}]}


def raw(event: dict, ascii: bool = True) -> bytes:
    return json.dumps(event, ensure_ascii=ascii).encode()


@pytest.mark.parametrize("make", [completion, chat])
@given(st.text(min_size=1), st.text(), st.booleans())
def test_a_plain_event_is_read_without_parsing_and_read_right(make, first, text, ascii):
    template = Template()
    template.learn(Chunk(raw(make(first), ascii)))
    event = raw(make(text), ascii)
    plain = template.text(event)
    if plain is not None:
        assert Chunk(event, None, plain).text == text
    elif text and '"' not in first:
        assert '"' in text or not template._prefix


@pytest.mark.parametrize("make", [completion, chat])
def test_the_usual_ones_are_plain(make):
    template = Template()
    template.learn(Chunk(raw(make(" is"))))
    assert template.text(raw(make(" blue"))) == b" blue"
    assert template.text(raw(make("\n"))) == b"\\n"


@pytest.mark.parametrize(
    "other",
    [
        completion(""),
        completion("x", finish_reason="length"),
        completion("x", finish_reason="preempt"),
        completion("x", index=1),
        completion("x", logprobs={"tokens": ["x"]}),
        completion("x", token_ids=[1]),
        {**completion("x"), "usage": {"prompt_tokens": 1}},
        {**completion("x"), "error": {"message": "y"}},
        {**completion("x"), "choices": []},
        {**completion("x"), "id": "c-2"},
        {"error": {"message": "y"}},
    ],
)
def test_everything_else_is_not(other):
    template = Template()
    template.learn(Chunk(raw(completion(" is"))))
    assert template.text(raw(completion(" blue"))) is not None
    assert template.text(raw(other)) is None
    learner = Template()
    learner.learn(Chunk(raw(other)))
    if other.get("id") != "c-2":
        assert learner.text(raw(other)) is None


def test_nonsense_teaches_nothing():
    template = Template()
    for nonsense in (b"", b"nonsense", b"[]", b"{}", b'{"choices": 7}', b'{"choices": [7]}'):
        template.learn(Chunk(nonsense))
        assert template.text(nonsense) is None


def test_an_edited_chunk_is_plain_no_more():
    template = Template()
    template.learn(Chunk(raw(completion(" is"))))
    event = raw(completion("blue"))
    chunk = Chunk(event, None, template.text(event))
    assert (chunk.finish_reason, chunk.usage, chunk.edited, chunk.payload()) == (None, None, False, event)
    chunk.text = chunk.text.upper()
    assert (chunk.text, chunk.engine_text, chunk.plain, chunk.edited) == ("BLUE", "blue", None, True)
    assert json.loads(chunk.payload()) == completion("BLUE")
