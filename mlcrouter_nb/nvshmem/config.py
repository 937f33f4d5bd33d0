"""Which world of engines this process belongs to."""

import json
import os
from collections.abc import Mapping
from dataclasses import dataclass

VARIABLE = "MLC_NVSHMEM_INIT_CONFIG_JSON_STR"


@dataclass(frozen=True)
class NvshmemConfig:
    """A world of `npes` processing elements (PEs) named by `uid`; this process is number `pe_start`."""

    uid: list[int]
    npes: int
    pe_start: int

    def __post_init__(self) -> None:
        if not 0 <= self.pe_start < self.npes:
            raise ValueError(
                f"PE {self.pe_start} is not one of a world of {self.npes} (0 to {self.npes - 1})."
            )

    @classmethod
    def from_env(cls, environment: Mapping[str, str] = os.environ) -> "NvshmemConfig | None":
        """What `MLC_NVSHMEM_INIT_CONFIG_JSON_STR` says, `{"uid": [...], "npes": N, "pe_start": k}`; None if unset.

        Raises `ValueError` for anything else in it."""
        text = environment.get(VARIABLE)
        if not text:
            return None
        try:
            value = json.loads(text)
            uid = [int(x) for x in value["uid"]]
            return cls(uid, int(value["npes"]), int(value["pe_start"]))
        except (ValueError, TypeError, KeyError) as error:
            raise ValueError(
                f'{VARIABLE} must be {{"uid": [numbers], "npes": N, "pe_start": k}} ({error!r}).'
            ) from error
