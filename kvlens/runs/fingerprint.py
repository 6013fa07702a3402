"""Which model a run was made with: a hash of what was loaded, so that a changed file of the same name is noticed; and
which machine a figure was measured on, in words that name no host."""

from __future__ import annotations

import contextlib
import hashlib
import os
import platform
import threading
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.metaparts import OBJECT
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import located, ready, resolve

if TYPE_CHECKING:
    from kvlens.engine.models import LoadedModel


_NAMES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def ahead(name: str) -> threading.Thread:
    """Hashes the files of a model that lies ready in a folder, on a thread of its own while libraries are imported:
    `fingerprint` finds them done. A hub model is known by its revision, so nothing of it is hashed. What is wrong with
    a file is left to those who load it."""

    def work() -> None:
        with contextlib.suppress(UnsupportedModel, OSError):
            folder = None if located(name) is None else ready(name)
            if folder is not None:
                _of_folder(folder)

    thread = threading.Thread(target=work, name="kvlens-fingerprint", daemon=True)
    thread.start()
    return thread


def fingerprint(loaded: LoadedModel) -> str:
    """'sha256:...' over the weights, the config and the tokenizer's files of a folder; 'ORG/MODEL@revision' of a hub
    model; a hash of the weights in memory of a model object, and where there is neither."""
    if loaded.origin == OBJECT:
        return _in_memory(loaded)
    try:
        folder = Path(resolve(loaded.name))
    except UnsupportedModel:
        return _in_memory(loaded)
    if folder.is_dir():
        return _of_folder(folder)
    revision = getattr(loaded.model.config, "_commit_hash", None)
    return f"{loaded.name}@{revision}" if revision else _in_memory(loaded)


def file_stamp(name: str) -> str:
    """Return a hash of the names, sizes and times of a model's files, without reading them; '' for a model whose files
    are not in a folder."""
    try:
        folder = ready(name)
    except UnsupportedModel:
        return ""
    return "" if folder is None else hashlib.sha256(repr(_files_of(folder)).encode()).hexdigest()[:32]


def _of_folder(folder: Path) -> str:
    return _of_files(_files_of(folder))


def _files_of(folder: Path) -> tuple[tuple[str, int, int], ...]:
    """Return (path, bytes, time of change) of the files that decide what a model computes."""
    files = [*sorted(folder.glob("*.safetensors")), *(folder / name for name in _NAMES if (folder / name).is_file())]
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in files)


@lru_cache(maxsize=8)
def _of_files(files: tuple[tuple[str, int, int], ...]) -> str:
    """`files`: (path, bytes, time of change); the last two only make a changed file another entry of the cache."""
    whole = hashlib.sha256()
    for path, _, _ in files:
        with open(path, "rb") as file:
            whole.update(Path(path).name.encode() + hashlib.file_digest(file, "sha256").digest())
    return f"sha256:{whole.hexdigest()}"


def _in_memory(loaded: LoadedModel) -> str:
    import torch

    whole = hashlib.sha256()
    for name, tensor in sorted(loaded.model.state_dict().items()):
        whole.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}".encode())
        whole.update(tensor.detach().cpu().contiguous().view(torch.uint8).numpy().tobytes())
    return f"sha256:{whole.hexdigest()}"


def machine() -> dict[str, Any]:
    """Processor model, cores, system; torch's threads where torch is loaded, and the CUDA device where one was used."""
    import sys

    facts: dict[str, Any] = {
        "processor": _processor(),
        "cores": os.cpu_count(),
        "system": (f"{platform.system()} {platform.machine()}"),
    }
    if "torch" in sys.modules:
        torch = sys.modules["torch"]
        facts["threads"] = torch.get_num_threads()
        if torch.cuda.is_initialized():
            facts["device"] = torch.cuda.get_device_name()
    return facts


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    if info.is_file():
        for line in info.read_text().splitlines():
            if line.startswith("model name"):
                return line.partition(":")[2].strip()
    return platform.processor() or platform.machine()
