import json
import random
import threading
import time
from pathlib import Path

import pytest
from tokenizers import Tokenizer as Reference
from tokenizers import models

from mlcrouter_nb.models.tokenizer import Tokenizer
from mlcrouter_nb.protocol.errors import ArgumentError

TEXT = "Hi 🙂🙂, große 日本 12345 it's\r\n\tfine…  end"


@pytest.fixture(scope="module")
def tokenizer(model_path: Path) -> Tokenizer:
    return Tokenizer(model_path)


@pytest.mark.engine
def test_text_comes_back(tokenizer: Tokenizer) -> None:
    assert tokenizer.decode(tokenizer.encode(TEXT)) == TEXT
    assert tokenizer.encode("") == [] and tokenizer.decode([]) == ""
    assert tokenizer.vocab_size == 49152
    assert tokenizer.eos_ids == (0, 2)


@pytest.mark.engine
def test_known_ids(tokenizer: Tokenizer) -> None:
    """Source: the model's own tokenizer.json, run by transformers."""
    prompt = "<|im_start|>user\nWhat is the capital of France?<|im_end|>\n"
    assert tokenizer.encode(prompt) == [1, 4093, 198, 1780, 314, 260, 3575, 282, 4649, 47, 2, 198]


@pytest.mark.engine
def test_special_tokens_only_where_asked_for(tokenizer: Tokenizer) -> None:
    assert tokenizer.encode("<|im_end|>") == [2]
    plain = tokenizer.encode("<|im_end|>", special=False)
    assert 2 not in plain
    assert tokenizer.decode(plain) == "<|im_end|>"
    assert tokenizer.encode("<|im_end|>") == [2], "the other kind of call leaves no trace"
    assert tokenizer.decode([2]) == ""


@pytest.mark.engine
def test_a_stream_adds_up_and_never_cuts_a_character(tokenizer: Tokenizer) -> None:
    chance = random.Random(1)
    for ids in [tokenizer.encode(TEXT)] + [[chance.randrange(49152) for _ in range(40)] for _ in range(50)]:
        stream = tokenizer.stream_decoder()
        pieces = [stream.push(id) for id in ids]
        assert "".join(pieces) + stream.flush() == tokenizer.decode(ids)
    stream = tokenizer.stream_decoder()
    assert all("\ufffd" not in stream.push(id) for id in tokenizer.encode("🙂日本🙂"))
    assert stream.flush() == ""
    stream.push(tokenizer.encode("🙂")[0])
    assert stream.flush() == "\ufffd", "half a character at the very end"


@pytest.mark.engine
def test_a_long_text_is_encoded_as_a_short_one_while_others_run(tokenizer: Tokenizer) -> None:
    text = TEXT * (300_000 // len(TEXT))
    last, longest, ended = time.perf_counter(), 0.0, threading.Event()
    ids: list[int] = []

    def encode() -> None:
        ids.extend(tokenizer.encode(text))
        ended.set()

    began = time.perf_counter()
    thread = threading.Thread(target=encode)
    thread.start()
    while not ended.wait(0.002):
        now = time.perf_counter()
        last, longest = now, max(longest, now - last)
    thread.join()
    assert longest < (time.perf_counter() - began) / 2
    assert ids == tokenizer._source.encode(text, add_special_tokens=False).ids
    assert 0 < tokenizer.fewest_tokens(text) <= len(ids)
    assert tokenizer.fewest_tokens(" " * 1000) <= len(tokenizer.encode(" " * 1000))


@pytest.mark.engine
def test_a_tokenizer_json_is_the_same(tokenizer: Tokenizer, tmp_path: Path) -> None:
    tokenizer._source.save(str(tmp_path / "tokenizer.json"))
    for path in (tmp_path, tmp_path / "tokenizer.json"):
        other = Tokenizer(path)
        assert other.encode(TEXT) == tokenizer.encode(TEXT)
        assert other.decode(other.encode(TEXT)) == TEXT
        assert other.eos_ids == tokenizer.eos_ids


def test_pieces_that_are_not_bytes(tmp_path: Path) -> None:
    vocab = {"<unk>": 0, "▁Hi": 1, "▁there": 2, "!": 3}
    reference = Reference(models.WordLevel(vocab, unk_token="<unk>"))
    description = json.loads(reference.to_str())
    description["decoder"] = {
        "type": "Metaspace",
        "replacement": "▁",
        "prepend_scheme": "always",
        "split": True,
    }
    (tmp_path / "tokenizer.json").write_text(json.dumps(description))
    tokenizer = Tokenizer(tmp_path)
    assert tokenizer.decode([1, 2, 3]) == "Hi there!"


def test_other_files_are_refused(tmp_path: Path) -> None:
    with pytest.raises(ArgumentError, match="no tokenizer at"):
        Tokenizer(tmp_path / "tokenizer.json")
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(ArgumentError, match="is no tokenizer"):
        Tokenizer(tmp_path)
