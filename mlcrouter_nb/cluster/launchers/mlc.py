"""MLC-LLM's engines on GPUs: not in this version; says how to run them beside it meanwhile."""

import importlib.util

from ...protocol.errors import ArgumentError


def refuse() -> ArgumentError:
    """The sentence for `--engine mlc`."""
    if importlib.util.find_spec("mlc_llm") is None:
        return ArgumentError(
            "The engine kind mlc needs MLC-LLM, which is not on PyPI: install it as "
            "https://llm.mlc.ai/docs/install/mlc_llm.html says, in this environment or in another one that "
            "--mlc-python names; without a GPU use --engine cpu."
        )
    return ArgumentError(
        "This version cannot start MLC-LLM's engines itself yet: start them with `mlc_llm serve` and use "
        "--engine attach --endpoint-urls URL..., or use --engine cpu."
    )
