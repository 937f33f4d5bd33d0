"""Whether reserved KV was written by a peer. One-sided writes tell nobody, so reserved slots hold a mark until then.

Without this a start_generate that comes before its remote_send would answer nonsense, and the prefix cache would
hand that nonsense to later requests."""

from collections.abc import Sequence

import numpy as np


class Arrivals:
    """Marks in the last layer's pages `[pages, 2, KV heads, page size, head_dim]`, which a peer writes last.

    `segments` is the wire list `[count, slot, length, ...]`. The mark is a NaN in the value's first number; it is
    taken away before anything computes with the slot."""

    def __init__(self, last_layer: np.ndarray) -> None:
        self._marks = last_layer[:, 1, 0, :, 0]

    def expect(self, segments: Sequence[int]) -> None:
        """Nothing has come yet."""
        self._marks[self._at(segments)] = np.nan

    def missing(self, segments: Sequence[int], first: int) -> int:
        """How many of the first `first` slots were not written yet."""
        return int(np.isnan(self._marks[self._at(segments)][:first]).sum())

    def forget(self, segments: Sequence[int]) -> None:
        """Nothing is expected any more."""
        at = self._at(segments)
        self._marks[at] = np.nan_to_num(self._marks[at], nan=0.0)

    def _at(self, segments: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        runs = zip(segments[1::2], segments[2::2], strict=True)
        slots = np.concatenate(
            [np.empty(0, np.int64), *(np.arange(slot, slot + length) for slot, length in runs)]
        )
        return slots // self._marks.shape[1], slots % self._marks.shape[1]
