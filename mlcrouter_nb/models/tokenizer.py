"""Text to token ids and back, from a GGUF file's metadata or a `tokenizer.json`."""

import codecs
import json
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any, Protocol

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, pre_tokenizers

from ..protocol.errors import ArgumentError
from .gguf import END_OF_TURN, eos_ids, read_metadata

LONG_TEXT = 20_000  # characters, from which encoding would hold up an event loop
_CONTROL, _USER_DEFINED = 3, 4

# How the text is cut before byte pair encoding, by `tokenizer.ggml.pre`.
# Source: https://github.com/ggml-org/llama.cpp/blob/master/src/llama-vocab.cpp
_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
_BYTES_AND_WORDS = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)


def _cut_by(pattern: str) -> pre_tokenizers.PreTokenizer:
    return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(pattern), "isolated"), _BYTES])


_PRE_TOKENIZERS = {
    "smollm": pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), _BYTES_AND_WORDS]),
    "gpt-2": _BYTES_AND_WORDS,
    "llama-bpe": _cut_by(_LLAMA3),
    "qwen2": _cut_by(_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")),
}


class StreamDecoder(Protocol):
    """Turns a stream of ids into text, never half a character."""

    @property
    def pending(self) -> bool:
        """Whether half a character waits for more ids."""
        ...

    def push(self, id: int) -> str: ...
    def flush(self) -> str: ...


class Tokenizer:
    """A model's tokenizer. `path` is a .gguf file, a `tokenizer.json`, or a folder that holds one.

    Raises `ArgumentError` where the file has none, or one of a kind that is not known."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        if self.path.is_dir():
            self.path = self.path / "tokenizer.json"
        self._bos: int | None = None
        if self.path.suffix == ".gguf":
            metadata = read_metadata(self.path)
            self._source = _from_gguf(metadata, self.path)
            self.eos_ids = eos_ids(metadata)
            if metadata.get("tokenizer.ggml.add_bos_token"):
                self._bos = metadata.get("tokenizer.ggml.bos_token_id")
        else:
            self._source = _from_json(self.path)
            added = self._source.get_added_tokens_decoder()
            self.eos_ids = tuple(sorted(i for i, token in added.items() if token.content in END_OF_TURN))

    @property
    def vocab_size(self) -> int:
        """Number of ids, special ones included."""
        return self._source.get_vocab_size(with_added_tokens=True)

    def encode(self, text: str, *, special: bool = True) -> list[int]:
        """The ids of `text`; with `special` the texts of special tokens (`<|im_end|>`) become these tokens."""
        source = self._source if special else self._plain
        if len(text) < LONG_TEXT:
            ids = source.encode(text, add_special_tokens=False).ids
        else:  # in a batch: it lets other threads run meanwhile
            ids = source.encode_batch([text], add_special_tokens=False)[0].ids
        if special and self._bos is not None and ids[:1] != [self._bos]:
            ids.insert(0, self._bos)
        return ids

    def fewest_tokens(self, text: str) -> int:
        """A number of tokens that `text` has at least, told without encoding it; 0 where nothing is known."""
        return len(text) // self._longest if self._longest else 0

    def decode(self, ids: Sequence[int]) -> str:
        """The text of `ids`, without special tokens; bytes that are no UTF-8 become U+FFFD."""
        decoder = self.stream_decoder()
        return "".join([decoder.push(id) for id in ids]) + decoder.flush()

    def stream_decoder(self) -> StreamDecoder:
        """A fresh decoder for one stream: what it gave in pieces adds up to what `decode` gives at once."""
        if self._token_bytes is None:
            return _GenericDecoder(self._source)
        return _ByteDecoder(self._token_bytes)

    @cached_property
    def _plain(self) -> tokenizers.Tokenizer:
        """The same tokenizer, blind to special tokens."""
        plain = tokenizers.Tokenizer.from_str(self._source.to_str())
        plain.encode_special_tokens = True
        return plain

    @cached_property
    def _longest(self) -> int:
        """Bytes, and so characters at most, of the longest token; 0 where a normalizer may shorten the text."""
        if self._token_bytes is None or self._source.normalizer is not None:
            return 0
        added = [len(token.content) for token in self._source.get_added_tokens_decoder().values()]
        return max([*map(len, self._token_bytes), *added])

    @cached_property
    def _token_bytes(self) -> list[bytes] | None:
        """Each id's bytes, b"" for special tokens; None for tokenizers that are not byte-level."""
        if "ByteLevel" not in json.dumps(json.loads(self._source.to_str())["decoder"]):
            return None
        special = {i for i, token in self._source.get_added_tokens_decoder().items() if token.special}
        added = set(self._source.get_added_tokens_decoder())
        byte_of = _byte_of_character()
        table = [b""] * self.vocab_size
        for text, id in self._source.get_vocab(with_added_tokens=True).items():
            if id in special or id >= len(table):
                continue
            table[id] = text.encode() if id in added else bytes(byte_of[c] for c in text if c in byte_of)
        return table


