"""What `kvlens models` shows: every model that has a name here, what it is and whether it is ready."""

from __future__ import annotations

import re
import shutil
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from kvlens.files import cache_dir, load_json
from kvlens.models.cache import write_json
from kvlens.models.convert import PROVENANCE
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import DEMO, HUB_ID, SMOLLM2, SMOLLM2_ABOUT, added, hub_name, located, ready, smollm2_file

TOY = "a toy made here for tests and for seeing the instrument work; no evidence about methods"
NAME = re.compile(r"[A-Za-z0-9][\w.-]{0,63}")


@dataclass(frozen=True)
class ModelEntry:
    """A model by name. None: not known before it is fetched or converted."""

    name: str
    title: str
    source: str
    """where its files are, or which package or hub id they come from"""
    toy: bool = False
    ready: bool = False
    """it can be loaded without converting or fetching anything"""
    problem: str | None = None
    """why it cannot be loaded"""
    family: str | None = None
    layers: int | None = None
    q_heads: int | None = None
    kv_heads: int | None = None
    head_dim: int | None = None
    vocabulary: int | None = None
    context: int | None = None
    """tokens at most"""
    licence: str | None = None
    bytes: int | None = None
    """of the weights on disk, as they lie there"""
    calibrations: list[str] = field(default_factory=list)
    """methods that have what they must know of this model"""

    def as_json(self) -> dict[str, Any]:
        return asdict(self)

    @property
    def shape(self) -> str:
        """In words."""
        if self.layers is None:
            return ""
        return f"{self.layers} layers, {self.q_heads} query / {self.kv_heads} KV heads of {self.head_dim}"


def names() -> list[str]:
    """Every model with a name here; the one that is run by default first."""
    real = [SMOLLM2] if smollm2_file() is not None else []
    return [*real, *sorted(set(added()) - {DEMO, SMOLLM2}), DEMO]


def entries() -> list[ModelEntry]:
    """One entry per name; a broken one says its problem."""
    return [entry(name) for name in names()]


def label(name: str) -> str:
    """The name as it is offered: the toy says that it is one."""
    return f"{name} (a toy, for tests)" if name == DEMO else name


