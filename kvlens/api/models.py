"""Models of the API: loaded by name and kept while a run uses them, or handed in by the caller."""

from __future__ import annotations

import weakref
from pathlib import Path
from typing import TYPE_CHECKING, Any

from kvlens.api.errors import ModelError, translated
from kvlens.runs.request import BY_NAME, Report, RunRequest

if TYPE_CHECKING:
    from kvlens.engine.models import LoadedModel
    from kvlens.models.find import Files

    Key = tuple[str, str, str, Files]

_in_use: weakref.WeakValueDictionary[Key, LoadedModel] = weakref.WeakValueDictionary()
"""(name, device, dtype, files) -> a model that a Run or the caller still holds"""


class Named:
    """Loads the model of a request by its name, once for all runs that use it (kvlens.runs.request)."""

    named = True

    def __init__(self) -> None:
        self.loaded: LoadedModel | None = None
        """held here, so that the next run finds it"""

    def load(self, request: RunRequest, report: Report) -> LoadedModel:
        """See ModelSource."""
        from kvlens.models.device import settle
        from kvlens.models.find import files_of

        key = request.model, settle(request.device), request.dtype, files_of(request.model)
        loaded = _in_use.get(key)
        if loaded is None:
            loaded = BY_NAME.load(request, report)
            if key[3]:
                _in_use[key] = loaded
        self.loaded = loaded
        return loaded


class Given:
    """Supplies a model that the caller loaded, whichever name a request has for it."""

    def __init__(self, loaded: LoadedModel) -> None:
        from kvlens.metaparts import OBJECT

        self.loaded = loaded
        self.named = loaded.origin != OBJECT

    def load(self, request: RunRequest, report: Report) -> LoadedModel:
        """See ModelSource."""
        return self.loaded


def load_model(
    model: Any = None,
    tokenizer: Any = None,
    *,
    name: str | None = None,
    device: str | None = None,
    dtype: str | None = None,
) -> LoadedModel:
    """Return a model that is ready to run, for `model=` of `run`, `race` and `open`.

    Args:
        model: a name (`kvlens models` lists them), a folder, a .gguf file, a hub id whose files are on this machine, or
            a decoder loaded with transformers; None: the default model.
        tokenizer: of a model object; a model by name brings its own.
        name: what stored runs call a model object; None: the name that its config has.
        device: "cpu", "cuda" or "auto"; None: auto. A model object stays where it is.
        dtype: "float32", "bfloat16" or "float16"; None: float32. A model object keeps its own.

    Raises:
        ModelError: `unsupported_model`, `tokenizer_missing`, `model_is_loaded`.

    >>> load_model("demo").info["layers"]
    6
    """
    from kvlens.engine.models import LoadedModel

    with translated():
        if isinstance(model, LoadedModel):
            return model
        if model is None or isinstance(model, (str, Path)):
            source, fields = source_of(model, tokenizer, device, dtype)
            return source.load(RunRequest.model_validate(fields), lambda phase, count, total: None)
        from kvlens.engine.objects import adopt

        return _unchanged(adopt(model, tokenizer, name), device, dtype)


def place_of(loaded: LoadedModel) -> dict[str, str]:
    """Return the device and dtype of a loaded model, as a request has them."""
    return {"device": str(loaded.model.device), "dtype": str(loaded.model.dtype).removeprefix("torch.")}


def _unchanged(loaded: LoadedModel, device: str | None, dtype: str | None) -> LoadedModel:
    """Raise ModelError where another device or dtype is asked for than the loaded model has."""
    place = place_of(loaded)
    requested = {"device": device, "dtype": dtype}
    for setting, value in requested.items():
        if value not in (None, "auto", place[setting], place[setting].partition(":")[0]):
            raise ModelError(
                "model_is_loaded",
                f"the model object has the {setting} {place[setting]}, not {value}: leave out {setting}=, or convert "
                "the model.",
                name=setting,
                value=value,
                actual=place[setting],
            )
    return loaded


def source_of(
    model: Any, tokenizer: Any, device: str | None, dtype: str | None
) -> tuple[Named | Given, dict[str, str]]:
    """Return where a run's model comes from, and the request's fields that say it. Raises as `load_model`."""
    from kvlens.models.find import default_model

    if model is None or isinstance(model, (str, Path)):
        if tokenizer is not None:
            raise _tokenizer_unused()
        name = default_model() if model is None else str(model)
        return Named(), {"model": name, "device": device or "auto", "dtype": dtype or "float32"}
    loaded = _unchanged(load_model(model, tokenizer), device, dtype)
    return Given(loaded), {"model": loaded.name, **place_of(loaded)}


def _tokenizer_unused() -> ModelError:
    return ModelError("tokenizer_unused", "tokenizer= goes with a model object: a model by name brings its own.")