class _ByteDecoder:
    """Bytes of tokens through an incremental UTF-8 decoder."""

    def __init__(self, token_bytes: list[bytes]) -> None:
        self._token_bytes = token_bytes
        self._utf8 = codecs.getincrementaldecoder("utf-8")("replace")

    @property
    def pending(self) -> bool:
        return bool(self._utf8.getstate()[0])

    def push(self, id: int) -> str:
        return self._utf8.decode(self._token_bytes[id] if id < len(self._token_bytes) else b"")

    def flush(self) -> str:
        return self._utf8.decode(b"", final=True)


class _GenericDecoder:
    """For tokenizers whose pieces are not bytes (SentencePiece)."""

    def __init__(self, source: tokenizers.Tokenizer) -> None:
        self._source = source
        self._stream = decoders.DecodeStream(skip_special_tokens=True)
        self.pending = False

    def push(self, id: int) -> str:
        text = self._stream.step(self._source, id)
        self.pending = text is None
        return text or ""

    def flush(self) -> str:
        return ""


def _byte_of_character() -> dict[str, int]:
    """GPT-2's printable stand-ins for bytes: printable Latin-1 stands for itself, the rest begins at U+0100."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(256) if byte not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}


def _from_gguf(metadata: dict[str, Any], path: Path) -> tokenizers.Tokenizer:
    kind, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre", "gpt-2")
    if kind != "gpt2" or pre not in _PRE_TOKENIZERS:
        known = ", ".join(_PRE_TOKENIZERS)
        raise ArgumentError(f"{path} has a tokenizer of kind {kind}/{pre}; known are gpt2 with {known}.")
    texts: list[str] = metadata["tokenizer.ggml.tokens"]
    types: list[int] = metadata["tokenizer.ggml.token_type"]
    merges: list[Any] = [tuple(pair.split(" ")) for pair in metadata["tokenizer.ggml.merges"]]
    source = tokenizers.Tokenizer(models.BPE(vocab={text: i for i, text in enumerate(texts)}, merges=merges))
    source.pre_tokenizer = _PRE_TOKENIZERS[pre]
    source.decoder = decoders.ByteLevel()
    special = [text for text, type in zip(texts, types, strict=True) if type == _CONTROL]
    source.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in special])
    plain = [text for text, type in zip(texts, types, strict=True) if type == _USER_DEFINED]
    source.add_tokens([AddedToken(text, normalized=False) for text in plain])
    return source


def _from_json(path: Path) -> tokenizers.Tokenizer:
    if not path.is_file():
        raise ArgumentError(f"There is no tokenizer at {path}; pass a tokenizer.json or a .gguf file.")
    try:
        return tokenizers.Tokenizer.from_file(str(path))
    except Exception as error:  # tokenizers raises bare Exceptions
        raise ArgumentError(f"{path} is no tokenizer ({error}).") from error
