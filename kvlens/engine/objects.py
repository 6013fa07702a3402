"""Models that a caller has loaded with transformers: checked like models that kvlens loads, used as they are."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from kvlens.engine import modelfiles
from kvlens.engine.models import LoadedModel, check_supported, describe_model
from kvlens.metaparts import OBJECT
from kvlens.models.errors import UnsupportedModel
from kvlens.models.find import snapshot_name
from kvlens.models.sizes import NUMBER_BYTES

UNNAMED = "model object"
"""the name of a model whose config names no source"""


class TokenizerMissing(UnsupportedModel):
    """A model object came without a tokenizer."""


def source_name(config: Any) -> str:
    """Return the source that a model's config names, of a hub model its id; UNNAMED if the config names none."""
    return snapshot_name(str(getattr(config, "_name_or_path", "") or "")) or UNNAMED


def adopt(model: Any, tokenizer: Any, name: str | None = None) -> LoadedModel:
    """Return a caller's model and tokenizer as a LoadedModel. The model keeps its weights, device and dtype. name: what
    the run calls it; None: the source that its config names.

    Raises TokenizerMissing without a tokenizer, UnsupportedModel with one sentence for any other model that kvlens
    cannot run as it is.
    """
    from transformers import PreTrainedModel

    if not isinstance(model, PreTrainedModel):
        raise UnsupportedModel(
            f"model= is a {type(model).__name__}: give a name, a folder, or a decoder loaded with "
            "transformers.AutoModelForCausalLM."
        )
    config: Any = model.config
    called = name or source_name(config)
    check_supported(config, called)
    modelfiles.check_config(config, called)
    if model.get_output_embeddings() is None:
        raise UnsupportedModel(
            f"'{called}' ({type(model).__name__}) has no language-model head: load it with "
            "transformers.AutoModelForCausalLM."
        )
    if tokenizer is None:
        raise TokenizerMissing(f"the model object '{called}' came without a tokenizer: pass tokenizer= as well.")
    _check_place(model, called)
    modelfiles.check_vocabulary(tokenizer, config, called)
    modelfiles.check_loaded(model, {}, called)
    return describe_model(called, model, tokenizer, OBJECT)


def _check_place(model: Any, name: str) -> None:
    """Raise UnsupportedModel unless all weights have one device and one dtype that kvlens runs."""
    devices = {parameter.device for parameter in model.parameters()}
    dtypes = {str(parameter.dtype).removeprefix("torch.") for parameter in model.parameters()}
    if len(devices) != 1 or next(iter(devices)).type not in ("cpu", "cuda"):
        places = ", ".join(sorted(map(str, devices)))
        raise UnsupportedModel(f"'{name}' has weights on {places}: move the model to cpu or to one CUDA device.")
    if len(dtypes) != 1 or not dtypes <= NUMBER_BYTES.keys():
        raise UnsupportedModel(
            f"'{name}' has weights of {', '.join(sorted(dtypes))}: give a model in one of {', '.join(NUMBER_BYTES)}."
        )


@contextmanager
def lent(loaded: LoadedModel) -> Iterator[None]:
    """Inside, the model attends through kvlens, in evaluation mode and without gradients of its weights. Afterwards a
    caller's model is as it was before; a model that kvlens loaded stays set up."""
    from kvlens.engine.hf_attention import ATTENTION, attending

    if loaded.origin != OBJECT:
        yield
        return
    model = loaded.model
    training = [module for module in model.modules() if module.training]
    learning = [parameter for parameter in model.parameters() if parameter.requires_grad]
    try:
        model.eval().requires_grad_(False)
        with attending(model, ATTENTION):
            yield
    finally:
        for module in training:
            module.training = True
        for parameter in learning:
            parameter.requires_grad = True
