from pathlib import Path

import pytest

from mlcrouter_nb.models.cache import cache_dir, log_dir
from mlcrouter_nb.models.names import resolve
from mlcrouter_nb.protocol.errors import ArgumentError


@pytest.mark.engine
@pytest.mark.parametrize(
    "name", ["smollm2-135m", "SmolLM2-135M-Instruct", "HuggingFaceTB/SmolLM2-135M-Instruct"]
)
def test_the_default_model_has_one_id(name: str, model_path: Path) -> None:
    files = resolve(name)
    assert (files.id, files.path) == ("smollm2-135m", model_path)


def test_the_authors_advice_holds_by_name_and_by_path(model_path: Path) -> None:
    for files in (resolve("smollm2-135m"), resolve(str(model_path))):
        assert (files.temperature, files.top_p) == (0.2, 0.9)


def test_a_gguf_file_is_its_own_name(tmp_path: Path) -> None:
    path = tmp_path / "My-Model.Q4_1.gguf"
    path.touch()
    files = resolve(str(path))
    assert (files.id, files.temperature, files.top_p) == ("My-Model.Q4_1", 1.0, 1.0)


@pytest.mark.parametrize("name", ["nobody/knows-this", "", "HF://a/b", "/", "absent.gguf", "a\x00b"])
def test_anything_else_lists_what_there_is(name: str) -> None:
    with pytest.raises(ArgumentError, match=r"smollm2-135m and paths to \.gguf"):
        resolve(name)


def test_the_cache_folder_can_be_chosen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("MLCROUTER_CACHE", raising=False)
    assert cache_dir() == tmp_path / "xdg" / "mlcrouter_nb"
    monkeypatch.setenv("MLCROUTER_CACHE", str(tmp_path / "own"))
    assert log_dir() == tmp_path / "own" / "logs"
    assert log_dir().is_dir()
    (tmp_path / "file").touch()
    monkeypatch.setenv("MLCROUTER_CACHE", str(tmp_path / "file"))
    with pytest.raises(ArgumentError, match="MLCROUTER_CACHE"):
        log_dir()
