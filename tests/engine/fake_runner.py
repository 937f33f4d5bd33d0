"""A stand-in for ModelRunner: its logits depend on nothing but the tokens whose KV is truly in its pages."""

from collections import Counter
from hashlib import blake2b

import numpy as np

VOCAB = 97


class Page:
    def __init__(self, index: int, cells: list[int | None]) -> None:
        self.index, self.cells, self.users = index, cells, 1


class FakeRunner:
    page_size = 4
    prefill_chunk_size = 16
    kv_bytes_per_token = 1

    def __init__(
        self, num_pages: int = 64, *, world: dict[int, "FakeRunner"] | None = None, rank: int = 0
    ) -> None:
        self.num_pages = num_pages
        self.pages: dict[int, Page] = {}  # by index
        self.sequences: dict[int, list[Page]] = {}
        self.sends: dict[int, tuple[int, list[int], int]] = {}
        self.bytes_put: Counter[int] = Counter()
        self.batches: list[list[int]] = []  # token counts of each forward pass
        self.fail_next: Exception | None = None
        self.received_pages = np.zeros((num_pages, 2, 1, self.page_size, 1), np.float32)
        self.world = {} if world is None else world
        self.world[rank] = self

    def free_pages(self) -> int:
        return self.num_pages - len(self.pages)

    def add_sequence(self, seq: int) -> None:
        assert seq not in self.sequences
        self.sequences[seq] = []

    def remove_sequence(self, seq: int) -> None:
        for page in self.sequences.pop(seq):
            self._drop(page)
        self.sends.pop(seq, None)

    def fork_sequence(self, parent: int, child: int, length: int) -> None:
        assert child not in self.sequences and length <= self.sequence_length(parent)
        whole, rest = divmod(length, self.page_size)
        shared = self.sequences[parent][:whole]
        for page in shared:
            page.users += 1
        self.sequences[child] = shared
        if rest:
            copied = self.sequences[parent][whole].cells[:rest]
            self.sequences[child] = [*shared, self._new_page(copied)]

    def popn(self, seq: int, n: int) -> None:
        length = self.sequence_length(seq) - n
        assert length >= 0
        pages = self.sequences[seq]
        while len(pages) * self.page_size >= length + self.page_size:
            self._drop(pages.pop())
        if rest := length % self.page_size:
            last = pages.pop()
            cells = last.cells[:rest]
            self._drop(last)
            pages.append(self._new_page(cells))

    def sequence_length(self, seq: int) -> int:
        return sum(len(page.cells) for page in self.sequences[seq])

    def history(self, seq: int) -> list[int | None]:
        return [cell for page in self.sequences[seq] for cell in page.cells]

    def forward(self, batch: list[tuple[int, list[int]]]) -> np.ndarray:
        assert batch and sum(len(tokens) for _, tokens in batch) <= self.prefill_chunk_size
        assert all(tokens for _, tokens in batch) and len({seq for seq, _ in batch}) == len(batch)
        self.batches.append([len(tokens) for _, tokens in batch])
        if self.fail_next is not None:
            error, self.fail_next = self.fail_next, None
            raise error
        rows = []
        for seq, tokens in batch:
            start = self.sequence_length(seq)
            for token in tokens:
                self._append(seq, token)
            self._transfer(seq, start)
            assert not np.isnan([self.received_pages[page.index] for page in self.sequences[seq]]).any()
            rows.append(logits_of(self.history(seq)))
        return np.stack(rows)

    def prepare_recv(self, seq: int, n: int) -> list[int]:
        assert n > 0
        slots = [self._append(seq, None) for _ in range(n)]
        segments: list[int] = [0]
        for i, slot in enumerate(slots):
            if i and slot == slots[i - 1] + 1:
                segments[-1] += 1
            else:
                segments += [slot, 1]
                segments[0] += 1
        return segments

    def mark_send(self, seq: int, begin: int, segments: list[int], recv_rank: int) -> None:
        pairs = zip(segments[1::2], segments[2::2], strict=True)
        slots = [slot for first, length in pairs for slot in range(first, first + length)]
        assert begin <= self.sequence_length(seq), "prefill up to the window first"
        assert len(slots) > self.sequence_length(seq) - begin, "at least one token must be left to prefill"
        self.sends[seq] = (begin, slots, recv_rank)

    def close(self) -> None:
        pass

    def _transfer(self, seq: int, start: int) -> None:
        if seq not in self.sends:
            return
        begin, slots, rank = self.sends[seq]
        peer, history = self.world[rank], self.history(seq)
        for position in range(begin, len(history)):
            slot = slots[position - begin]
            page, row = divmod(slot, self.page_size)
            peer.pages[page].cells[row] = history[position]
            peer.received_pages[page, 1, 0, row, 0] = 1.0
        self.bytes_put[rank] += len(history) - (start if start > begin and rank in self.bytes_put else begin)

    def _append(self, seq: int, token: int | None) -> int:
        pages = self.sequences[seq]
        if not pages or len(pages[-1].cells) == self.page_size:
            pages.append(self._new_page([]))
        pages[-1].cells.append(token)
        return pages[-1].index * self.page_size + len(pages[-1].cells) - 1

    def _new_page(self, cells: list[int | None]) -> Page:
        free = next((i for i in range(self.num_pages) if i not in self.pages), None)
        if free is None:
            raise RuntimeError("the cache is full")
        self.pages[free] = Page(free, list(cells))
        return self.pages[free]

    def _drop(self, page: Page) -> None:
        page.users -= 1
        if not page.users:
            del self.pages[page.index]


def logits_of(history: list[int | None]) -> np.ndarray:
    digest = blake2b(repr(history).encode(), digest_size=8).digest()
    return (
        np.random.default_rng(int.from_bytes(digest, "little")).standard_normal(VOCAB).astype(np.float32) * 3
    )


def greedy_answer(prompt: list[int], count: int) -> list[int]:
    """What a single engine without any cache would say."""
    tokens = list(prompt)
    for _ in range(count):
        tokens.append(int(logits_of(list(tokens)).argmax()))
    return tokens[len(prompt) :]
