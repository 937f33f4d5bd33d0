"""Fixtures that several rooms share."""

from pathlib import Path

import pytest


@pytest.fixture(scope="session")
def model_path() -> Path:
    """The default model's GGUF file, fetched on first use."""
    from mlcrouter_nb.models.names import resolve

    return resolve("smollm2-135m").path