def entry(name: str) -> ModelEntry:
    """Raises UnsupportedModel for a name that stands for nothing; a model that is there and broken says its problem."""
    base = _describe_known(name)
    try:
        path, folder = located(name), ready(name)
    except UnsupportedModel as error:
        if name not in names():
            raise
        return ModelEntry(**base, source=added().get(name, name), problem=str(error))
    source = base.pop("source", None) or (str(path) if path is not None else f"hub: {hub_name(name)}")
    try:
        config = _config(path, folder)
    except UnsupportedModel as error:
        return ModelEntry(**base, source=source, problem=str(error))
    about = _json(folder / PROVENANCE) if folder is not None else {}
    heads = config.get("num_attention_heads") or config.get("n_head")
    width = config.get("hidden_size") or config.get("n_embd")
    facts: dict[str, Any] = {
        "family": config.get("model_type"),
        "layers": config.get("num_hidden_layers") or config.get("n_layer"),
        "q_heads": heads,
        "kv_heads": config.get("num_key_value_heads") or heads,
        "head_dim": config.get("head_dim") or (width // heads if width and heads else None),
        "vocabulary": config.get("vocab_size"),
        "context": config.get("max_position_embeddings") or config.get("n_positions"),
        "licence": base.pop("licence", None) or about.get("licence"),
        "bytes": _weights(folder) if folder is not None else (path.stat().st_size if path is not None else None),
    }
    return ModelEntry(**base, source=source, ready=folder is not None, calibrations=calibrations(name), **facts)


def add(name: str, place: str) -> ModelEntry:
    """Give a folder, a GGUF file or a hub id a name. Raises UnsupportedModel when the name is taken or the place is
    no model."""
    if not NAME.fullmatch(name) or name in (DEMO, SMOLLM2):
        raise UnsupportedModel(
            f"'{name}' cannot be a model's name: give letters, digits, dots and dashes, and neither 'demo' nor "
            "'smollm2'."
        )
    path = Path(place).expanduser()
    whole = str(path.resolve()) if path.exists() else place
    places = added()
    if places.get(name, whole) != whole:
        raise UnsupportedModel(
            f"'{name}' is already the name of '{places[name]}': remove that first.", code="name_taken", name=name
        )
    new_entry = entry(whole)
    if new_entry.problem:
        raise UnsupportedModel(new_entry.problem)
    write_json(cache_dir() / "models.json", {**places, name: whole})
    return entry(name)


def remove(name: str) -> list[str]:
    """Forget a name, and delete what was converted for it; the user's own files stay -> what was deleted. Raises
    UnsupportedModel for a name that stands for nothing."""
    if name == DEMO:
        raise UnsupportedModel("'demo' is part of kvlens and cannot be removed.")
    places, deleted = added(), []
    if name not in places and name != SMOLLM2:
        raise UnsupportedModel(f"there is no model named '{name}' to remove; see `kvlens models`.")
    try:
        path, folder = located(name), ready(name)
    except UnsupportedModel:
        path, folder = None, None
    if path is not None and path.is_file() and folder is not None:
        shutil.rmtree(folder)
        deleted.append(str(folder))
    if name in places:
        write_json(
            cache_dir() / "models.json",
            {other_name: place for other_name, place in places.items() if other_name != name},
        )
    return deleted


def fetch(name: str, progress: Any = None) -> str:
    """Fetch a hub model's config, tokenizer and safetensors into Hugging Face's cache: the only place that asks the
    network. Raises UnsupportedModel with one sentence."""
    if not HUB_ID.fullmatch(name):
        raise UnsupportedModel(f"'{name}' is not a hub id like org/model.")
    from huggingface_hub import snapshot_download

    try:
        return str(
            snapshot_download(name, allow_patterns=["*.json", "*.safetensors", "*.model", "*.jinja", "merges.txt"])
        )
    except Exception as error:  # of the hub's client: its own errors, and those of the network's libraries
        first_line = next((line.strip() for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UnsupportedModel(f"'{name}' could not be fetched from the hub: {first_line[:200]}") from None


def calibrations(name: str) -> list[str]:
    """Methods for which a calibration of this model is shipped with kvlens: files that name method and model."""
    kinds, package = set(), Path(__file__).resolve().parents[1]
    for path in (*package.glob("*/*.json"), *package.glob("*/*/*.json")):
        content = {} if path.name == "tokenizer.json" else _json(path)
        origin, method = content.get("provenance") or content.get("about") or content, content.get("method")
        method = method or (path.parent.name if path.parent.parent.name == "methods" else None)
        if origin.get("model") == name and method:
            kinds.add(str(method))
    return sorted(kinds)


def _describe_known(name: str) -> dict[str, Any]:
    if name == DEMO:
        return {"name": name, "title": f"demo: {TOY}", "toy": True, "licence": "Apache-2.0", "source": "part of kvlens"}
    if name == SMOLLM2:
        about = SMOLLM2_ABOUT
        source = f"the package {about['package']}"
        return {"name": name, "title": about["title"], "licence": about["licence"], "source": source}
    return {"name": name, "title": Path(added().get(name, name)).name}


def _config(path: Path | None, folder: Path | None) -> dict[str, Any]:
    if folder is not None:
        results = _json(folder / "config.json")
        inner = results.get("text_config")
        return inner if isinstance(inner, dict) else results
    assert path is not None
    from kvlens.models.gguf import config_of
    from kvlens.models.ggufheader import read_header

    return config_of(read_header(path), path.name, path)


def _weights(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.glob("*.safetensors"))


def _json(path: Path) -> dict[str, Any]:
    try:
        message = load_json(path)
    except (OSError, ValueError):
        return {}
    return message if isinstance(message, dict) else {}
