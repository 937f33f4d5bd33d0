from pathlib import Path

import pytest

from mlcrouter_nb.models.chat import ChatTemplate
from mlcrouter_nb.protocol.errors import ArgumentError, RequestError
from mlcrouter_nb.protocol.openai import ChatMessage

SIMPLE = "{{ bos_token }}{% for m in messages %}[{{ m.role }}] {{ m.content }}\n{% endfor %}>"


@pytest.mark.engine
def test_the_default_models_template(model_path: Path) -> None:
    template = ChatTemplate.from_file(model_path)
    assert template is not None
    assert template.render(
        [ChatMessage(role="system", content="Be brief."), ChatMessage(role="user", content="Hi")]
    ) == ("<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>user\nHi<|im_end|>\n<|im_start|>assistant\n")


def test_messages_become_text() -> None:
    template = ChatTemplate(SIMPLE, bos_token="<s>")
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    messages = [
        {"role": "developer", "content": "x"},
        {"role": "user", "content": parts},
        {"role": "assistant"},
    ]
    assert template.render(messages) == "<s>[system] x\n[user] ab\n[assistant] \n>"


def test_what_is_no_text_is_refused() -> None:
    with pytest.raises(RequestError, match="text only"):
        ChatTemplate(SIMPLE).render([{"role": "user", "content": [{"type": "image_url", "image_url": {}}]}])


def test_a_template_can_refuse() -> None:
    template = ChatTemplate("{{ raise_exception('roles must alternate') }}")
    with pytest.raises(RequestError, match="roles must alternate"):
        template.render([{"role": "user", "content": "Hi"}])


def test_a_template_runs_in_a_sandbox() -> None:
    with pytest.raises(RequestError):
        ChatTemplate("{{ ''.__class__.__mro__[1].__subclasses__() }}").render(
            [{"role": "user", "content": "Hi"}]
        )
    with pytest.raises(ArgumentError, match="chat template"):
        ChatTemplate("{% if %}")
