"""What the router needs to know of the model: its id, its tokenizer, its chat template, and where its file is."""

import asyncio
import importlib.util
import os
from dataclasses import dataclass
from pathlib import Path

from ..models.cache import cache_dir
from ..models.chat import ChatTemplate
from ..models.names import ALIASES, KNOWN, ModelFiles, resolve
from ..models.tokenizer import Tokenizer
from ..protocol.errors import ArgumentError
from ..protocol.progress import Progress
from ..router.prompts import Encoder, Template
from ..telemetry import Telemetry
from .bridge import in_thread
from .launchers.attach import AttachLauncher
from .launchers.base import Launcher
from .launchers.cpu import CpuLauncher, CpuOptions
from .options import Options


@dataclass(frozen=True)
class Model:
    """`id` is what `/v1/models` says (None: the engines know), `files` where it lies (None: with the engines)."""

    id: str | None
    files: ModelFiles | None
    tokenizer: Encoder | None
    chat: Template | None


class _Left(BaseException):
    """Whoever waited for a download has left; no way of fetching it shall go on."""


async def find_model(options: Options, telemetry: Telemetry) -> Model:
    """Fetch the model where that is needed, telling telemetry how far it is.

    Raises `ArgumentError` for an unknown model; of attached engines only the tokenizer is wanted, and may be missing."""
    if options.kind == "attach":
        return await _attached_model(options)
    if importlib.util.find_spec("tvm") is None:
        raise ArgumentError("The engine kind cpu needs the extra cpu: pip install 'mlcrouter_nb[cpu]'.")
    files = await _fetch(options, telemetry)
    tokenizer, chat = await in_thread(lambda: _read(options.tokenizer or str(files.path), str(files.path)))
    return Model(files.id, files, tokenizer, chat)


async def _attached_model(options: Options) -> Model:
    source = options.tokenizer or _file_at_hand(options.model)
    if source is None:
        return Model(None, None, None, None)
    tokenizer, chat = await in_thread(lambda: _read(source, source))
    return Model(None, None, tokenizer, chat)


def _file_at_hand(model: str) -> str | None:
    """The model's file if it is on this machine already: attaching fetches nothing."""
    known = KNOWN.get(ALIASES.get(model.lower(), model.lower()))
    path = cache_dir() / "models" / known.name if known is not None else Path(model).expanduser()
    return str(path) if path.is_file() and path.suffix == ".gguf" else None


def _read(tokenizer: str, template: str) -> tuple[Tokenizer, ChatTemplate | None]:
    """Half a second of work, done before the first request waits for it."""
    path = os.path.expanduser(tokenizer)
    return Tokenizer(path), ChatTemplate.from_file(template) if template.endswith(".gguf") else None


async def _fetch(options: Options, telemetry: Telemetry) -> ModelFiles:
    loop = asyncio.get_running_loop()
    left = False

    def progress(step: Progress) -> None:
        if left:
            raise _Left
        loop.call_soon_threadsafe(_tell, telemetry, options, step)

    try:
        return await in_thread(lambda: resolve(options.model, progress))
    finally:
        left = True


def make_launcher(options: Options, model: Model) -> Launcher:
    """The launcher of the chosen kind."""
    if model.files is None:
        return AttachLauncher()
    cpu = CpuOptions(
        model_path=model.files.path,
        model_id=model.files.id,
        threads=threads_per_engine(len(options.slots)),
        prefix_cache=options.prefix_cache,
    )
    return CpuLauncher(cpu, options.new_world())


def threads_per_engine(engines: int) -> int:
    """An even share of the cores: two threads in each of several engines on few cores fight."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    return max(1, cores // engines)


def _tell(telemetry: Telemetry, options: Options, step: Progress) -> None:
    for slot in options.slots:
        telemetry.emit(
            "engine_state",
            engine=slot.name,
            role=slot.role,
            state="starting",
            detail=str(step),
            progress=step.fraction,
        )
