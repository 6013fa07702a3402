"""Lies of plugin_lies.py about what a hook returns, holds or raises, and hooks that do not end."""

from __future__ import annotations

import functools
import os
import time
from collections.abc import Callable
from typing import Any

import torch

from kvlens.lab.studies.lies import ENDS, FIGURES, GLOBAL_TENSORS, HANGS, HIDES, Lie
from kvlens.memory.placement import Selection


def _answer(**fields: Any) -> Callable[..., Selection]:
    def act(method: Any, layer: int, q: torch.Tensor) -> Selection:
        shape = method.context.shape
        fine = torch.ones(shape.kv_heads, shape.group, method.span_ids, dtype=torch.bool)
        values = {name: value(shape) if callable(value) else value for name, value in fields.items()}
        return Selection(fine, torch.full((shape.kv_heads, 1), -1), **values)

    return act


def _figures() -> list[Lie]:
    wrong: dict[str, dict[str, Any]] = {
        "57.2 in the column `corrected`": {
            "head_columns": lambda shape: {"corrected": torch.full((shape.q_heads,), 57.2)}
        },
        "2 in the column `similarity`": {
            "kv_columns": lambda shape: {"similarity": torch.full((shape.kv_heads,), 2.0)}
        },
        "`index_bytes` of -1": {"index_bytes": -1},
        "`index_bytes` of half a byte": {"index_bytes": 0.5},
        "a cause that is none": {"cause": "wish"},
        "a span that is none": {"requested": lambda shape: torch.full((shape.kv_heads, 1), 99)},
        "a coverage of 1": {"head_columns": lambda shape: {"coverage": torch.ones(shape.q_heads)}},
        "a column of its own": {"head_columns": lambda shape: {"mine": torch.zeros(shape.q_heads)}},
    }
    lies = []
    for words, fields in wrong.items():
        act = _answer(**fields) if "requested" not in fields else _requesting(fields["requested"])
        lies.append(Lie(FIGURES, f"{words}, from `select`", "select", act, answers=True))
    return lies


def _requesting(requested: Callable[[Any], torch.Tensor]) -> Callable[..., Selection]:
    def act(method: Any, layer: int, q: torch.Tensor) -> Selection:
        shape = method.context.shape
        return Selection(torch.ones(shape.kv_heads, shape.group, method.span_ids, dtype=torch.bool), requested(shape))

    return act


def _hides() -> list[Lie]:
    places: dict[str, Callable[[torch.Tensor, torch.Tensor], Any]] = {
        "an attribute": lambda keys, values: (keys.clone(), values.clone()),
        "a dict of lists": lambda keys, values: {"kv": [[keys.clone()], [values.clone()]]},
        "a closure": lambda keys, values: _closing(keys.clone(), values.clone()),
        "a partial function": lambda keys, values: functools.partial(print, keys.clone(), values.clone()),
        "numpy arrays": lambda keys, values: [keys.numpy().copy(), values.numpy().copy()],
    }

    def hide(place: Callable[[torch.Tensor, torch.Tensor], Any]) -> Callable[..., None]:
        def act(method: Any, prompt: Any) -> None:
            method.hidden = place(prompt.keys, prompt.values)

        return act

    return [
        Lie(HIDES, f"a clone of all KV in {words}", "prefill_end", hide(place)) for words, place in places.items()
    ] + [Lie(HIDES, "a clone of all KV in a global variable", "prefill_end", _hide_globally, undo=GLOBAL_TENSORS.clear)]


def _closing(*tensors: torch.Tensor) -> Callable[[], object]:
    return lambda: tensors


def _hide_globally(method: Any, prompt: Any) -> None:
    GLOBAL_TENSORS.extend((prompt.keys.clone(), prompt.values.clone()))


class OwnError(BaseException):
    """An exception that `except Exception` does not catch."""


def _ends() -> list[Lie]:
    def raising(error: BaseException) -> Callable[..., None]:
        def act(*arguments: Any) -> None:
            raise error

        return act

    errors = (SystemExit(0), KeyboardInterrupt(), GeneratorExit(), OwnError("mine"), RuntimeError("broken"))
    return [
        Lie(ENDS, f"`{type(error).__name__}` in `{hook}`", hook, raising(error))
        for error in errors
        for hook in ("prefill_end", "select", "decode_end")
    ]


def _loop(*arguments: Any) -> None:
    while True:
        pass


def _sleep(*arguments: Any) -> None:
    time.sleep(1000)


def _read(*arguments: Any) -> None:
    os.read(os.pipe()[0], 1)


def _hangs() -> list[Lie]:
    return [
        Lie(HANGS, f"{words} in `{hook}`", hook, act)
        for hook in ("prefill_end", "select")
        for words, act in (("a loop", _loop), ("`time.sleep(1000)`", _sleep), ("a read that never returns", _read))
    ]


OUTCOME_LIES = (*_figures(), *_hides(), *_ends(), *_hangs())
