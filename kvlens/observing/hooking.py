"""Hooks on a caller's model: where its passes begin and end, what logits they make, and which call of `generate` they
belong to. All of them are taken off again."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any

import torch

from kvlens.observing.calls import watching
from kvlens.observing.observer import Observer
from kvlens.observing.refusals import count_padding, refuse_beams, refuse_nested

MARK = "_kvlens_observed"


class Heard:
    """What the hooks learn beside the observer: presses at work, and what `generate` returned."""

    def __init__(self) -> None:
        self.presses: list[str] = []
        self.sequence: list[int] | None = None
        """tokens of the chosen sequence, without padding"""
        self.sampled: bool | None = None
        """the caller's generation drew its tokens; None: no call of `generate` said"""


@contextmanager
def hooked(model: Any, observer: Observer, heard: Heard) -> Iterator[None]:
    """Inside, `observer` follows the model. Raises CannotObserve for a model that is observed already, or whose
    attention cannot be observed."""
    if MARK in vars(model):
        raise refuse_nested()
    base = model.base_model

    def begin(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        _note_presses(model, heard)
        ids = kwargs.get("input_ids", args[0] if args else None)
        dropped = _dropped_tokens(model) if ids is not None and ids.shape[1] > 1 else frozenset()
        observer.begin(ids, _padding(kwargs.get("attention_mask")), kwargs.get("past_key_values"), dropped)

    def end(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        cache = kwargs.get("past_key_values")
        observer.end(getattr(output, "past_key_values", None) if cache is None else cache)

    def logits(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
        made = getattr(output, "logits", None)
        if made is not None:
            observer.logits(made)

    with ExitStack() as stack:
        stack.enter_context(watching(model, observer))
        for handle in (
            base.register_forward_pre_hook(begin, with_kwargs=True),
            base.register_forward_hook(end, with_kwargs=True),
            model.register_forward_hook(logits, with_kwargs=True),
        ):
            stack.callback(handle.remove)
        stack.enter_context(_generate_heard(model, observer, heard))
        yield


@contextmanager
def _generate_heard(model: Any, observer: Observer, heard: Heard) -> Iterator[None]:
    """Inside, a call of the model's `generate` tells how long its prompt is and what it returned."""
    original, replaced = model.generate, vars(model).get("generate")

    def generate(*args: Any, **kwargs: Any) -> Any:
        ids = kwargs.get("input_ids", kwargs.get("inputs", args[0] if args else None))
        first = observer.announced is None and isinstance(ids, torch.Tensor)
        if first and isinstance(ids, torch.Tensor):
            settings = kwargs, kwargs.get("generation_config", args[1] if len(args) > 1 else None)
            if (beams := int(_setting("num_beams", model, *settings) or 1)) > 1:
                raise refuse_beams(beams)
            mask = kwargs.get("attention_mask")
            if mask is not None and mask.dim() == 2 and observer.row < len(mask):
                observer.pads = count_padding(mask, observer.row)
            observer.announced = ids.shape[1]
            heard.sampled = bool(_setting("do_sample", model, *settings))
        result = original(*args, **kwargs)
        rows = getattr(result, "sequences", result)
        if first and isinstance(rows, torch.Tensor) and len(rows) > observer.row:
            heard.sequence = rows[observer.row].tolist()[observer.pads or 0 :]
        return result

    vars(model)[MARK] = True
    vars(model)["generate"] = generate
    try:
        yield
    finally:
        if vars(model).get("generate") is generate:
            vars(model).pop("generate")
            vars(model).update({} if replaced is None else {"generate": replaced})
        vars(model).pop(MARK, None)


def _setting(name: str, model: Any, keywords: dict[str, Any], config: Any) -> Any:
    """Return a setting of a call of `generate`: its keyword's, its generation_config's, the model's; None: none has
    it."""
    values = keywords.get(name), getattr(config, name, None), getattr(model.generation_config, name, None)
    return next((value for value in values if value is not None), None)


def _padding(mask: Any) -> torch.Tensor | None:
    return mask if isinstance(mask, torch.Tensor) and mask.dim() == 2 else None


def _dropped_tokens(model: Any) -> frozenset[int]:
    """Return the tokens that a press takes out of the embeddings: a delimiter between context and question."""
    hooks = model.get_input_embeddings()._forward_hooks.values()
    owners: list[Any] = [getattr(hook, "__self__", None) for hook in hooks]
    return frozenset(owner.delimiter_token_id for owner in owners if hasattr(owner, "delimiter_token_id"))


def _note_presses(model: Any, heard: Heard) -> None:
    """Record the kvpress presses whose hooks the attention modules carry."""
    for module in model.modules():
        for hook in module._forward_hooks.values():
            owner = getattr(hook, "__self__", None)
            if type(owner).__module__.startswith("kvpress") and (name := press_name(owner)) not in heard.presses:
                heard.presses.append(name)


def press_name(press: Any) -> str:
    """Return a press as it was made: its class with the fields that a caller sets, tensors and weights left out."""
    fields = dataclasses.fields(press) if dataclasses.is_dataclass(press) else ()
    parts = [(field.name, getattr(press, field.name, None)) for field in fields if field.init and field.name[0] != "_"]
    return f"{type(press).__name__}({', '.join(f'{name}={_value(value)}' for name, value in parts)})"


def _value(value: Any) -> str:
    if type(value).__module__.startswith("kvpress"):
        return press_name(value)
    if isinstance(value, list | tuple):
        return f"[{', '.join(map(_value, value))}]"
    return repr(value) if isinstance(value, int | float | str | None) else type(value).__name__
