"""Which finished sequences are kept, and which of them begins like a new prompt.

A radix tree over pages: each edge is the tokens of one page, each node knows the sequences that run through it. The
pages themselves, shared or not, are the runner's: a match is forked from its sequence, so evicting that sequence
frees only pages that nobody else uses. Running requests are never touched."""

from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

Page = tuple[int, ...]


class SequenceOwner(Protocol):
    """What the cache needs of a `ModelRunner`."""

    page_size: int

    def remove_sequence(self, seq: int) -> None: ...


@dataclass
class _Node:
    children: dict[Page, "_Node"] = field(default_factory=dict)
    through: dict[int, None] = field(default_factory=dict)  # sequences, an ordered set
    tails: dict[int, Page] = field(default_factory=dict)  # sequences that end here, and their part of a page


class PrefixCache:
    """Finished sequences by their tokens, least recently used first."""

    def __init__(self, runner: SequenceOwner) -> None:
        self._runner = runner
        self._root = _Node()
        self._tokens: OrderedDict[int, tuple[int, ...]] = OrderedDict()

    def __len__(self) -> int:
        return len(self._tokens)

    def match(self, tokens: Sequence[int], limit: int) -> tuple[int, int]:
        """`(sequence, length)` of the longest common beginning with a kept sequence, `length` at most `limit`.

        `(-1, 0)` where nothing matches. The match counts as a use."""
        node, depth = self._root, 0
        size = self._runner.page_size
        while child := node.children.get(tuple(tokens[depth : depth + size])):
            node, depth = child, depth + size
        rest = tuple(tokens[depth : depth + size])
        seq, length = next(reversed(node.through), -1), depth
        within = [(next(reversed(child.through)), page) for page, child in node.children.items()]
        for candidate, page in [*within, *node.tails.items()]:
            if depth + (common := _common(page, rest)) > length:
                seq, length = candidate, depth + common
        length = min(length, limit)
        if length <= 0 or seq < 0:
            return -1, 0
        self._tokens.move_to_end(seq)
        return seq, length

    def insert(self, seq: int, tokens: Sequence[int]) -> None:
        """Keep `seq`, which holds KV of exactly `tokens`. What a longer sequence covers is not kept twice."""
        _, covered = self.match(tokens, len(tokens))
        if covered == len(tokens):
            self._runner.remove_sequence(seq)
            return
        node, depth, size = self._root, 0, self._runner.page_size
        redundant: list[int] = []
        while True:
            rest = tuple(tokens[depth : depth + size])
            redundant += [other for other, tail in node.tails.items() if rest[: len(tail)] == tail]
            if depth:
                node.through[seq] = None
            if len(rest) < size:
                node.tails[seq] = rest
                break
            node, depth = node.children.setdefault(rest, _Node()), depth + size
        self._tokens[seq] = tuple(tokens)
        for other in redundant:
            self._remove(other)

    def evict(self) -> bool:
        """Let the least recently used sequence go; False where none is left."""
        if not self._tokens:
            return False
        self._remove(next(iter(self._tokens)))
        return True

    def _remove(self, seq: int) -> None:
        tokens, size = self._tokens.pop(seq), self._runner.page_size
        path = [self._root]
        for start in range(0, len(tokens) - size + 1, size):
            path.append(path[-1].children[tokens[start : start + size]])
        path[-1].tails.pop(seq)
        for depth in range(len(path) - 1, 0, -1):
            path[depth].through.pop(seq)
            if not path[depth].through:
                del path[depth - 1].children[tokens[(depth - 1) * size : depth * size]]
        self._runner.remove_sequence(seq)


def _common(a: Page, b: Page) -> int:
    length = 0
    for x, y in zip(a, b, strict=False):
        if x != y:
            break
        length += 1
    return length
