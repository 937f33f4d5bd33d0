"""`1P2D`: how many engines there are, and who prefills and who decodes."""

import re
from dataclasses import dataclass
from typing import Literal

from ..protocol.errors import ArgumentError

Role = Literal["prefill", "decode"]
MOST_ENGINES = 64


@dataclass(frozen=True)
class Slot:
    """A place for an engine: its name (P0, D1, E0) and its role, None when it does both."""

    name: str
    role: Role | None


def parse_roles(roles: str | int) -> list[Slot]:
    """The engines of `xPyD` (P0.. then D(x)..) or of a number N (E0.., without roles).

    Raises `ArgumentError` for anything else."""
    text = str(roles).strip()
    pair = re.fullmatch(r"(\d{1,4})[Pp](\d{1,4})[Dd]", text)
    if pair:
        prefill, decode = int(pair[1]), int(pair[2])
        if prefill == 0 or decode == 0:
            raise ArgumentError(
                f"roles {text!r} lacks {'a prefill' if prefill == 0 else 'a decode'} engine: write 1P1D or more, "
                "or a number such as 1 for engines that do both."
            )
        slots = [Slot(f"P{i}", "prefill") for i in range(prefill)]
        slots += [Slot(f"D{i}", "decode") for i in range(prefill, prefill + decode)]
    elif re.fullmatch(r"\d{1,4}", text) and int(text) > 0:
        slots = [Slot(f"E{i}", None) for i in range(int(text))]
    else:
        raise ArgumentError(
            f"roles {text!r} is not understood: write xPyD, for example 1P2D for one prefill and two decode engines, "
            "or a number such as 2 for engines that do both."
        )
    if len(slots) > MOST_ENGINES:
        raise ArgumentError(f"roles {text!r} asks for {len(slots)} engines; {MOST_ENGINES} is the most.")
    return slots


def roles_for(count: int, *, disaggregated: bool) -> str:
    """The roles of `count` engines that were listed without any: MLC's router takes the first for prefill."""
    return f"1P{count - 1}D" if disaggregated and count > 1 else str(count)
